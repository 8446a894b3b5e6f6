"""Host memory: how it is allocated while a model is built, and how much this process may still take."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

from zerocore import _core


@contextlib.contextmanager
def direct_allocations() -> Iterator[None]:
    """While a model is built: memory of tensors that are freed goes back to the system (zc/base/memory.h)."""
    _core.begin_direct_allocations()
    try:
        yield
    finally:
        _core.end_direct_allocations()


def free_bytes(*, ranks: int) -> int | None:
    """The least of what the machine, the process's limits and its control group leave; None where nothing says.

    Args:
        ranks: that share the machine's and the control group's memory.
    """
    found = []
    machine = _kib("/proc/meminfo", "MemAvailable:")
    if machine is not None:
        found.append(machine // ranks)
    for limit, used in ((resource.RLIMIT_DATA, "VmData:"), (resource.RLIMIT_AS, "VmSize:")):
        allowed = resource.getrlimit(limit)[0]
        taken = _kib("/proc/self/status", used)
        if allowed != resource.RLIM_INFINITY and taken is not None:
            found.append(allowed - taken)
    group = _control_group()
    if group is not None:
        found.append(group // ranks)
    return max(min(found), 0) if found else None


def resident_bytes() -> tuple[int, int]:
    """What this process holds in memory, and has held at most."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return _kib("/proc/self/status", "VmRSS:") or 0, most


def _kib(path: str, name: str) -> int | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), None)


def _control_group() -> int | None:
    """What the tightest limit on the way to the root of the control groups (version 2) leaves."""
    try:
        own = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return None
    root = Path("/sys/fs/cgroup")
    folder = root / own[3:].strip().lstrip("/")
    left: int | None = None
    while True:
        try:
            limit = (folder / "memory.max").read_text().strip()
            if limit != "max":
                here = int(limit) - int((folder / "memory.current").read_text())
                left = here if left is None else min(left, here)
        except (OSError, ValueError):
            pass
        if folder == root or os.path.ismount(folder):
            return left
        folder = folder.parent
