"""A whole job: its runs, and what people read about them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from zerocore._launch import find_launch
from zerocore._launcher.job import Job
from zerocore._launcher.mpi import find_mpirun
from zerocore._launcher.outcome import Failure, Outcome
from zerocore._launcher.restarts import Restarts
from zerocore._launcher.signals import Signals
from zerocore.errors import ConfigError

RESTART = "ZC_RESTART"  # for scripts: how often the job has been started again
LINES = 8  # of what the other ranks say
LINE = 600  # characters


@dataclass(frozen=True)
class Options:
    """What the command line asked for."""

    command: list[str]
    ranks: int = 1
    max_restarts: int = 0
    min_ranks: int = 1
    grace_s: float = 30.0


def launch(options: Options, env: Mapping[str, str] = os.environ) -> int:
    """Runs a job to its end, restarts included. Returns the exit code for the shell.

    For a process of its own: it takes over its signals, and ends all that it has started.

    Raises:
        ConfigError: there is no MPI for a job of several ranks, or this process is itself a rank of a job.
    """
    _refuse_to_be_a_rank(env)
    mpirun = find_mpirun() if options.ranks > 1 else None
    environment = dict(env)
    if mpirun is not None:
        # Ranks share the cores, and bits depend on the number of threads, which a restart must not change.
        environment.setdefault("OMP_NUM_THREADS", "1")
    signals = Signals()
    restarts = Restarts(most=options.max_restarts, min_ranks=options.min_ranks)
    ranks, newest = options.ranks, Newest()
    while True:
        outcome = Job(
            options.command,
            ranks=ranks,
            mpirun=mpirun if ranks > 1 else None,
            env={**environment, RESTART: str(restarts.count)},
            grace_s=options.grace_s,
            signals=signals,
            on_failure=show_first,
        ).run()
        progress = newest.take(outcome)
        show_others(outcome.failures)
        if signals.count:
            say(f"{_stopped(outcome, ranks, signals)}{newest.describe()}")
            return outcome.code
        if outcome.code == 0:
            return 0
        decision = restarts.decide(ranks=ranks, dead=outcome.dead, progress=progress)
        if decision.ranks is None:
            if options.max_restarts:
                say(f"no further restart: {decision.reason}{newest.describe()}")
            say(f"the job has failed; exit code {outcome.code} is that of {_who(outcome.failures[0])}")
            return outcome.code
        without = f", without {_ranks(outcome.dead)} that died" if outcome.dead else ""
        say(f"{decision.reason}: {decision.ranks} ranks{without}{newest.describe()}")
        ranks = decision.ranks


def _refuse_to_be_a_rank(env: Mapping[str, str]) -> None:
    try:
        launched = find_launch(env)
        is_rank = launched is not None and launched.size != 1
    except ConfigError:  # of torchrun or srun
        is_rank = True
    if is_rank:
        raise ConfigError(
            "[launch] zerocore starts the ranks itself: got this command in a process that a launcher of parallel jobs "
            "started as one of several, expected it once. Start the script without it: `mpirun -n N python script.py`."
        )


class Newest:
    """The newest checkpoint of the job, as far as its ranks have told."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._path: str | None = None

    def take(self, outcome: Outcome) -> bool:
        """Whether a run has brought the job further."""
        if outcome.step is None:
            return False
        further = self._step is None or outcome.step > self._step
        if self._step is None or outcome.step >= self._step:
            self._step, self._path = outcome.step, outcome.path
        return further

    def describe(self) -> str:
        """The end of a sentence."""
        return "" if self._step is None else f"; newest checkpoint: step {self._step}, {self._path}"


def say(text: str) -> None:
    """One line of the launcher's own."""
    print(f"zerocore: {text}", file=sys.stderr, flush=True)


def show_first(failure: Failure) -> None:
    """The failure that all others follow from, with its traceback."""
    hint = ""
    if failure.what.endswith("(signal 9)"):
        hint = ". If nobody did that, the machine has run out of memory: see dmesg"
    elif failure.rank is not None and not failure.traceback:
        hint = "; see what it wrote above"
    say(f"{_who(failure)} failed first, {failure.seconds:.1f} s after the start: it {failure.what[:LINE]}{hint}")
    if failure.traceback:
        print(failure.traceback.rstrip("\n"), file=sys.stderr, flush=True)


def show_others(failures: list[Failure]) -> None:
    """After the first failure: a line for each thing that followed, and the ranks that it happened to."""
    found: dict[str, list[Failure]] = {}
    for failure in failures[1:]:
        if failure.rank is not None:
            found.setdefault(failure.what.replace(" (this rank)", ""), []).append(failure)
    for what, group in list(found.items())[:LINES]:
        seconds = max(0.0, group[0].seconds - failures[0].seconds)
        ranks = _ranks([failure.rank for failure in group if failure.rank is not None])
        say(f"{seconds:.1f} s later {ranks} {what[:LINE]}{'...' if len(what) > LINE else ''}")
    if len(found) > LINES:
        say(f"and {len(found) - LINES} other things happened to other ranks")


def _stopped(outcome: Outcome, ranks: int, signals: Signals) -> str:
    asked = f"stopped on {signals.last.name}"
    if outcome.code == 0:
        return f"{asked}: all {ranks} ranks ended by themselves, with exit code 0" if ranks > 1 else f"{asked}"
    if outcome.failures:
        return f"{asked}, and {_who(outcome.failures[0])} failed; exit code {outcome.code}"
    return f"{asked}, before all ranks had finished: exit code {outcome.code}"


def _who(failure: Failure) -> str:
    return "the job" if failure.rank is None else f"rank {failure.rank}"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"
