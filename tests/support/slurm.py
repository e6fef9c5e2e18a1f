"""A Slurm of its own on this machine: munged, slurmctld and slurmd, in a temporary folder and on free ports.

[Note: One machine] The node has four cores, however many there are (`config_overrides`), and no cgroups, which a
container may not make. `cred_expire` is how long a requeued job waits before it starts again: 120 s by default.
"""

from __future__ import annotations

import getpass
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import guard
from tests.support.harness import held_ports, until

START_S, END_S, COMMAND_S = 30.0, 30.0, 120.0
CORES = 4
LOG_LETTERS = 4000
NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
SYSTEM_FOLDERS = "/usr/sbin:/sbin"  # of the daemons, which are not on every user's PATH

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
MpiDefault=none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0,bf_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
KillWait=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} RealMemory=100000 State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=10 State=UP PriorityTier=1 GraceTime=5
PartitionName=urgent Nodes={host} MaxTime=10 State=UP PriorityTier=2
"""


@dataclass(frozen=True)
class Slurm:
    """A Slurm that runs.

    Args:
        folder: its configuration, logs and state.
        environment: the variables by which Slurm's commands find it.
    """

    folder: Path
    environment: Mapping[str, str]

    def run(self, *command: str, folder: Path | None = None) -> str:
        """The output of one of Slurm's commands."""
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            cwd=folder or self.folder,
            env={**os.environ, **self.environment},
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}{self.logs()}"
        return done.stdout

    def logs(self) -> str:
        """The ends of the daemons' logs."""
        return "".join(
            f"\n== {log.name}\n{log.read_text()[-LOG_LETTERS:]}" for log in sorted(self.folder.glob("*.log"))
        )

    def is_idle(self) -> bool:
        """Whether its node can take jobs."""
        command = ["sinfo", "--noheader", "--partition=main", "--format=%T"]
        environment = {**os.environ, **self.environment}
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=COMMAND_S, env=environment)
        return done.stdout.split() == ["idle"]


def written(folder: Path, controller_port: int, node_port: int) -> list[dict[str, object]]:
    """Write the configuration and the key into a folder; returns the servers, for `tests.support.guard`."""
    configuration, key = folder / "slurm.conf", folder / "munge.key"
    values = {"folder": folder, "host": socket.gethostname().partition(".")[0], "user": getpass.getuser()}
    ports = {"controller_port": controller_port, "node_port": node_port}
    configuration.write_text(CONFIGURATION.format(**values, **ports, cores=CORES))
    key.touch(0o600)
    key.write_bytes(secrets.token_bytes(1024))
    for name in ("state", "spool"):
        (folder / name).mkdir(mode=0o755)
    munge = {name: f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")}
    return [
        {
            "command": ["munged", "--foreground", f"--socket={folder}/munge.socket", *munge.values()],
            "log": f"{folder}/munge.log",
            "makes": f"{folder}/munge.socket",
        },
        {
            "command": ["slurmctld", "-D", "-c", "-f", str(configuration)],
            "log": f"{folder}/slurmctld.log",
            "makes": f"{folder}/state/clustername",
        },
        {
            "command": ["slurmd", "-D", "-f", str(configuration)],
            "log": f"{folder}/slurmd.log",
            "makes": f"{folder}/slurmd.pid",
        },
    ]


@contextmanager
def running_slurm() -> Iterator[Slurm]:
    """Start a Slurm; its daemons and jobs are ended and its folder removed at the end, also after a failure."""
    path = f"{os.environ['PATH']}:{SYSTEM_FOLDERS}"
    for program in NEEDED:
        if shutil.which(program, path=path) is None:
            pytest.skip(f"needs {program}, which is not installed")
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    try:
        folder.chmod(0o755)  # munged refuses a socket that others cannot reach
        slurm = Slurm(folder, {"SLURM_CONF": str(folder / "slurm.conf")})
        environment = {**os.environ, **slurm.environment, "PATH": path}
        with (
            held_ports(2) as ports,
            subprocess.Popen(
                [sys.executable, guard.__file__, json.dumps(written(folder, *ports))],
                stdin=subprocess.PIPE, cwd=folder, env=environment,
            ) as process,
        ):  # fmt: skip
            assert process.stdin is not None
            try:
                wait_until_idle(slurm)
                yield slurm
            finally:
                process.stdin.close()
                end(process)
    finally:
        shutil.rmtree(folder)


def end(guarding: subprocess.Popen[bytes]) -> None:
    """Wait until the guard has ended all that it started."""
    try:
        guarding.wait(END_S)
    except subprocess.TimeoutExpired:
        guarding.kill()
        raise


def wait_until_idle(slurm: Slurm) -> None:
    """Wait until the node can take jobs; on a timeout the error shows the logs."""
    try:
        until(slurm.is_idle, "Slurm's node is idle", START_S)
    except AssertionError as error:
        raise AssertionError(f"{error}{slurm.logs()}") from None
