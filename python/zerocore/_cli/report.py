"""`zerocore report`: what zerocore finds on this machine, and whether two ranks can talk to each other."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import zerocore
from zerocore._launcher import machine
from zerocore._launcher.job import Job
from zerocore._launcher.mpi import find_mpirun, mpi_library
from zerocore._launcher.run import show_first
from zerocore._launcher.server import Event
from zerocore._launcher.signals import Signals
from zerocore.errors import ConfigError, Error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("--no-self-test", action="store_true", help="start no ranks")


def run(arguments: argparse.Namespace) -> int:
    """Prints the report. Returns 0 when the self-test passes."""
    for name, value in _facts():
        print(f"{name:<14}{value}", flush=True)
    if arguments.no_self_test:
        return 0
    passed, result = _self_test()
    print(f"{'self-test':<14}{result}")
    return 0 if passed else 1


def _facts() -> Iterator[tuple[str, str]]:
    here = Path.cwd()
    yield "zerocore", f"{zerocore.__version__}, in {Path(zerocore.__file__).parent}"
    yield "built with", _from_core(lambda core: str(core.compiler))
    yield "MPI plugins", ", ".join(_plugins()) or "none: jobs have one rank"
    yield "Python", f"{platform.python_version()}, {sys.executable}"
    yield "torch", _version("torch")
    yield "mpi4py", _version("mpi4py")
    yield "MPI library", _or_error(mpi_library)
    yield "mpirun", _or_error(lambda: find_mpirun().path)
    yield "system", f"{platform.system()} {platform.release()}, {platform.machine()}"
    yield "processor", machine.processor()
    yield "threads", f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', '(not set: 1 in jobs of several ranks)')}"
    yield "memory", machine.memory()
    yield "huge pages", machine.huge_pages()
    found = machine.gpus()
    yield "devices", "CPU" + (f", {found} NVIDIA GPUs" if found else "")
    yield "CUDA", _from_core(lambda core: str(core.cuda_status()[2]))
    yield "working folder", ""
    yield "  file system", machine.file_system(here)
    yield "  O_DIRECT", machine.direct_io(here)
    yield "io_uring", machine.io_uring()
    yield "libaio", machine.libaio()


def _from_core(ask: Callable[[Any], str]) -> str:
    try:
        from zerocore import _core
    except ImportError as error:
        return f"the core cannot be loaded: {error}"
    return ask(_core)


def _plugins() -> list[str]:
    folder = Path(zerocore.__file__).parent
    return sorted(file.stem.removeprefix("libzc_mpi_") for file in folder.glob("libzc_mpi_*.so"))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _or_error(ask: Callable[[], str]) -> str:
    try:
        return ask()
    except Error as error:
        return str(error)


def _self_test() -> tuple[bool, str]:
    told: list[Event] = []
    try:
        mpirun = find_mpirun()
    except ConfigError:
        return False, "not run: there is no MPI for two ranks"
    start = time.monotonic()
    outcome = Job(
        [sys.executable, "-u", "-m", "zerocore._launcher.selftest"],
        ranks=2,
        mpirun=mpirun,
        env=os.environ,
        grace_s=5,
        signals=Signals(),
        on_failure=show_first,
        on_event=told.append,
    ).run()
    results = [event.fields for event in told if event.name == "progress"]
    if outcome.code or len(results) != 2 or not all(result["right"] for result in results):
        return False, f"FAILED: two ranks through {mpirun.path} ended with exit code {outcome.code}"
    slowest = max(float(result["microseconds"]) for result in results)
    return True, f"passed: two ranks, {time.monotonic() - start:.1f} s in all, {slowest:.0f} us a small all-reduce"
