"""What each rank of the self-test in `zerocore report` runs: collectives over small numbers, and what they take."""

from __future__ import annotations

import time

from zerocore import _channel, _comm, _core

TIMEOUT_MS = 30_000
ROUNDS = 100


def main() -> None:
    """Sums over all ranks, and tells the launcher."""
    comm = _comm.world(timeout_ms=TIMEOUT_MS)
    start = time.perf_counter()
    for _ in range(ROUNDS):
        total = comm.all_reduce([comm.rank + 1], _core.ReduceOp.sum, "self-test")[0]
    microseconds = (time.perf_counter() - start) / ROUNDS * 1e6
    right = total == comm.size * (comm.size + 1) // 2
    _channel.report("progress", right=right, microseconds=microseconds, size=comm.size)


if __name__ == "__main__":
    main()
