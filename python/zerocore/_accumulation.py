"""Gradient accumulation: what ends a micro-step, which `step()` is a boundary, what the gradient is divided by.

Note: three kinds of loops. With gas accumulation steps > 1 the first `step()` decides for the run.

  per_micro_step  `step()` after each micro-step (DeepSpeed's way). The gradient is the mean over the step's
                  micro-batches.
  per_step        Exactly gas forward-backward pairs before the first `step()`, the user dividing the loss: PyTorch's
                  rule, the sum of the user's losses, averaged over ranks. Every `step()` is a boundary.
  explicit        `set_gradient_accumulation_boundary()` was called (Accelerate's way): `step()` is a boundary when the
                  flag says so. The gradient is the mean over the micro-batches there were.

With `backward(loss, scale_wrt_gas=False)` the user has divided the loss, in any kind of loop: the gradient of that step
is the sum over its micro-steps, averaged over ranks.

`managed_gradient_accumulation=False` chooses per_step without guessing. Several backwards within one micro-step add up.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
import math
from typing import TYPE_CHECKING, Any, ClassVar

from zerocore.config import ResolvedConfig
from zerocore.errors import ConfigError

if TYPE_CHECKING:
    from zerocore._engine import Engine

logger = logging.getLogger("zerocore")


@dataclasses.dataclass(eq=False)
class Backward:
    """A call of some engine's backward(): its weight counts for all engines that its loss reaches.

    reached: engines whose backward() it is not, and that have got gradients of it.
    """

    under_way: ClassVar[Backward | None] = None
    weight: Any
    reached: list[Engine] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Weights:
    """What this rank's micro-batches of one step weigh; missing: some of them came without a weight."""

    given: list[float] = dataclasses.field(default_factory=list)
    missing: bool = False

    def add(self, weight: Any) -> None:
        """weight: of what one backward() was called for; None: it has none.

        Raises:
            ConfigError: it is no finite number of 0 or more.
        """
        if weight is None:
            self.missing = True
            return
        try:
            value = float(weight)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            value = math.nan
        if not 0 <= value < math.inf:
            raise ConfigError(
                f"[engine] backward: got weight={weight!r}, expected a finite number of 0 or more: how many tokens (or "
                "samples) the loss is the sum over."
            )
        self.given.append(value)


class Loop(enum.Enum):
    """What `step()` means in the user's loop."""

    UNDECIDED = "no step() yet; forward after backward ends a micro-step"
    PER_MICRO_STEP = "step() ends a micro-step"
    PER_STEP = "forward after backward ends a micro-step, every step() is a boundary"
    EXPLICIT = "forward after backward ends a micro-step, the user's flag marks boundaries"


class Accumulation:
    """Counts micro-steps. Knows nothing of gradients.

    Args:
        config: for this number of ranks.
        rank, world_size: of the data-parallel group.
    """

    def __init__(self, config: ResolvedConfig, *, rank: int, world_size: int) -> None:
        self._gas = config.gradient_accumulation_steps
        self._micro_batches = config.micro_batches
        self._rank = rank
        self._size = world_size
        self._boundary_flag = True
        self._present: dict[int, int] = {}  # micro-batches of micro-steps, where the ranks have told each other
        self._is_divided: bool | None = None  # by the user: the losses of this step
        self._before: int | None = None  # of the current one, on ranks before this one; where they have told
        self.micro_steps = 0  # ended since the last boundary
        if not config.managed_gradient_accumulation:
            self.loop = Loop.PER_STEP
        elif self._gas == 1:
            self.loop = Loop.PER_MICRO_STEP
        else:
            self.loop = Loop.UNDECIDED

    def decided(self) -> Loop:
        """The kind of loop as far as it says something about one with more accumulation steps, on fewer ranks."""
        alike = self._gas == 1 and self.loop is Loop.PER_MICRO_STEP  # step() after the only one: either kind
        return Loop.UNDECIDED if alike else self.loop

    def resize(self, config: ResolvedConfig) -> None:
        """Between steps: another number of micro-batches from now on."""
        told_by_number = self._gas == 1 and self.loop is Loop.PER_MICRO_STEP
        self._gas = config.gradient_accumulation_steps
        self._micro_batches = config.micro_batches
        if self._gas == 1 and self.loop is Loop.UNDECIDED:
            self.loop = Loop.PER_MICRO_STEP
        elif self._gas > 1 and told_by_number:
            self.loop = Loop.UNDECIDED

    def set_divided(self, is_divided: bool) -> None:
        """Whether the user has divided the loss of this backward by the number of micro-steps.

        Raises:
            ConfigError: another loss of this step says otherwise.
        """
        if self._is_divided not in (None, is_divided):
            raise ConfigError(
                f"[engine] backward: got scale_wrt_gas={not is_divided} after {is_divided} in the same step, expected "
                "one of the two: a step's gradients are divided once. Pass the same in all micro-steps."
            )
        self._is_divided = is_divided

    def step_has_failed(self) -> bool:
        """Outside of a micro-step: whether step() was called for what has been added up, and has not taken it."""
        return self.loop is Loop.PER_MICRO_STEP and self.micro_steps >= self._gas

    def set_boundary(self, is_boundary: bool) -> None:
        self.loop = Loop.EXPLICIT
        self._boundary_flag = is_boundary

    def forward_ends_micro_step(self) -> bool:
        """Whether a forward in training that follows a backward begins a new micro-batch."""
        return self.loop is not Loop.PER_MICRO_STEP

    def has_micro_batch(self) -> bool:
        """Whether this rank has a micro-batch in the current micro-step (k N + r < M), or a filler."""
        return self.micro_steps >= self._gas or self.micro_steps * self._size + self._rank < self._micro_batches

    def set_present(self, micro_batches: int, *, before: int) -> None:
        """How many micro-batches the current micro-step has, and how many of them on ranks before this one."""
        self._present[self.micro_steps] = micro_batches
        self._before = before

    def micro_batch(self) -> int:
        """The number of this rank's current micro-batch in the step: they count rank by rank in each micro-step."""
        if self._before is None:
            return self.micro_steps * self._size + self._rank
        return sum(map(self._present_in, range(self.micro_steps))) + self._before

    def end_micro_step(self) -> None:
        self.micro_steps += 1
        self._before = None

    def is_boundary(self) -> bool:
        """Whether a `step()` now, inside or after the current micro-step, would step the optimizer."""
        if self.loop is Loop.EXPLICIT:
            return self._boundary_flag
        if self.loop is Loop.PER_STEP:
            return True
        return self.micro_steps + 1 >= self._gas

    def decide(self) -> None:
        """At `step()`, all micro-steps ended: fixes the kind of loop at the first one."""
        if self.loop is not Loop.UNDECIDED:
            return
        if self.micro_steps == self._gas:
            self.loop = Loop.PER_STEP
            logger.warning(
                "[engine] %d forward-backward pairs came before the first step(): taken as PyTorch's accumulation, in "
                "which the loop divides the loss and every step() updates. Set managed_gradient_accumulation=false to "
                "say so, or call step() after each micro-batch.",
                self._gas,
            )
            return
        self.loop = Loop.PER_MICRO_STEP
        if self.micro_steps > 1 and (self._micro_batches % self._size or self._present):
            raise ConfigError(
                f"[engine] {self.micro_steps} forward-backward pairs came before the first step(), expected 1 or "
                f"gradient_accumulation_steps={self._gas}: with {self._micro_batches} micro-batches on {self._size} "
                "ranks it cannot be guessed who had one. Call set_gradient_accumulation_boundary(), or add the losses "
                "up before one backward()."
            )
        if self.micro_steps > 1:
            logger.warning(
                "[engine] %d forward-backward pairs came before the first step(), expected 1 or "
                "gradient_accumulation_steps=%d: taken as one micro-batch with several losses. The bits of this first "
                "micro-step depend on the number of ranks.",
                self.micro_steps,
                self._gas,
            )
            self.micro_steps = 1

    def reached_boundary(self) -> bool:
        """After decide(), all micro-steps ended: whether this `step()` steps the optimizer."""
        if self.loop is Loop.PER_MICRO_STEP:
            return self.micro_steps >= self._gas
        return self.loop is Loop.PER_STEP or self._boundary_flag

    def divisor(self) -> float:
        """What the summed gradients of the ended micro-steps are divided by."""
        present = sum(map(self._present_in, range(self.micro_steps)))
        divided = self.loop is Loop.PER_STEP or self._is_divided
        return present / self.micro_steps if divided else float(present)

    def loss_divisor(self, losses: int) -> int:
        """What the sum of so many losses of this step is divided by for their mean; 1 where the user has done so."""
        return 1 if self.loop is Loop.PER_STEP or self._is_divided else losses

    def _present_in(self, micro_step: int) -> int:
        """Micro-batches that are none of fillers."""
        planned = min(max(self._micro_batches - micro_step * self._size, 0), self._size)
        return self._present.get(micro_step, self._size if micro_step >= self._gas else planned)

    def reset(self) -> None:
        self.micro_steps = 0
        self._present = {}
        self._before = None
        self._is_divided = None
