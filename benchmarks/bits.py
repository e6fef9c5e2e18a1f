"""Whether this checkout trains the bits of another one, on 1, 2 and 3 ranks, also a run that the other one began.

    python -m benchmarks bits CHECKOUT [JOB ...]

Each checkout runs the examples of this one with a fixed seed. Compared are the last checkpoint's tensors (parameters,
buffers, the optimizer's state), byte for byte, and all rows but their times. Then this checkout resumes the other one's
run from its checkpoint before the last, and must end with the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.measuring import print_table

HERE = Path(__file__).parents[1]
RANKS = (1, 2, 3)
_GAN = ["gan.py", "--epochs", "2", "--points", "1000"]
_TOKENS = ["tokens.py", "--epochs", "2", "--sentences", "150"]
_SEQUENCES = ["sequences/train.py", "--epochs", "2", "--sequences", "60"]
_DIGITS = ["digits/train.py", "--epochs", "2", "--data", "handwritten", "--batch-size", "100"]
_FIXED = ["--shards", "5"]
JOBS = {
    "two networks": _GAN,
    "two networks, 5 shards": [*_GAN, *_FIXED],
    "uneven tokens": _TOKENS,
    "uneven tokens, 5 shards": [*_TOKENS, *_FIXED],
    "recurrent, 5 shards": [*_SEQUENCES, *_FIXED],
    "batch norm": _DIGITS,
    "batch norm, 5 shards": [*_DIGITS, *_FIXED],
    "bfloat16, channels last": [*_DIGITS, "--precision", "bf16", "--channels-last"],
}
_TIMES = ("elapsed_s", "samples_per_s")


def train(checkout: Path, job: list[str], ranks: int, run: Path) -> str:
    """Train with the package of a checkout, or go on; returns a digest of the last checkpoint's tensors and the rows.

    Raises:
        RuntimeError: the training failed.
    """
    script, *arguments = job
    launch = [sys.executable, "-m", "ddp_loop", "run", "--ranks", str(ranks)]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, str(HERE / "examples" / script), "--run-dir", str(run), "--device", "cpu", *arguments],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(job)} on {ranks} ranks failed with {checkout}:\n{done.stderr[-2000:]}")
    rows = [json.loads(line) for line in (run / "rows.jsonl").read_text().splitlines()]
    kept = [{name: value for name, value in row.items() if name not in _TIMES} for row in rows]
    tensors = (_checkpoints(run)[-1] / "tensors.safetensors").read_bytes()
    return hashlib.sha256(tensors + json.dumps(kept).encode()).hexdigest()


def _checkpoints(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").glob("step-*"))


def compare(other: Path, job: list[str], ranks: int) -> tuple[str, str, str]:
    """The digests of the other checkout's run, of this one's, and of the other's that this one went on with."""
    with tempfile.TemporaryDirectory() as folder:
        theirs = Path(folder, "theirs")
        before = train(other, job, ranks, theirs)
        now = train(HERE, job, ranks, Path(folder, "ours"))
        shutil.rmtree(_checkpoints(theirs)[-1])
        return before, now, train(HERE, job, ranks, theirs)


def report(parts: Iterable[str]) -> None:
    """Print the table: another checkout's folder, then jobs, by default all."""
    folder, *names = parts
    other = Path(folder).resolve()
    print_table("job | ranks | bits | resumed", (row for name in names or JOBS for row in _rows(other, name)), words=1)


def _rows(other: Path, name: str) -> Iterator[tuple[object, ...]]:
    for ranks in RANKS:
        before, now, resumed = compare(other, JOBS[name], ranks)
        yield name, ranks, *("the same" if found == before else "OTHERS" for found in (now, resumed))
