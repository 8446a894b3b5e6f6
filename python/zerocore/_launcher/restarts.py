"""Whether a job that failed starts again, and on how many ranks."""

from __future__ import annotations

from dataclasses import dataclass

FRUITLESS = 2  # restarts in a row that may end without a new checkpoint


@dataclass(frozen=True)
class Decision:
    """`ranks` to start again on; None to stop. `reason` is for people."""

    ranks: int | None
    reason: str


class Restarts:
    """Counts the restarts of one job.

    Args:
        most: how many there may be.
        min_ranks: the fewest ranks to start on.
    """

    def __init__(self, *, most: int, min_ranks: int) -> None:
        self.count = 0
        self._most = most
        self._min_ranks = min_ranks
        self._fruitless = 0

    def decide(self, *, ranks: int, dead: list[int], progress: bool) -> Decision:
        """After a run that failed.

        Args:
            ranks: it had.
            dead: those that a signal has killed; nobody counts on them any more.
            progress: whether it committed a checkpoint newer than all before.
        """
        self._fruitless = 0 if progress or self.count == 0 else self._fruitless + 1
        left = ranks - len(dead)
        if self.count >= self._most:
            return Decision(None, f"all {self._most} restarts are used up")
        if self._fruitless >= FRUITLESS:
            return Decision(
                None, f"{FRUITLESS} restarts in a row ended without a new checkpoint: the job fails before it gets on"
            )
        if left < self._min_ranks:
            return Decision(None, f"{left} of {ranks} ranks are left, and --min-ranks is {self._min_ranks}")
        self.count += 1
        return Decision(left, f"restart {self.count} of {self._most}")
