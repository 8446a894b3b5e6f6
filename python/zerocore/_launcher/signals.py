"""Signals to the launcher, which are meant for its job."""

from __future__ import annotations

import signal
import socket


class Signals:
    """What was asked of the launcher itself: SIGTERM, SIGINT and SIGHUP from now on only count here."""

    def __init__(self) -> None:
        self.count = 0
        self.last = signal.SIGTERM
        self.wakeup, self._end = socket.socketpair()
        for end in (self.wakeup, self._end):
            end.setblocking(False)
        signal.set_wakeup_fd(self._end.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup stays what it is
                signal.signal(number, self._take)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # wakes the loop

    def _take(self, number: int, _frame: object) -> None:
        self.count += 1
        self.last = signal.Signals(number)
