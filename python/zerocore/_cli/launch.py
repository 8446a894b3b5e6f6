"""`zerocore [OPTIONS] script.py [ARGUMENT ...]`: starts a script on the ranks of one job."""

from __future__ import annotations

import argparse
import sys

from zerocore import _core
from zerocore._launcher import machine
from zerocore._launcher.run import Options, launch, say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.usage = (
        "zerocore [--num_ranks N | --num_gpus N] [--max-restarts K] [--min-ranks M] [--grace-seconds S] "
        "(script.py | -m module) [argument ...]"
    )
    parser.description = (
        "Starts a Python script on N ranks, through the mpirun of the MPI library that mpi4py uses; on one rank "
        "without MPI. The first failure is shown first; its exit code is this command's. SIGTERM or Ctrl-C asks the "
        "ranks to finish their step, save and end; a second one ends them now."
    )
    count = parser.add_mutually_exclusive_group()
    count.add_argument("--num_ranks", "--num-ranks", type=_positive, metavar="N", help="ranks to start (default: 1)")
    count.add_argument(
        "--num_gpus", "--num-gpus", type=_positive, metavar="N", help="ranks to start, a GPU each where there are GPUs"
    )
    parser.add_argument(
        "--max-restarts",
        "--max_restarts",
        type=_count,
        default=0,
        metavar="K",
        help="start again so often (default: 0)",
    )
    parser.add_argument(
        "--min-ranks",
        "--min_ranks",
        type=_positive,
        default=1,
        metavar="M",
        help="when ranks die, start again without them on no fewer than this (default: 1)",
    )
    parser.add_argument(
        "--grace-seconds",
        "--grace_seconds",
        type=_seconds,
        default=30.0,
        metavar="S",
        help="how long ranks may take to end, after SIGTERM and after a failure (default: 30)",
    )
    parser.add_argument("-m", action="store_true", dest="module", help="the script is a module, as in python -m")
    parser.add_argument("script", help="what each rank runs")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what follows is the script's")


def run(arguments: argparse.Namespace) -> int:
    """Runs the job."""
    ranks = arguments.num_ranks or arguments.num_gpus or 1
    built, *_ = _core.cuda_status()
    if arguments.num_gpus and not (machine.gpus() and built):
        why = "this build has no CUDA backend" if machine.gpus() else "there is no GPU here"
        say(f"--num_gpus={arguments.num_gpus}: {why}, so {ranks} CPU ranks are started")
    target = ["-m", arguments.script] if arguments.module else [arguments.script]
    return launch(
        Options(
            command=[sys.executable, "-u", *target, *arguments.arguments],
            ranks=ranks,
            max_restarts=arguments.max_restarts,
            min_ranks=arguments.min_ranks,
            grace_s=arguments.grace_seconds,
        )
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError(text)
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1e9:
        raise ValueError(text)
    return value


_positive.__name__, _count.__name__, _seconds.__name__ = "number above 0", "number", "number of seconds"  # for messages
