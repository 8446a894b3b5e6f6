"""One run of a job: from the start of its ranks until none of their processes is left."""

from __future__ import annotations

import contextlib
import enum
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zerocore._channel import LAUNCHER
from zerocore._launcher import processes
from zerocore._launcher.mpi import Mpirun
from zerocore._launcher.outcome import SHIM_GONE, Failure, Outcome, RankState
from zerocore._launcher.server import Event, Server
from zerocore._launcher.signals import Signals

START_TIMEOUT_S = 120.0  # until all shims have reported
CAUSE_WAIT_S = 1.0  # a CommError is a consequence: how long its cause may take to be heard of
SPOKEN_WAIT_S = 1.0  # for the end of ranks that have all said why: there is nothing more to hear from them
KILL_WAIT_S = 3.0  # between SIGTERM and SIGKILL
LEAVE_WAIT_S = 5.0  # for mpirun, when all scripts have ended
LAST_WORDS_S = 1.0  # for what is under way when all have ended
POLL_S = 0.2


class Phase(enum.Enum):
    """What the launcher waits for."""

    running = enum.auto()
    stopping = enum.auto()  # it was asked to end: the ranks finish their step and save
    failing = enum.auto()  # a rank failed: the others have a bounded time to notice and say so
    terminating = enum.auto()  # SIGTERM was sent to what is left
    killing = enum.auto()  # SIGKILL, too


class Job:
    """One run.

    Args:
        command: what each rank runs.
        ranks: how many.
        mpirun: that starts them; None for one rank.
        env: their environment.
        grace_s: how long ranks may take to end by themselves, after a failure and after SIGTERM.
        signals: of the launcher.
        on_failure: gets the first failure, as soon as it is known.
        on_event: gets what ranks report.
    """

    def __init__(
        self,
        command: list[str],
        *,
        ranks: int,
        mpirun: Mpirun | None,
        env: Mapping[str, str],
        grace_s: float,
        signals: Signals,
        on_failure: Callable[[Failure], None],
        on_event: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self._start = time.monotonic()
        self._grace_s = grace_s
        self._signals = signals
        self._mpirun = mpirun
        self._on_failure = on_failure
        self._on_event = on_event
        self._ranks = {rank: RankState() for rank in range(ranks)}
        self._phase = Phase.running
        self._deadline: float | None = self._start + START_TIMEOUT_S
        self._outcome = Outcome()
        self._first: Failure | None = None
        self._obeyed = 0  # signals
        self._shared_memory: set[str] = set()
        self._server = Server(ranks=ranks, wakeup=signals.wakeup)
        shim = [sys.executable, str(Path(__file__).with_name("shim.py")), *command]
        environment = {**env, LAUNCHER: self._server.address}
        if mpirun is not None:
            shim = mpirun.command(ranks, shim)
            environment = mpirun.environment(environment)
        processes.adopt_orphans()
        # A session of its own, so that Ctrl-C reaches the launcher only.
        self._process = subprocess.Popen(shim, stdin=subprocess.DEVNULL, env=environment, start_new_session=True)

    def run(self) -> Outcome:
        """Returns when no process of the job is left."""
        try:
            while not all(rank.over for rank in self._ranks.values()):
                for event in self._server.poll(self._poll_s()):
                    self._take(event)
                self._hear_signals()
                self._watch_mpirun()
                self._name_first_failure(time.monotonic() - CAUSE_WAIT_S)
                if self._deadline is not None and time.monotonic() > self._deadline:
                    self._escalate()
            self._hear_last_words()
            self._name_first_failure(time.monotonic())
            self._end_mpirun()
        finally:
            if self._process.poll() is None:
                processes.signal_group(self._process.pid, signal.SIGKILL)
                self._process.wait()
            processes.end_descendants()
            self._server.close()
            for path in self._shared_memory:
                Path(path).unlink(missing_ok=True)
        return self._conclude()

    def _poll_s(self) -> float:
        return POLL_S if self._deadline is None else max(0.0, min(POLL_S, self._deadline - time.monotonic()))

    # What happens to ranks

    def _take(self, event: Event) -> None:
        rank = self._ranks[event.rank]
        if event.name == "started":
            rank.pid = int(event.fields["pid"])
            if self._phase is Phase.running and all(other.pid is not None for other in self._ranks.values()):
                self._deadline = None
            elif self._phase is Phase.stopping:  # it came after the others were told
                self._server.order("signal", only=event.rank, number=int(signal.SIGTERM))
        elif event.name == "exited":
            rank.code, rank.over = int(event.fields["code"]), True
            if rank.code:
                self._take_bad_end(event.rank, rank.code)
        elif event.name == "gone":
            if not rank.over:
                rank.over = True
                self._fail(event.rank, SHIM_GONE)
        elif event.name == "raised":
            text = str(event.fields["text"])
            kind = str(event.fields["kind"])
            self._fail(event.rank, f"raised {kind}: {text}" if text else f"raised {kind}", event.fields["traceback"])
        elif event.name == "saved":
            self._take_saved(event.fields)
        self._on_event(event)

    def _take_bad_end(self, number: int, code: int) -> None:
        by_us = self._phase in (Phase.terminating, Phase.killing)
        if code == -signal.SIGTERM:  # after a failure it comes from mpirun, when a rank has called MPI_Abort
            by_us = self._phase is not Phase.running
        if code > 0 or not by_us:
            if code < 0 and self._ranks[number].failure is None:
                self._outcome.dead.append(number)
            self._fail(number, _ending(code))
        elif not self._outcome.stopped:
            self._fail(number, f"did not end within {self._grace_s:g} s of the failure and had to be killed")

    def _take_saved(self, fields: Mapping[str, Any]) -> None:
        step = fields.get("step")
        if step is not None and (self._outcome.step is None or int(step) >= self._outcome.step):
            self._outcome.step, self._outcome.path = int(step), fields.get("path")

    def _fail(self, number: int, what: str, traceback: str = "") -> None:
        rank, failures = self._ranks[number], self._outcome.failures
        failure = Failure(number, what, time.monotonic() - self._start, traceback)
        if rank.failure is None:
            failures.append(failure)
        elif traceback and not rank.failure.traceback:  # says more than the exit code, which came over another socket
            failures[failures.index(rank.failure)] = failure
        else:
            return
        rank.failure = failure
        if self._phase is Phase.running:
            self._enter(Phase.failing, self._grace_s)
        if self._phase is Phase.failing and self._all_have_spoken():
            self._enter(Phase.failing, min(self._grace_s, SPOKEN_WAIT_S))

    def _all_have_spoken(self) -> bool:
        return all(rank.has_spoken for rank in self._ranks.values())

    def _fail_whole(self, what: str) -> None:
        self._outcome.failures.append(Failure(None, what, time.monotonic() - self._start))
        for rank in self._ranks.values():
            rank.over = True

    def _name_first_failure(self, until: float) -> None:
        """Tells of the first failure: of the first that is no consequence, or of the first when `until` has passed."""
        if self._first is not None or not self._outcome.failures:
            return
        causes = [failure for failure in self._outcome.failures if not failure.is_consequence]
        if not causes and self._start + self._outcome.failures[0].seconds > until:
            return
        self._first = (causes or self._outcome.failures)[0]
        self._on_failure(self._first)

    # What the launcher does

    def _enter(self, phase: Phase, seconds: float) -> None:
        self._phase, self._deadline = phase, time.monotonic() + seconds
        for rank in self._ranks.values():
            if rank.pid is not None and not rank.over:
                self._shared_memory |= processes.shared_memory_of(rank.pid)

    def _hear_signals(self) -> None:
        asked = self._signals.count
        if asked == self._obeyed:
            return
        self._obeyed = asked
        self._outcome.stopped = True
        if asked > 1:
            self._kill()
        elif self._phase is Phase.running:
            self._enter(Phase.stopping, self._grace_s)
            self._server.order("signal", number=int(signal.SIGTERM))

    def _escalate(self) -> None:
        self._name_first_failure(time.monotonic())
        if self._phase is Phase.running:
            missing = [str(number) for number, rank in self._ranks.items() if rank.pid is None]
            self._outcome.failures.append(
                Failure(None, f"rank {', '.join(missing)} did not start within {START_TIMEOUT_S:g} s", START_TIMEOUT_S)
            )
            self._kill()
        elif self._phase is Phase.failing and not self._all_have_spoken():
            self._enter(Phase.terminating, KILL_WAIT_S)
            self._server.order("signal", number=int(signal.SIGTERM))
        elif self._phase is Phase.killing:
            for rank in self._ranks.values():  # their shims do not answer
                rank.over = True
        else:
            self._kill()

    def _kill(self) -> None:
        self._enter(Phase.killing, KILL_WAIT_S)
        self._server.order("kill")

    def _watch_mpirun(self) -> None:
        """When mpirun has ended before the ranks have, something ended it, or it never started them."""
        if self._process.poll() is None:
            return
        self._hear_last_words()
        if all(rank.over for rank in self._ranks.values()):
            return
        program = "the shim" if self._mpirun is None else self._mpirun.path
        self._fail_whole(f"{program} {_ending(self._process.returncode)} before the ranks did; see what it wrote")

    def _hear_last_words(self) -> None:
        deadline = time.monotonic() + LAST_WORDS_S
        while (events := self._server.poll(0.05)) and time.monotonic() < deadline:
            for event in events:
                self._take(event)

    def _end_mpirun(self) -> None:
        processes.end_descendants(keep=self._process.pid)  # what scripts left behind: mpirun waits for its output
        failed = any(rank.code != 0 for rank in self._ranks.values())
        if failed and self._mpirun is not None and self._mpirun.family == "openmpi":
            # A script that ended without MPI_Finalize makes it say so at length, unless it is asked to end.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGTERM)
        else:
            self._server.order("leave")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(LEAVE_WAIT_S)

    def _conclude(self) -> Outcome:
        outcome = self._outcome
        if self._first is not None:
            rank = self._first.rank
            outcome.failures.sort(key=lambda failure: failure.rank != rank)
            code = 0 if rank is None else self._ranks[rank].code or 0
            outcome.code = processes.exit_code(code) if code > 0 or rank in outcome.dead else 1
        else:  # what the launcher itself did
            codes = [1 if rank.code is None else processes.exit_code(rank.code) for rank in self._ranks.values()]
            outcome.code = next((code for code in codes if code), 0)
        return outcome


def _ending(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "a signal"
    return f"was killed by {name} (signal {-code})"
