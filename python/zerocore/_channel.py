"""What a rank tells the launcher that started it: JSON objects, one a line, over TCP. Nothing without a launcher.

ZC_LAUNCHER holds `host:port:token`. A connection begins with {"token", "rank", "role"}; every later line holds "event":

    started   by the shim: pid, host           exited   by the shim: code (negative: the signal), seconds
    raised    kind, text, traceback            saved    step, path: a checkpoint that is committed
    progress  whatever is worth showing

No torch is imported here, nor any other part of zerocore that needs it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import sys
import threading
import traceback
from collections.abc import Mapping
from typing import Any

from zerocore._launch import rank_of

LAUNCHER = "ZC_LAUNCHER"
TIMEOUT_S = 5.0  # the launcher reads at once; one that does not is gone
TEXT_LIMIT = 50_000  # characters of one traceback or message; the launcher's LINE_LIMIT leaves room for both, escaped

_lock = threading.Lock()
_reporter: Reporter | None = None


class Reporter:
    """A connection to the launcher. Not thread-safe.

    Args:
        address: the value of ZC_LAUNCHER.
        rank: this rank's number.
        role: "shim" or "rank".

    Raises:
        OSError: the launcher does not answer.
    """

    def __init__(self, address: str, *, rank: int, role: str) -> None:
        host, port, token = address.rsplit(":", 2)
        self.pid = os.getpid()
        self.socket = socket.create_connection((host, int(port)), TIMEOUT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._send({"token": token, "rank": rank, "role": role})

    def report(self, event: str, fields: Mapping[str, Any]) -> None:
        """Hands one event to the kernel, which delivers it even when this process ends at once."""
        self._send({"event": event, **fields})

    def _send(self, message: Mapping[str, Any]) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")


def report(event: str, **fields: Any) -> bool:
    """Tells the launcher something; from any thread of a rank.

    Args:
        event: "saved", "progress" or "raised".
        fields: JSON values.

    Returns:
        True when the launcher has it; False without a launcher, in a process that a rank started, and when the
        launcher is gone.
    """
    global _reporter
    address = os.environ.get(LAUNCHER)
    if address is None or _is_another_process():
        return False
    with _lock:
        try:
            if _reporter is None or _reporter.pid != os.getpid():
                _reporter = Reporter(address, rank=rank_of(os.environ), role="rank")
            _reporter.report(event, fields)
        except OSError:
            if _reporter is not None:
                with contextlib.suppress(OSError):
                    _reporter.socket.close()
                _reporter = None
            return False
    return True


def report_exception(value: BaseException) -> bool:
    """Hands an exception that ends this rank to the launcher, which shows the job's first one first.

    Returns:
        True when the launcher will show it, so that this process need not.
    """
    return report(
        "raised",
        kind=type(value).__name__,
        text=" ".join(str(value).split())[:TEXT_LIMIT],
        traceback="".join(traceback.format_exception(value))[-TEXT_LIMIT:],
    )


def write_whole_lines() -> None:
    """Under the launcher, output of Python goes out line by line, so that the lines of different ranks stay apart."""
    if LAUNCHER in os.environ:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(line_buffering=True, write_through=False)


def _is_another_process() -> bool:
    """Whether a rank started this process: it inherits the rank's variables, but does not speak for it."""
    return os.environ.get("ZC_RANK_PROCESS", str(os.getpid())) != str(os.getpid())
