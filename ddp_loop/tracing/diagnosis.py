"""The reason why two runs with different shards differ: other samples, or a loss that scales with the shard.

[Note: Diagnosis] Let shard s have the share a_s of the mini-batch, and let it add a_s g_s to the gradient. If there are
u_s for which sum_s(u_s g_s) is the gradient of the other run, then the losses are the same function with other weights.
If the sum of all u_s is 1, the loss is a mean over something other than the samples. If it is the ratio of the numbers
of shards, the loss is a sum over the samples, or was divided by the ranks. With random numbers in the shards no such
u_s exist; then a loss and gradients that both have about that ratio indicate the same.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from ddp_loop.tracing.sample_sums import WHOLE, first_other
from ddp_loop.tracing.trace import Trace

_OF_A_SHARD = re.compile(r"(pass \d+, )?shard (\d+), (.*)", re.DOTALL)
_FITS = 1e-3  # the allowed remainder, relative to the gradient
_NEAR = 0.02  # the allowed error of a fitted ratio
_ABOUT = 0.2, 0.4  # the allowed errors of the loss's and the gradients' ratio with random numbers

SCALES = (
    "{found}: a loss that scales with the shard, since it is a sum over its samples, or was weighted by hand (loss * "
    "len(inputs) / step.samples), or divided by the number of ranks. Pass a sum as "
    'step.backward(loss, reduction="sum"), or divide it by the shard\'s samples, loss / len(inputs). Pass a mean '
    "without a weight of your own, and a mean over tokens or boxes with weight=, their number. Never divide a loss by "
    "the ranks."
)
GROWS = (
    '{found}: a loss that grows with the number of shards, since it is a mean passed with reduction="sum", or was '
    "multiplied by the number of ranks. Pass the shard's mean to step.backward(loss), or its sum with "
    'reduction="sum".'
)
WEIGHS = (
    "The shards' gradients give those of the other run with the weights {weights}; the weights by samples are "
    "{shares}. Is the loss a mean over something other than the samples (tokens, boxes)? Then give weight=, the "
    "shard's number of them, to step.backward."
)


@dataclass(frozen=True)
class OtherSample:
    """The first sample that differs, and whether it is in an integer tensor."""

    step: int
    name: str
    is_whole: bool


def other_sample(one: Trace, other: Trace) -> OtherSample | None:
    """The first sample in which two runs' mini-batches differ by more than rounding."""
    for step in one.numbers[1:]:
        here, there = (_samples(trace, step) for trace in (one, other))
        for name in here:
            number = first_other(here[name], there[name]) if name in there else None
            if number is not None:
                where = f"{name}, sample {number} of the mini-batch"
                return OtherSample(step, where, bool(here[name][number, WHOLE]))
    return None


def _samples(trace: Trace, step: int) -> dict[str, torch.Tensor]:
    """The sums of a mini-batch's samples, by part, without parts that a shard lacks."""
    shards: dict[str, dict[int, torch.Tensor]] = {}
    all_shards: dict[str, set[int]] = {}
    for key, value in trace.of_shards(step).items():
        stage, _, name = key.partition(": ")
        if stage == "data":
            turn, shard, part = split_name(name)
            all_shards.setdefault(turn, set()).add(shard)
            shards.setdefault(f"{turn}{part}", {})[shard] = value
    whole = {}
    for name, rows in shards.items():
        turn = f"{name.partition(', ')[0]}, " if name.startswith("pass ") else ""
        if set(rows) == all_shards[turn]:
            whole[name] = torch.cat([rows[shard] for shard in sorted(rows)])
    return whole


def split_name(name: str) -> tuple[str, int, str]:
    """`pass 2, shard 3, loss` as `pass 2, `, 3 and `loss`."""
    found = _OF_A_SHARD.fullmatch(name)
    if found is None:
        raise ValueError(f"An entry of a shard is named `shard S, NAME`. Got {name!r}.")
    return found[1] or "", int(found[2]), found[3]


def explain_loss(one: Trace, other: Trace, step: int, turn: str = "") -> str | None:
    """The reason why the folded loss differs, from the shards' losses and gradients; None if unknown.

    See [Note: Diagnosis].

    Args:
        one: the trace of a run, with values.
        other: that of another.
        step: in which the fold differs.
        turn: the prefix of the names of a pass, such as "pass 2, ".
    """
    few = one.head["shards"]
    many = other.head["shards"]
    if few == many:
        return None
    if few > many:  # the weights are those of the larger number of shards
        one, other, few, many = other, one, many, few
    wholes = [folded_values(trace, step, turn) for trace in (one, other)]
    (loss, gradient), (other_loss, other_gradient) = wholes
    ratios = float(other_loss / loss), float(other_gradient.norm() / gradient.norm())
    shares, parts = _shards(other, step, turn)
    if len(parts) > 1 and len(parts[0]) == len(gradient):
        reason = _by_weights(gradient, parts, shares, (few, many), ratios[0])
        if reason is not None:
            return reason
    for ratio, text in ((few / many, SCALES), (many / few, GROWS)):
        if all(abs(each / ratio - 1) < about for each, about in zip(ratios, _ABOUT, strict=True)):
            return text.format(found=_found(ratios[0], few, many))
    return None


def _found(ratio: float, few: int, many: int) -> str:
    return f"The mini-batch's loss in {many} shards is {ratio:.3g} of that in {few}, and the gradients follow it"


def _by_weights(
    gradient: torch.Tensor, parts: torch.Tensor, shares: torch.Tensor, cut: tuple[int, int], ratio: float
) -> str | None:
    """The reason given by weights u_s that fit the other run; None if none fit, or if they are the shares."""
    few, many = cut
    factors = torch.linalg.lstsq(parts.T, gradient.unsqueeze(1), driver="gelsd").solution[:, 0]
    left = float((factors @ parts - gradient).norm() / gradient.norm())
    weights = factors * shares
    total = float(weights.sum())
    if not left < _FITS:
        return None
    for expected, text in ((many / few, SCALES), (few / many, GROWS)):
        if abs(total / expected - 1) < _NEAR:
            return text.format(found=_found(ratio, few, many))
    if abs(total - 1) < _NEAR and bool((weights > -_NEAR).all()) and bool(((weights - shares).abs() > _FITS).any()):
        texts = [", ".join(f"{one:.3g}" for one in each.tolist()) for each in (weights, shares)]
        return WEIGHS.format(weights=texts[0], shares=texts[1])
    return None


def folded_values(trace: Trace, step: int, turn: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The mini-batch's loss, and `sparse_part` of its gradients."""
    values = trace.values(step)
    begin = f"{turn}gradient of "
    names = sorted(name for stage, name in values if stage == "fold" and name.startswith(begin))
    parts = [sparse_part(values["fold", name]) for name in names]
    return values["fold", f"{turn}loss"].double(), torch.cat(parts) if parts else torch.zeros(0, device="cpu")


def _shards(trace: Trace, step: int, turn: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The share of each shard, (S,), and its part of the gradients, (S, elements)."""
    weights: dict[int, float] = {}
    gradients: dict[int, dict[str, torch.Tensor]] = {}
    for key, value in trace.of_shards(step).items():
        stage, _, name = key.partition(": ")
        if stage in ("forward", "backward"):
            of, shard, what = split_name(name)
            if of == turn and stage == "backward":
                gradients.setdefault(shard, {})[what] = value
            elif of == turn and what == "weight":
                weights[shard] = float(value)
    nothing = {name: torch.zeros_like(value) for each in gradients.values() for name, value in sorted(each.items())}
    names = sorted(nothing)
    shards = sorted(shard for shard in gradients if weights.get(shard))
    if not names or not shards:
        return torch.zeros(0, device="cpu"), torch.zeros(0, 0, device="cpu")
    share = torch.tensor([weights[shard] for shard in shards], dtype=torch.float64, device="cpu")
    parts = [torch.cat([gradients[shard].get(name, nothing[name]) for name in names]) for shard in shards]
    return share / share.sum(), torch.stack(parts)


def sparse_part(gradient: torch.Tensor, most: int = 4096) -> torch.Tensor:
    """Some elements of a gradient, float64 on the CPU: enough to find linear relations between gradients."""
    flat = gradient.detach().reshape(-1)
    flat = flat[:: max(1, -(-len(flat) // most))].to("cpu")
    return (torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat).to(torch.float64, copy=True)
