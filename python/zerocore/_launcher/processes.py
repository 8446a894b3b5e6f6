"""Ending processes with all that they started. Linux."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Makes this process the parent of what its descendants leave behind, so that end_descendants() finds it."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(parent: int) -> None:
    """In a new process: it is killed when `parent`, which started it, ends in whatever way."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it was quicker
        os.kill(os.getpid(), signal.SIGKILL)


def exit_code(code: int) -> int:
    """What a shell makes of a child's code: 128 + the signal, when one ended it."""
    return 128 - code if code < 0 else code


def signal_group(leader: int, number: int) -> None:
    """Sends a signal to a process group, if there is still somebody in it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def shared_memory_of(pid: int) -> set[str]:
    """The segments that MPICH has made for a process: it does not remove them when a rank ends without MPI_Finalize."""
    found = set()
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(entry.path)
                if target.startswith("/dev/shm/mpich_shm_"):
                    found.add(target)
    return found


def end_descendants(*, keep: int | None = None, timeout_s: float = 2.0) -> None:
    """Kills all processes that this one started, directly or not, and that are still there.

    Args:
        keep: a process that is spared with all that it has started.
        timeout_s: how long to wait for their end.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = _descendants(os.getpid(), keep)
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if not found:
            return
        time.sleep(0.01)


def _descendants(root: int, keep: int | None) -> list[int]:
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])  # the name before may hold anything
            children.setdefault(parent, []).append(int(path.parent.name))
    found, pending = [], [root]
    while pending:
        below = [pid for pid in children.get(pending.pop(), []) if pid != keep]
        found += below
        pending += below
    return found
