"""Tells the other ranks when this process ends, before MPI's finalize, where they would wait for each other.

A rank that raises, or ends early, is named in the CommError of every rank that needs it. A job of which no rank failed
ends with MPI_Finalize; a job that failed ends without, and with a nonzero exit code on every rank.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from types import TracebackType
from typing import Any

from zerocore import _channel, _place
from zerocore._launch import find_launch
from zerocore.errors import ConfigError

# A rank that raised gives the others this long to say what they have to say: mpirun kills them when it has ended.
FAILURE_GRACE_MS = 5_000

# Holds the process id of the rank, so that programs which a rank starts know that they are none.
RANK_PROCESS = "ZC_RANK_PROCESS"


class Departure:
    """The end of this process's part in a job of several ranks."""

    def __init__(self) -> None:
        self.comm: Any = None  # the world communicator, once there is one
        self.place_teller: threading.Thread | None = None
        self._pid = os.getpid()  # children made by fork are no ranks: they say nothing
        self._previous_hook = sys.excepthook
        sys.excepthook = self._on_exception
        atexit.register(self._at_exit)

    def _on_exception(self, kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
        mine = os.getpid() == self._pid
        if not (mine and _channel.report_exception(value)):  # else the launcher shows it, the job's first one first
            self._previous_hook(kind, value, traceback)
        if mine:
            self._announce_exception(value)

    def _announce_exception(self, value: BaseException) -> None:
        from zerocore import _core

        _flush()
        comm = self.comm if self.comm is not None else _join()
        if comm is None:
            return
        text = " ".join(str(value).split())
        reason = f"raised {type(value).__name__}: {text}" if text else f"raised {type(value).__name__}"
        comm.tell_place(_place.of_exception(value))
        self._leave(comm, failed=True, reason=reason, grace_ms=FAILURE_GRACE_MS)
        _core.end_process_without_finalize()

    def _leave(self, comm: Any, **how: Any) -> None:
        comm.leave(**how)
        if self.place_teller is not None:  # it must not be in the core when Python ends
            self.place_teller.join(timeout=1.0)

    def _at_exit(self) -> None:
        if os.getpid() != self._pid or self.comm is None:
            return
        raised = getattr(sys, "last_value", None)  # set even when someone has replaced our hook
        if raised is not None:
            self._announce_exception(raised)
            return
        from zerocore import _core

        _flush()
        _core.wait_until_devices_are_idle(self.comm.timeout_ms)  # peers may not have come to the last collectives yet
        self._leave(self.comm, failed=False, reason="ended its script", grace_ms=self.comm.timeout_ms)
        failure = self.comm.failure()
        if failure:
            print(
                f"zerocore: this rank had ended its script when the job failed: {failure}", file=sys.stderr, flush=True
            )
            _core.end_process_without_finalize()


_departure: Departure | None = None


def watch() -> None:
    """Called when zerocore is imported: from here on a rank that raises tells the others."""
    try:
        launch = find_launch(os.environ)
    except ConfigError:  # world() says it
        return
    if launch is None or launch.size == 1 or _is_child_of_a_rank():
        return
    os.environ[RANK_PROCESS] = str(os.getpid())
    _watching()


def attach(comm: Any) -> None:
    """From here on the end of the process is announced over `comm`, the world communicator."""
    departure = _watching()
    departure.comm = comm
    departure.place_teller = _place.tell_when_asked(comm)


def _watching() -> Departure:
    global _departure
    if _departure is None:
        _departure = Departure()
    return _departure


def _is_child_of_a_rank() -> bool:
    if os.environ.get(RANK_PROCESS, str(os.getpid())) != str(os.getpid()):
        return True
    multiprocessing = sys.modules.get("multiprocessing.process")
    return multiprocessing is not None and multiprocessing.parent_process() is not None


def _join() -> Any:
    """Meets the other ranks to tell them of a failure before the meeting: they may be waiting in MPI_Init."""
    from zerocore import _comm

    try:
        return _comm.world()
    except Exception:  # what keeps this rank from the others has been raised, or is minor to what was
        _comm.abort()
        return None


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
