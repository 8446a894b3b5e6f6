"""Stands between mpirun and one rank of a job: starts the script, passes signals on, and outlives it.

Usage: python shim.py COMMAND [ARGUMENT ...], started by the launcher with ZC_LAUNCHER set.

The shim ends when the launcher says so. If the launcher is gone, it ends the script first.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
import time

if __name__ == "__main__":
    # Started by its path, since `-m` would look for zerocore in the working folder first.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    # A rank is the first process of a job that imports zerocore, and the shim is none: see zerocore._departure.
    os.environ["ZC_RANK_PROCESS"] = "none"

from zerocore._channel import LAUNCHER, Reporter
from zerocore._launch import rank_of
from zerocore._launcher.processes import die_with_parent, exit_code, signal_group

# What the script gets when the launcher is gone before SIGKILL: enough for an engine to finish its step and save.
ORPHAN_GRACE_S = 5.0
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Shim:
    """One script and the connection to the launcher."""

    def __init__(self, command: list[str]) -> None:
        self._start = time.monotonic()
        self._reporter = Reporter(os.environ[LAUNCHER], rank=rank_of(os.environ), role="shim")
        self._received = b""
        self._wakeup, self._wakeup_end = socket.socketpair()
        for end in (self._wakeup, self._wakeup_end):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wakeup_end.fileno(), warn_on_full_buffer=False)
        self._child = _start_child(command)
        self._code: int | None = None
        self._leaving = False
        self._kill_at: float | None = None  # once the launcher is gone
        self._report("started", pid=self._child, host=socket.gethostname())
        for number in FORWARDED:
            signal.signal(number, self._forward)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # wakes the loop

    def run(self) -> int:
        """Returns the exit code for mpirun."""
        selector = selectors.DefaultSelector()
        selector.register(self._wakeup, selectors.EVENT_READ)
        selector.register(self._reporter.socket, selectors.EVENT_READ)
        while True:
            self._look_at_child()
            if self._leaving:
                signal_group(self._child, signal.SIGKILL)  # what the script has left behind
                return 0  # the launcher knows better, and MPICH's mpirun is quiet about it
            if self._kill_at is not None and (self._code is not None or time.monotonic() > self._kill_at):
                signal_group(self._child, signal.SIGKILL)
                return 1 if self._code is None else exit_code(self._code)
            for key, _ in selector.select(1.0 if self._kill_at is None else 0.1):
                if key.fileobj is self._wakeup:
                    self._wakeup.recv(4096)
                elif not self._listen():
                    selector.unregister(self._reporter.socket)
                    self._orphaned()

    def _report(self, event: str, **fields: object) -> None:
        try:
            self._reporter.report(event, fields)
        except OSError:
            self._orphaned()

    def _look_at_child(self) -> None:
        # It stays a zombie, so that no other process can get its number, which is also its group's.
        if self._code is None:
            ended = os.waitid(os.P_PID, self._child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                self._code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
                self._report("exited", code=self._code, seconds=time.monotonic() - self._start)

    def _listen(self) -> bool:
        """Takes the launcher's orders; False when it is gone."""
        try:
            data = self._reporter.socket.recv(65536)
        except OSError:
            return False
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            self._obey(json.loads(line))
        return bool(data)

    def _obey(self, order: dict[str, object]) -> None:
        if order["do"] == "leave":
            self._leaving = True
        elif order["do"] == "signal":
            self._forward(int(str(order["number"])))
        elif order["do"] == "kill":
            signal_group(self._child, signal.SIGKILL)

    def _forward(self, number: int, _frame: object = None) -> None:
        if self._code is None:
            os.kill(self._child, number)  # the script alone: its worker processes are its own matter
        elif number == signal.SIGTERM:
            self._leaving = True  # the launcher ends an Open MPI job through mpirun

    def _orphaned(self) -> None:
        if self._kill_at is None:
            self._kill_at = time.monotonic() + ORPHAN_GRACE_S
            self._forward(signal.SIGTERM)


def _start_child(command: list[str]) -> int:
    shim = os.getpid()
    environment = {name: value for name, value in os.environ.items() if name != "ZC_RANK_PROCESS"}
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.set_wakeup_fd(-1)
        os.setpgid(0, 0)
        die_with_parent(shim)
        os.execvpe(command[0], command, environment)
    except OSError as error:
        print(f"zerocore: cannot start {command[0]}: {error}", file=sys.stderr, flush=True)
    os._exit(127)


if __name__ == "__main__":
    # At once: while Python shuts down, a signal would end it, and MPICH's mpirun sends one when another shim has left.
    os._exit(Shim(sys.argv[1:]).run())
