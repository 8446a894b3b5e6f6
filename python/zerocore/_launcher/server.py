"""The launcher's end of the channel: what shims and ranks say, in the order in which it arrives."""

from __future__ import annotations

import contextlib
import json
import secrets
import selectors
import socket
from dataclasses import dataclass, field
from typing import Any

LINE_LIMIT = 1 << 20  # bytes; a longer line comes from nobody of ours
SEND_TIMEOUT_S = 5.0


@dataclass
class Peer:
    """A connection; `rank` is None until it has shown the token."""

    socket: socket.socket
    received: bytes = b""
    rank: int | None = None
    role: str = ""


@dataclass(frozen=True)
class Event:
    """Something that happened to a rank. `name` "gone": its shim has closed the connection."""

    rank: int
    name: str
    fields: dict[str, Any] = field(default_factory=dict)


class Server:
    """Listens for the shims and ranks of one run of a job.

    Args:
        ranks: of the run.
        wakeup: a socket whose input ends a poll() early.
    """

    def __init__(self, *, ranks: int, wakeup: socket.socket | None = None) -> None:
        self._ranks = ranks
        self._token = secrets.token_hex(16)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)  # for ranks of this machine
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._wakeup = wakeup
        if wakeup is not None:
            self._selector.register(wakeup, selectors.EVENT_READ)
        self._shims: dict[int, Peer] = {}

    @property
    def address(self) -> str:
        """What goes into ZC_LAUNCHER."""
        host, port = self._listener.getsockname()[:2]
        return f"{host}:{port}:{self._token}"

    def poll(self, timeout_s: float) -> list[Event]:
        """Waits for events, no longer than this."""
        events: list[Event] = []
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._wakeup:
                with contextlib.suppress(BlockingIOError):
                    self._wakeup.recv(4096)
            else:
                events += self._read(key.data)
        return events

    def order(self, what: str, *, only: int | None = None, **fields: Any) -> None:
        """Tells all shims, or that of one rank, to do something: "signal" (number), "kill" or "leave"."""
        line = json.dumps({"do": what, **fields}).encode() + b"\n"
        for peer in [peer for rank, peer in self._shims.items() if only is None or rank == only]:
            with contextlib.suppress(OSError):  # its "gone" tells
                peer.socket.settimeout(SEND_TIMEOUT_S)
                peer.socket.sendall(line)
                peer.socket.setblocking(False)

    def close(self) -> None:
        """Closes all connections; shims that still run take it for the launcher's end."""
        for key in list(self._selector.get_map().values()):
            if key.fileobj is not self._wakeup:
                key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, Peer(connection))

    def _read(self, peer: Peer) -> list[Event]:
        try:
            data = peer.socket.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        *lines, peer.received = (peer.received + data).split(b"\n")
        try:
            events = [event for line in lines if (event := self._understand(peer, line)) is not None]
        except (ValueError, LookupError, TypeError):
            data, events = b"", []  # a stranger
        if not data or len(peer.received) > LINE_LIMIT:
            events += self._drop(peer)
        return events

    def _understand(self, peer: Peer, line: bytes) -> Event | None:
        message = json.loads(line)
        if peer.rank is None:
            if not secrets.compare_digest(str(message["token"]), self._token):
                raise ValueError("wrong token")
            peer.rank, peer.role = range(self._ranks)[int(message["rank"])], str(message["role"])
            if peer.role == "shim":
                self._shims[peer.rank] = peer
            return None
        return Event(peer.rank, str(message.pop("event")), message)

    def _drop(self, peer: Peer) -> list[Event]:
        self._selector.unregister(peer.socket)
        peer.socket.close()
        if peer.rank is not None and self._shims.get(peer.rank) is peer:
            del self._shims[peer.rank]
            return [Event(peer.rank, "gone")]
        return []
