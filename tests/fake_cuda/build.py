"""Builds the fake device once into `build/`, and starts processes with it."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sysconfig
from functools import cache
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths

from tests.support.paths import ROOT as ROOT

HERE = Path(__file__).parent
SOURCES = ("device.h", "device.cpp", "nccl.cpp", "preloaded.cpp")
EXTENSION = "fake_cuda_extension"
START = """import os
if os.environ.get("FAKE_CUDA"):
    if os.environ["FAKE_CUDA_KIND"] == "npu":
        import tests.fake_cuda.npu
    else:
        import tests.fake_cuda.cuda, tests.fake_cuda.kernels
    if os.environ.get("PLANTED_GPU_FAULTS"):
        from tests.support.gpu_faults import plant
        plant()
"""


class NoFakeCuda(Exception):
    """Why there is no fake device here, in one line."""


def _key() -> str:
    """Changes with the sources and with torch."""
    sha = hashlib.sha256(f"{START} {torch.__version__} {sysconfig.get_config_var('SOABI')}".encode())
    for name in SOURCES:
        sha.update((HERE / name).read_bytes())
    return sha.hexdigest()[:16]


@cache
def build() -> Path:
    """The folder of the built device; builds it, once for all processes, if it is not there: a minute.

    Raises:
        NoFakeCuda: there is no compiler, torch is not a CPU build, or the sources do not compile.
    """
    if torch.version.cuda is not None or torch.version.hip is not None:
        raise NoFakeCuda(f"the fake GPU needs a CPU build of torch; this one is {torch.__version__}")
    folder = ROOT / "build" / "fake_cuda" / _key()
    if (folder / "done").exists():
        return folder
    if (compiler := shutil.which("g++")) is None:
        raise NoFakeCuda("the fake GPU needs a C++ compiler, and there is no g++ here (Debian: g++)")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        import fcntl

        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            _compile(compiler, folder)
            (folder / "sitecustomize.py").write_text(START)
            (folder / "done").touch()
    return folder


def _compile(compiler: str, folder: Path) -> None:
    flags = ["-O1", "-w", "-fPIC", "-std=c++17", f"-DTORCH_EXTENSION_NAME={EXTENSION}"]
    flags += ["-DTORCH_API_INCLUDE_EXTENSION_H", "-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO"]
    flags += [f"-I{path}" for path in (*include_paths(), sysconfig.get_paths()["include"])]
    libraries = Path(torch.__file__).parent / "lib"
    extension = folder / f"{EXTENSION}{sysconfig.get_config_var('EXT_SUFFIX')}"
    # As one file: most of the minute goes into torch's headers.
    sources = ["-include", str(HERE / "device.cpp"), str(HERE / "nccl.cpp")]
    linked = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    for command in (
        ["-shared", *flags, *sources, "-o", str(extension), *linked],
        ["-shared", *flags, str(HERE / "preloaded.cpp"), "-o", str(folder / "preloaded.so"), "-ldl"],
    ):
        done = subprocess.run([compiler, *command], stderr=subprocess.PIPE, text=True, check=False)
        _require(done.returncode == 0, done.stderr)


def _require(is_built: bool, said: str) -> None:
    """Raise NoFakeCuda with the first error that the compiler said, unless it built what it should."""
    if not is_built:
        first = next((line for line in said.splitlines() if "error" in line), said[-200:])
        raise NoFakeCuda(f"the fake GPU does not compile with torch {torch.__version__}: {first}")


def environment(devices: int, kind: str = "cuda", **settings: str) -> dict[str, str]:
    """The variables of a process with so many fake devices.

    Args:
        devices: their number.
        kind: "cuda", or "npu" for the same device as an extension of torch has it.
        settings: of `cuda.VARIABLES`, without their prefix, in small letters: `name="Fake MIG 1g"`, `memory="1000000"`
            (bytes of each), `shared="1"` (ranks share a device), `slow_s="1.2"` (until an event is reached),
            `idle_s="1"` (until NCCL closes connections of its own),
            `errors="folder"` (each process that had kernels writes there at its end what `device.errors` found).

    Raises:
        NoFakeCuda: as `build`.
    """
    folder = build()
    paths = [str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        "FAKE_CUDA": "1",
        "FAKE_CUDA_KIND": kind,
        "FAKE_CUDA_DEVICES": str(devices),
        **({"LD_PRELOAD": str(folder / "preloaded.so")} if kind == "cuda" else {}),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        **{f"FAKE_CUDA_{name.upper()}": value for name, value in settings.items()},
    }
