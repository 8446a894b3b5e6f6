"""Headers of safetensors files, made and read. No tensor library is needed for it.

A file is 8 bytes (the header's length, little-endian), the header as JSON, padded with blanks, and the tensors' bytes
without gaps. The header maps each key to {"dtype", "shape", "data_offsets": [begin, end]}, counted from its end.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from zerocore.errors import CheckpointError

ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
}
ALIGNMENT = 4096  # of the first tensor's bytes, so that they can be read past the page cache
_LARGEST_HEADER = 100_000_000  # the safetensors library's own limit


_METADATA = "__metadata__"


class _Raw(BaseModel):
    model_config = ConfigDict(strict=True)
    dtype: str = ""  # absent in the metadata only
    shape: list[Annotated[int, Field(ge=0, le=2**62)]] = []
    data_offsets: tuple[Annotated[int, Field(ge=0, le=2**62)], Annotated[int, Field(ge=0, le=2**62)]] = (0, 0)


_HEADER = TypeAdapter(dict[str, _Raw])


class Entry(NamedTuple):
    """One tensor in a file; begin and end are bytes, counted from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def make_header(tensors: Sequence[tuple[str, str, Sequence[int]]], metadata: dict[str, str] | None = None) -> bytes:
    """The beginning of a file: length and header, padded to a multiple of 4096 bytes.

    Args:
        tensors: (key, dtype, shape) of each, in the order in which their bytes follow.
        metadata: free text by name.
    """
    header: dict[str, Any] = {} if metadata is None else {_METADATA: metadata}
    begin = 0
    for key, dtype, shape in tensors:
        end = begin + math.prod(shape) * ITEM_BYTES[dtype]
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-(8 + len(text)) // ALIGNMENT) * ALIGNMENT - 8)
    return len(text).to_bytes(8, "little") + text


def parse_header(data: bytes, *, file_bytes: int, file: str) -> dict[str, Entry]:
    """The tensors of a file by key.

    Args:
        data: the file's beginning, length and header.
        file_bytes: the file's size.
        file: its name, for errors.

    Raises:
        CheckpointError: it is not such a header, or its tensors do not fill the file exactly.
    """

    def damaged(what: str) -> CheckpointError:
        return CheckpointError(f"[ckpt] {file} is damaged: {what}. Use another checkpoint.")

    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(_LARGEST_HEADER, file_bytes - 8) or len(data) != 8 + length:
        raise damaged(f"got a header of {length} bytes in a file of {file_bytes}, of which {len(data)} were expected")
    try:
        header = _HEADER.validate_json(data[8:])
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise damaged(f"its header is not one of safetensors: {where}: {first['msg']}") from None
    entries = {key: Entry(e.dtype, tuple(e.shape), *e.data_offsets) for key, e in header.items() if key != _METADATA}
    at = 0
    for key, entry in sorted(entries.items(), key=lambda item: item[1].begin):
        if entry.dtype not in ITEM_BYTES or entry.begin != at:
            raise damaged(f"tensor {key!r} has the entry {tuple(entry)}")
        if entry.end - entry.begin != math.prod(entry.shape) * ITEM_BYTES[entry.dtype]:
            raise damaged(f"tensor {key!r} of shape {entry.shape} has {entry.end - entry.begin} bytes")
        at = entry.end
    if 8 + length + at != file_bytes:
        raise damaged(f"got {at} bytes of tensors, expected {file_bytes - 8 - length}")
    return entries


class Writer:
    """Writes a file's tensors piece by piece, in any order: none of them has to be whole in memory.

    A context manager. When the block ends without an error the file is on the disk; its entry in the folder is not.

    Args:
        path: must not exist.
        tensors, metadata: as for make_header(). They are laid out by the size of their elements, the largest first, so
            that each is aligned; readers map them.

    Raises:
        OSError: from Python's own calls, also by write().
    """

    def __init__(
        self, path: Path, tensors: Sequence[tuple[str, str, Sequence[int]]], metadata: dict[str, str] | None = None
    ) -> None:
        ordered = sorted(tensors, key=lambda tensor: -ITEM_BYTES[tensor[1]])
        header = make_header(ordered, metadata)
        self._begins = {}
        at = len(header)
        for key, dtype, shape in ordered:
            self._begins[key] = at
            at += math.prod(shape) * ITEM_BYTES[dtype]
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._write(0, header)

    def write(self, key: str, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Writes bytes of a tensor, from byte `offset` of it on."""
        self._write(self._begins[key] + offset, data)

    def _write(self, at: int, data: bytes | bytearray | memoryview) -> None:
        left = memoryview(data).cast("B")
        while left:
            done = os.pwrite(self._fd, left, at)
            left, at = left[done:], at + done

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                os.fsync(self._fd)
        finally:
            os.close(self._fd)
