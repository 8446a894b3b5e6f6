"""Files that are not trusted, and errors that name them."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from zerocore.errors import CheckpointError, IoError


@contextlib.contextmanager
def named_errors(path: Path, *, area: str = "ckpt") -> Iterator[None]:
    """Names the path in errors of Python's own calls.

    Raises:
        IoError: for every OSError that is none.
    """
    try:
        yield
    except IoError:
        raise
    except OSError as error:
        raise IoError(
            error.errno,
            f"[{area}] {error.filename or path}: {os.strerror(error.errno or 0)} (errno {error.errno}). Look at the "
            "folder's permissions and space.",
        ) from None


def small_file(path: Path, limit: int) -> bytes:
    """A regular file's bytes; no link is followed.

    Raises:
        CheckpointError: it is missing, no regular file, or has more than `limit` bytes.
        IoError: it cannot be read.
    """
    size = regular_size(path)
    if size > limit:
        raise CheckpointError(f"[ckpt] {path}: got {size} bytes, expected at most {limit}. It is no such file.")
    with (
        named_errors(path),
        open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW)) as file,
    ):
        return file.read(size)


def regular_size(path: Path) -> int:
    """A regular file's size in bytes.

    Raises:
        CheckpointError: it is missing, or no regular file.
        IoError: it cannot be looked at.
    """
    with named_errors(path):
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            raise CheckpointError(
                f"[ckpt] {path} is missing: got no such file, expected a checkpoint. Look at the folder's name, or use "
                "another checkpoint."
            ) from None
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"[ckpt] {path} is damaged: got no regular file, expected one. Use another checkpoint.")
    return status.st_size
