"""Reinforcement learning: PPO with environments spread over the ranks, to balance a pole on a cart.

One process:      python train.py
All your GPUs:    ddp_loop run train.py
Two CPU ranks:    ddp_loop run --ranks 2 train.py

The data of the loop are the numbers of the environments, and a step takes all of them. So a shard is a group of
environments: its rank plays them with the policy as it is now, and each further pass over the step learns from the same
rollouts. Actions are drawn from the stream of the shard, so with `--shards 4` a run has the same bits on any ranks.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributions import Categorical
from torch.nn.functional import mse_loss

import ddp_loop as dl

LIMIT = torch.tensor([2.4, torch.inf, 0.2095, torch.inf])  # of position and angle, beyond which an episode ends
MOST_STEPS = 500  # of an episode
DISCOUNT = 0.99
TRACE = 0.95  # lambda of the advantages
CLIP = 0.2


class CartPoles:
    """Poles on carts, to be balanced by pushing left or right; a new episode begins where one has ended.

    The equations are Barto, Sutton, Anderson: Neuronlike adaptive elements that can solve difficult learning control
    problems, 1983.

    Args:
        count: n, of the environments.
        device: of all tensors.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self.limit = LIMIT.to(device)
        self.state = self.begin(count)  # position, velocity, angle and its velocity, (n, 4)
        self.steps = torch.zeros(count, device=device)  # of the episode, (n,)

    def begin(self, count: int) -> torch.Tensor:
        return 0.1 * torch.rand(count, 4, device=self.limit.device) - 0.05

    def step(self, pushes_right: torch.Tensor) -> torch.Tensor:
        """Push each cart; returns whether its episode has ended, (n,) bool."""
        _, velocity, angle, spin = self.state.unbind(1)
        force = 20.0 * pushes_right - 10.0
        sine = angle.sin()
        cosine = angle.cos()
        pushed = (force + 0.05 * spin.square() * sine) / 1.1
        turn = (9.8 * sine - cosine * pushed) / (0.5 * (4 / 3 - 0.1 * cosine.square() / 1.1))
        speed_up = pushed - 0.05 * turn * cosine / 1.1
        self.state = self.state + 0.02 * torch.stack([velocity, speed_up, spin, turn], dim=1)
        self.steps = self.steps + 1
        has_ended = (self.state.abs() > self.limit).any(1) | (self.steps >= MOST_STEPS)
        self.state = torch.where(has_ended[:, None], self.begin(len(self.state)), self.state)
        self.steps = torch.where(has_ended, 0.0, self.steps)
        return has_ended


@dataclass
class Rollout:
    """What a shard's environments played, (time, n) each; `states` (time, n, 4)."""

    states: torch.Tensor
    actions: torch.Tensor
    chances: torch.Tensor  # the logarithms of the actions' probabilities
    advantages: torch.Tensor
    returns: torch.Tensor
    falls: torch.Tensor  # the number of episodes that ended, shape ()


class Agent(nn.Module):
    """A policy and a value for each state: (..., 4) -> the logits of both actions (..., 2), and the value (...)."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))
        self.value = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.policy(states), self.value(states).squeeze(-1)


@torch.no_grad()
def play(agent: Agent, count: int, time: int, device: torch.device) -> Rollout:
    """Play `count` environments from new episodes on, for `time` steps."""
    carts = CartPoles(count, device)
    states = torch.empty(time + 1, count, 4, device=device)
    actions = torch.empty(time, count, device=device)
    ends = torch.empty(time, count, device=device)
    for at in range(time):
        states[at] = carts.state
        actions[at] = Categorical(logits=agent(carts.state)[0]).sample()
        ends[at] = carts.step(actions[at])
    states[time] = carts.state
    logits, values = agent(states)
    advantages = torch.zeros_like(actions)
    following = torch.zeros(count, device=device)
    for at in reversed(range(time)):  # generalized advantage estimation; the reward of each step is 1
        goes_on = 1 - ends[at]
        error = 1 + DISCOUNT * goes_on * values[at + 1] - values[at]
        following = error + DISCOUNT * TRACE * goes_on * following
        advantages[at] = following
    chances = Categorical(logits=logits[:-1]).log_prob(actions)
    return Rollout(states[:-1], actions, chances, advantages, advantages + values[:-1], ends.sum())


def loss_of(agent: Agent, rollout: Rollout, spread: float) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's loss, shape (), and the entropy of the policy in each environment, (n,).

    Args:
        agent, rollout: the policy, and what it or an earlier one played.
        spread: the advantages are divided by this number.

    Source: Schulman and others: Proximal policy optimization algorithms, 2017.
    """
    logits, values = agent(rollout.states)
    actions = Categorical(logits=logits)
    ratio = (actions.log_prob(rollout.actions) - rollout.chances).exp()
    advantages = rollout.advantages / spread
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()
    entropy = actions.entropy()
    loss = 0.5 * mse_loss(values / spread, rollout.returns / spread) - gain - 0.01 * entropy.mean()
    return loss, entropy.mean(0).detach()


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Balance a pole by PPO.")
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--environments", type=int, default=32, help="of all ranks")
    parser.add_argument("--time", type=int, default=128, help="steps that each is played for an update")
    parser.add_argument("--passes", type=int, default=6, help="over what was played")
    parser.add_argument("--shards", type=int, help="groups of environments (default: one per rank)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=["auto", "cpu", "gpu"], default="auto")
    parser.add_argument("--run-dir", help="folder of the run, which then resumes; nothing is written without it")
    return parser.parse_args()


def main() -> None:
    arguments = read_arguments()
    with dl.join_world(device=arguments.device, seed=arguments.seed) as world:
        agent = Agent().to(world.device)
        optimizer = torch.optim.Adam(agent.parameters(), lr=0.003)
        numbers = torch.arange(arguments.environments)
        batches = dl.Batches(numbers, arguments.environments, world, shards=arguments.shards, shuffle=False)
        scale = {"spread": 10.0}  # of the advantages of the update before
        state = {"agent": agent, "optimizer": optimizer, "scale": scale}
        loop = dl.Loop(batches, arguments.updates, run_dir=arguments.run_dir, state=state, progress=False)
        for step in loop:
            rollouts: list[Rollout] = []
            for learned in range(arguments.passes):
                for shard, environments in enumerate(step):
                    if learned == 0:
                        rollouts.append(play(agent, len(environments), arguments.time, world.device))
                    rollout = rollouts[shard]
                    loss, surprise = loss_of(agent, rollout, scale["spread"])
                    squares = rollout.advantages.square().mean(0)
                    step.backward(loss, entropy=surprise, falls=dl.Sum(rollout.falls), squares=squares)
                result = step.fold()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
            scale["spread"] = max(float(result.metrics["squares"]) ** 0.5, 1.0)
            if step.iteration % 10 == 0 or step.iteration == arguments.updates:
                falls = 1000 * float(result.metrics["falls"]) / (arguments.environments * arguments.time)
                entropy = float(result.metrics["entropy"])
                world.print(f"Update: {step.iteration}, Falls in 1,000 steps: {falls:.1f}, Entropy: {entropy:.3f}")


if __name__ == "__main__":
    main()
