"""What ranks did in a step, as a trace for Perfetto (https://ui.perfetto.dev) or chrome://tracing.

The core records (cpp/zc/base/trace.h): phases, copies, updates and waits of each thread, and collectives in flight.
Times are of the monotonic clock, which the ranks of one machine share. Those of another start at the same barrier.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from zerocore import _core
from zerocore._exchange import broadcast_json, gather_json
from zerocore.errors import ConfigError

_CAPACITY = 1 << 16  # events a rank

_Function = TypeVar("_Function", bound=Callable[..., Any])


def phase(label: str) -> Callable[[_Function], _Function]:
    """Shows the calls of an engine's method in the trace, and tells its reports how long they took."""

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def call(engine: Any, *args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter_ns()
            with _core.TraceScope(label):
                result = function(engine, *args, **kwargs)
            engine._reports.spent(label, time.perf_counter_ns() - begin, engine.global_steps)
            return result

        return call  # type: ignore[return-value]

    return decorate


@contextlib.contextmanager
def profile(comm: _core.Communicator, path: str | os.PathLike[str]) -> Iterator[None]:
    """Records all ranks in a block. Rank 0 writes the file, which stays empty when the block raises."""
    problem = None
    if comm.rank == 0:
        try:
            Path(path).open("w").close()
        except OSError as error:
            problem = str(error)
    problem = broadcast_json(comm, problem, "profile")
    if problem is not None:
        raise ConfigError(
            f"[engine] profile: rank 0 cannot write the trace: got {problem}, expected a path in a folder that is "
            "there. Name another one."
        )
    if not _core.start_trace(_CAPACITY):
        raise ConfigError(
            "[engine] profile: got a block inside of another, expected one at a time in a process. Leave the first one."
        )
    try:
        comm.barrier("start of a profile").wait()
        start = time.monotonic_ns()
        yield
    finally:
        events, dropped = _core.stop_trace()
    own = {
        "machine": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "start": start,
        "main": threading.main_thread().native_id,
        "dropped": dropped,
        "events": [event for event in events if event[0] >= start],
    }
    ranks = gather_json(comm, own, "profile")
    if comm.rank == 0:
        Path(path).write_text(json.dumps(trace(ranks)))


def trace(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The trace of what each rank recorded, in the format of Chrome's trace viewer: a process a rank."""
    starts: dict[str, int] = {}  # by machine, in nanoseconds of its clock
    for recorded in ranks:
        starts[recorded["machine"]] = min(recorded["start"], starts.get(recorded["machine"], recorded["start"]))
    out: list[dict[str, Any]] = []
    for rank, recorded in enumerate(ranks):
        start = starts[recorded["machine"]]
        threads = {event[2] for event in recorded["events"] if not event[3]}
        names = {thread: "main thread" if thread == recorded["main"] else f"thread {thread}" for thread in threads}
        out.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}})
        out += [
            {"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": name}}
            for thread, name in sorted(names.items())
        ]
        for number, (begin, end, thread, in_flight, kind, label) in enumerate(recorded["events"]):
            name = label if kind == "phase" else f"{kind} {label}".rstrip()
            at, until = (begin - start) / 1e3, (end - start) / 1e3  # microseconds
            if not in_flight:
                event = {"ph": "X", "name": name, "cat": kind, "pid": rank, "tid": thread, "ts": at}
                out.append(event | {"dur": (end - begin) / 1e3})
                continue
            # Collectives overlap without nesting: each is a row of its own.
            event = {"name": name, "cat": "collective", "id": f"{rank}.{number}", "pid": rank, "tid": 0}
            out += [event | {"ph": "b", "ts": at}, event | {"ph": "e", "ts": until}]
    return {
        "displayTimeUnit": "ms",
        "otherData": {"dropped events": sum(recorded["dropped"] for recorded in ranks)},
        "traceEvents": out,
    }
