"""Torch's elastic agent without its messages: how signals reach the ranks, and with which code the launcher ends.

[Note: Signals of a launcher] The ranks are in sessions of their own, so Ctrl-C reaches them through the agent alone.
The first one is passed on, and the ranks stop with a checkpoint; all that ended with code 0 make the launcher end with
0. Ranks that are not in a loop are ended by it, and the launcher ends with 130, as after a second one. The second is
passed on too, and what still runs after 2 s is killed; the third kills at once. SIGTERM is passed on likewise, and
SIGHUP as SIGTERM, since its default would end a rank without a checkpoint; after `nohup` it is ignored. Once the ranks
are asked to stop, more of these two change nothing: supervisors repeat SIGTERM, or send SIGHUP after it.

An agent whose ranks are done waits up to 300 s for the other hosts' agents. After Ctrl-C all hosts end, but torch's
agent leaves without a word on the host that got it. This one tells the others that it is done. After SIGTERM it does
not: the other hosts go on without this one.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic import events, metrics
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError, RendezvousParameters
from torch.distributed.launcher.api import LaunchConfig

from ddp_loop.elastic.process_states import INTERRUPTED_EXIT
from ddp_loop.elastic.rank_processes import RankProcesses
from ddp_loop.elastic.rendezvous import make_rendezvous

_SECOND_S = 2  # from the second Ctrl-C to the end of the ranks
_SHUTDOWN_S = 30  # from a signal to SIGKILL, where torch has no option for it
_QUIET = "torch.distributed.elastic."


class Agent(LocalElasticAgent):
    """The agent of one host. See [Note: Signals of a launcher].

    Attributes:
        leaves_others: whether this host was ended alone, and the rendezvous stays open for the others.
    """

    def __init__(self, spec: WorkerSpec, config: LaunchConfig) -> None:
        more: dict[str, Any] = (
            {"shutdown_timeout": config.shutdown_timeout} if hasattr(config, "shutdown_timeout") else {}
        )
        super().__init__(
            spec=spec,
            logs_specs=config.logs_specs or DefaultLogsSpecs(),
            start_method=config.start_method,
            log_line_prefix_template=config.log_line_prefix_template,
            **more,
        )
        self._ignores_hangups = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        self._stops_to_restart = self._has_met = self.leaves_others = False
        self._ranks: RankProcesses | None = None

    def exit_code(self) -> int:
        """Run the ranks until they have ended, and return the exit code of the launcher."""
        try:
            result = self.run()
        except SignalException as asked:
            return self._code_after(asked.sigval)
        return 1 if result is not None and result.is_failed() else 0

    def _code_after(self, number: signal.Signals) -> int:
        self.leaves_others = number != signal.SIGINT
        if self._pcontext is None:  # no rank was started
            return 128 + number
        if self._monitor_workers(self._worker_group).state != WorkerState.SUCCEEDED:
            is_interrupted = self._ranks is not None and self._ranks.are_interrupted()
            return INTERRUPTED_EXIT if is_interrupted else 1
        if number == signal.SIGINT and not self._has_met:
            self._exit_barrier()
        return 0

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        found: dict[int, Any] = super()._start_workers(worker_group)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _ask_to_stop)
        if self._ignores_hangups:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
        timeout_s = getattr(self, "_shutdown_timeout", _SHUTDOWN_S)
        self._ranks = RankProcesses(self._pcontext, ranks, timeout_s)
        return found

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED and self._ranks is not None:
            of = self._worker_group.spec.max_restarts
            left = self._remaining_restarts
            self._ranks.describe_rest(f"the ranks start again (restart {of - left + 1} of {of})" if left > 0 else "")
        return result

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._stops_to_restart = True
        super()._stop_workers(worker_group)
        self._stops_to_restart = False

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *timeout: int, **named_timeout: int) -> None:
        passed_on = signal.SIGTERM if death_sig == signal.SIGHUP else death_sig
        try:
            super()._shutdown(passed_on, *timeout, **named_timeout)  # torch 2.11 has no timeout here
        except SignalException as second:
            if self._stops_to_restart:  # it is the first: the ranks get it, and time
                self._stops_to_restart = False
                raise
            if self._ranks is not None:
                self._ranks.are_ended = second.sigval == signal.SIGINT
            try:
                self._close_ranks(second.sigval, _SECOND_S)
            except SignalException:
                self._close_ranks(signal.SIGKILL, 1)
            raise second from None

    def _close_ranks(self, death_sig: signal.Signals, timeout_s: int) -> None:
        if self._pcontext is not None:
            self._pcontext.close(death_sig, timeout_s)

    def _exit_barrier(self) -> None:
        self._has_met = True
        super()._exit_barrier()  # type: ignore[no-untyped-call]


def _ask_to_stop(number: int, frame: FrameType | None) -> None:
    for other in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(other, signal.SIG_IGN)
    asked = signal.Signals(number)
    raise SignalException(f"Process {os.getpid()} got signal: {asked}", asked)


def run_agent(config: LaunchConfig, entrypoint: Callable[..., Any] | str, arguments: Sequence[str]) -> int:
    """Run the ranks of this host until they have ended, as `torch.distributed.launcher.api.launch_agent` does.

    Returns:
        The exit code: 0, or 1 if a rank ended with another one than 0.
    """
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = getattr(config, "signals_to_handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT")
    parameters = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )
    alike = {one.name for one in fields(WorkerSpec)} & {one.name for one in fields(LaunchConfig)}
    with _quiet():
        try:
            handler = make_rendezvous(parameters)
            atexit.register(getattr, handler, "shutdown")  # keeps it: its thread would stop itself, with a traceback
            spec = WorkerSpec(
                local_world_size=config.nproc_per_node,
                entrypoint=entrypoint,
                args=tuple(arguments),
                rdzv_handler=handler,
                **{name: getattr(config, name) for name in alike},
            )
            metrics.initialize_metrics(metrics.MetricsConfig(config.metrics_cfg))
            agent = Agent(spec, config)
            code = agent.exit_code()
        except (RendezvousError, dist.DistError) as error:  # the latter of the store, where torch's agent uses it
            sys.stderr.write(f"ddp_loop: The hosts did not meet at {config.rdzv_endpoint}: {_why(error)}\n")
            return 1
        if not agent.leaves_others:
            handler.shutdown()
        event = agent.get_event_failed() if code else agent.get_event_succeeded()
        events.record(event, config.event_log_handler or "null")
        return code


def _why(error: Exception) -> str:
    """Why the hosts did not meet, and the remedy. torch's own errors often say nothing, or name their cause alone."""
    if isinstance(error, RendezvousClosedError):
        return "the job of this --rdzv-id has ended there. Pass another one."
    said = str(error.__cause__ or error).partition("\n")[0].rstrip(".?")
    return (
        f"{said or 'fewer than --nnodes came in time'}. Start `run` on every host, with the same address, port, "
        "--nnodes and --rdzv-id, and open the port between the hosts."
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out what torch's agent logs, unless LOGLEVEL asks for it."""
    names = [] if "LOGLEVEL" in os.environ else [*logging.root.manager.loggerDict]
    loggers = [logging.getLogger(name) for name in names if name.startswith(_QUIET)]
    for one in loggers:
        one.disabled = True
    try:
        yield
    finally:
        for one in loggers:
            one.disabled = False
