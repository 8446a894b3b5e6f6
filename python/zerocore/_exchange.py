"""Small messages between ranks, as JSON, and where bytes lie."""

from __future__ import annotations

import ctypes
import json
from typing import Any

from zerocore import _core


def address_of(data: bytearray) -> int:
    """Where its bytes lie; it must neither be freed nor resized meanwhile."""
    return ctypes.addressof(ctypes.c_char.from_buffer(data)) if data else 0


def gather_json(comm: _core.Communicator, value: Any, label: str) -> list[Any]:
    """Every rank's value, in rank order. Collective.

    Args:
        value: what json can write; its size may differ from rank to rank.
        label: shown by the guard.
    """
    text = json.dumps(value).encode()
    sizes = [int.from_bytes(b, "little") for b in comm.gather_bytes(len(text).to_bytes(8, "little"), label)]
    return [json.loads(each) for each in comm.gather_bytes(text.ljust(max(sizes)), label)]


def broadcast_json(comm: _core.Communicator, value: Any, label: str) -> Any:
    """Rank 0's value, on every rank. Collective."""
    text = json.dumps(value).encode() if comm.rank == 0 else b""
    size = int.from_bytes(comm.gather_bytes(len(text).to_bytes(8, "little"), label)[0], "little")
    memory = bytearray(text.ljust(size))
    comm.broadcast(_core.BufferView(address_of(memory), size, _core.DType.uint8), 0, label).wait()
    return json.loads(memory)
