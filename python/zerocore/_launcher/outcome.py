"""What has become of the ranks of a run, and of the run."""

from __future__ import annotations

from dataclasses import dataclass, field

SHIM_GONE = "was ended together with its shim"


@dataclass(frozen=True)
class Failure:
    """What happened to a rank. `rank` None: to the job as a whole."""

    rank: int | None
    what: str  # "raised ValueError: bad sample"
    seconds: float  # after the start
    traceback: str = ""

    @property
    def is_consequence(self) -> bool:
        """Whether another rank's failure is behind it: what that rank did is to be shown instead."""
        return self.what.startswith("raised CommError") or self.what == SHIM_GONE


@dataclass
class RankState:
    """A rank as the launcher knows it."""

    pid: int | None = None  # of its script, once that has started
    code: int | None = None  # of its script; negative: the signal that ended it
    over: bool = False
    failure: Failure | None = None

    @property
    def has_spoken(self) -> bool:
        """Whether nothing more is to be heard from it."""
        return self.over or (self.failure is not None and self.failure.traceback != "")


@dataclass
class Outcome:
    """How a run ended.

    Attributes:
        code: for the shell: 0, or that of the rank that failed first.
        failures: of the ranks, the first one first.
        dead: the ranks that a signal killed which was not the launcher's.
        step, path: the newest checkpoint that was committed; None without one.
        stopped: whether it was asked to end.
    """

    code: int = 0
    failures: list[Failure] = field(default_factory=list)
    dead: list[int] = field(default_factory=list)
    step: int | None = None
    path: str | None = None
    stopped: bool = False
