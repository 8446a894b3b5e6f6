"""What this machine has: processors, memory, devices, and how files can be written. Linux; imports no torch."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import platform
import tempfile
from pathlib import Path

from zerocore import _memory

_SYS_IO_URING_SETUP = 425  # on all architectures
_IO_URING_PARAMS_BYTES = 120


def processor() -> str:
    """Model and cores, and how many of them this process may use."""
    model = _field("/proc/cpuinfo", "model name") or platform.machine()
    return f"{model}, {os.cpu_count()} cores, {len(os.sched_getaffinity(0))} usable here"


def memory() -> str:
    """Of the machine, and what of it is left to this process."""
    total = _field("/proc/meminfo", "MemTotal") or "0 kB"
    free = _memory.free_bytes(ranks=1)
    left = "" if free is None else f", {free / 2**30:.1f} GiB left to this process"
    return f"{int(total.split()[0]) / 2**20:.1f} GiB{left}"


def huge_pages() -> str:
    """Both kinds."""
    with contextlib.suppress(OSError):
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
        chosen = text[text.index("[") + 1 : text.index("]")]
        reserved = _field("/proc/meminfo", "HugePages_Total") or "0"
        return f"transparent: {chosen}; reserved: {reserved} of {_field('/proc/meminfo', 'Hugepagesize')}"
    return "none"


def gpus() -> int:
    """How many NVIDIA GPUs there are."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def direct_io(folder: Path) -> str:
    """Whether files in a folder can be written past the page cache; tries it."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file, mmap.mmap(-1, 4096) as page:
            descriptor = os.open(file.name, os.O_WRONLY | os.O_DIRECT)
            try:
                os.write(descriptor, page)
            finally:
                os.close(descriptor)
    except OSError as error:
        return f"no ({error.strerror})"
    return "yes"


def file_system(folder: Path) -> str:
    """The kind of file system that a folder lies in, and what is free there."""
    path, best, kind = str(folder.resolve()), "", "unknown"
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, point, name = line.split()[:3]
            inside = path == point or path.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(best):
                best, kind = point, name
    free = os.statvfs(folder)
    return f"{kind}, {free.f_bavail * free.f_frsize / 2**30:.1f} GiB free"


def io_uring() -> str:
    """Whether the kernel offers io_uring to this process; tries it."""
    libc = ctypes.CDLL(None, use_errno=True)
    params = ctypes.create_string_buffer(_IO_URING_PARAMS_BYTES)
    descriptor = libc.syscall(_SYS_IO_URING_SETUP, 1, params)
    if descriptor < 0:
        return f"no ({errno.errorcode.get(ctypes.get_errno(), 'unknown')})"
    os.close(descriptor)
    return "yes"


def libaio() -> str:
    """Whether the kernel's older asynchronous I/O is there, and the library for it."""
    if not Path("/proc/sys/fs/aio-max-nr").exists():
        return "no"
    for name in ("libaio.so.1", "libaio.so.1t64"):
        with contextlib.suppress(OSError):
            ctypes.CDLL(name)
            return "yes"
    return "in the kernel, without the library"


def _field(path: str, name: str) -> str | None:
    with contextlib.suppress(OSError):
        for line in Path(path).read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    return None
