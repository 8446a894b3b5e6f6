"""Tells the other ranks when this process ends, before MPI's finalize, where they would wait for each other.

A rank that raises, or ends early, is named in the CommError of every rank that needs it. A job of which no rank failed
ends with MPI_Finalize; a job that failed ends without, and with a nonzero exit code on every rank.
"""

from __future__ import annotations

import atexit
import os
import sys
from types import TracebackType
from typing import Any

from zerocore import _core

# A rank that raised gives the others this long to say what they have to say: mpirun kills them when it has ended.
FAILURE_GRACE_MS = 5_000


class Departure:
    """The end of this process's part in a job of several ranks.

    Args:
        comm: the world communicator.
    """

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._pid = os.getpid()  # children made by fork are no ranks: they say nothing
        self._previous_hook = sys.excepthook

    def install(self) -> None:
        """Makes the end of the process be announced."""
        sys.excepthook = self._on_exception
        atexit.register(self._at_exit)

    def _on_exception(
        self, kind: type[BaseException], value: BaseException, traceback: TracebackType | None
    ) -> None:
        self._previous_hook(kind, value, traceback)
        if os.getpid() == self._pid:
            self._announce_exception(value)

    def _announce_exception(self, value: BaseException) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        text = " ".join(str(value).split())
        reason = f"raised {type(value).__name__}: {text}" if text else f"raised {type(value).__name__}"
        self._comm.leave(failed=True, reason=reason, grace_ms=FAILURE_GRACE_MS)
        _core.end_process_without_finalize()

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return
        raised = getattr(sys, "last_value", None)  # set even when someone has replaced our hook
        if raised is not None:
            self._announce_exception(raised)
            return
        sys.stdout.flush()
        self._comm.leave(failed=False, reason="ended its script", grace_ms=self._comm.timeout_ms)
        failure = self._comm.failure()
        if failure:
            print(f"zerocore: this rank had ended its script when the job failed: {failure}", file=sys.stderr, flush=True)
            _core.end_process_without_finalize()
