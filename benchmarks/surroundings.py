"""What a run needs around it: the alternatives' environment, the slower disk, and a description of
the machine.

Everything is built once, below `build/` or beside the project's own environment, and reused.
Whatever can't be had is reported as a sentence, and the run goes on without it.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path

import apsw
from msgspec import Struct

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
BUILD = ROOT / "build" / "benchmarks"
ENVIRONMENT = ROOT / ".venv-bench"
REQUIREMENTS = HERE / "requirements.txt"
SYNC_DELAY_US = 1_000


class Unavailable(Exception):
    """Something that the run can do without is missing, and why."""


class Machine(Struct, frozen=True):
    """What the figures depend on, and nothing that says whose machine it is."""

    cores: int
    memory_gib: int
    kernel: str
    python: str
    sqlite: str
    apsw: str
    trio: str


def describe_machine() -> Machine:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(
        cores=len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1,
        memory_gib=round(memory / 2**30),
        kernel=f"{platform.system()} {'.'.join(platform.release().split('-')[0].split('.')[:2])}",
        python=platform.python_version(),
        sqlite=apsw.sqlite_lib_version(),
        apsw=apsw.apsw_version(),
        trio=version("trio"),
    )


def slow_disk() -> dict[str, str]:
    """Environment variables that put the slower disk under a child process."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if sys.platform != "linux" or compiler is None:
        raise Unavailable("the 1 ms disk needs Linux and a C compiler (cc): left out")
    BUILD.mkdir(parents=True, exist_ok=True)
    library = BUILD / "slow_sync.so"
    source = HERE / "slow_sync.c"
    command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"the 1 ms disk could not be compiled: {done.stderr.strip()[-200:]}")
    return {"LD_PRELOAD": str(library), "SYNC_DELAY_US": str(SYNC_DELAY_US)}


def alternatives_python() -> Path:
    """The Python that has the alternatives; builds its environment when the pins have changed."""
    python = ENVIRONMENT / "bin" / "python"
    stamp = ENVIRONMENT / ".installed"
    wanted = blake2b(REQUIREMENTS.read_bytes(), digest_size=16).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    shutil.rmtree(ENVIRONMENT, ignore_errors=True)
    try:
        # Without ensurepip, which a system Python may lack: the pip at hand installs from outside.
        _run(sys.executable, "-m", "venv", "--without-pip", str(ENVIRONMENT))
        _run(
            *(sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"),
            *("--python", str(python), "install", "-r", str(REQUIREMENTS)),
        )
    except Unavailable as error:
        shutil.rmtree(ENVIRONMENT, ignore_errors=True)
        raise Unavailable(f"the alternatives can't be installed, left out: {error}") from None
    stamp.write_text(wanted)
    return python


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable((done.stderr or done.stdout).strip()[-300:])


def sync_cost_us(folder: Path, environment: dict[str, str]) -> float:
    """The median time of one sync on this disk, measured in a child as the contenders meet it."""
    script = (
        "import os, sys, time\n"
        "file = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR)\n"
        "took = []\n"
        "for n in range(200):\n"
        "    os.pwrite(file, os.urandom(4096), n % 64 * 4096)\n"
        "    begun = time.perf_counter()\n"
        "    os.fdatasync(file)\n"
        "    took.append(time.perf_counter() - begun)\n"
        "print(sorted(took)[100] * 1e6)\n"
    )
    path = folder / "sync"
    command = [sys.executable, "-c", script, str(path)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, **environment}
    )
    path.unlink()
    return float(done.stdout)
