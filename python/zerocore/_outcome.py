"""What became of an optimizer step. A device that runs behind tells it later than the step was made."""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import TYPE_CHECKING, Any

import torch

from zerocore.config import PrecisionConfig
from zerocore.errors import NonFiniteError

if TYPE_CHECKING:
    from zerocore._engine import Engine

logger = logging.getLogger("zerocore")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradNorm:
    """The L2 norm of the mean gradient in the last step. `after` = before * factor; factor < 1 when it was clipped."""

    before: float
    after: float
    factor: float


@dataclasses.dataclass(frozen=True)
class _Made:
    """A step, as far as it was known when it was made."""

    step: int
    samples: int  # over all ranks, from the start
    losses: list[torch.Tensor]  # of this rank
    loss_divisor: float
    lr_kwargs: dict[str, Any]


class Outcomes:
    """Settles each step once its outcome is there: the scheduler's step, warnings and errors, what is reported of it.

    Every property waits for the last step's; the next step does at the latest.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._made: _Made | None = None
        self._skipped_steps = 0
        self._applied = False
        self._grad_norm: GradNorm | None = None
        self._scale = engine._params.loss_scale()  # of the last step that was settled

    def made(self, *, losses: list[torch.Tensor], loss_divisor: float, lr_kwargs: dict[str, Any] | None) -> None:
        """The engine has made a step, and counted it."""
        engine = self._engine
        self._made = _Made(
            engine.global_steps - 1, engine.global_samples, losses, loss_divisor, {} if lr_kwargs is None else lr_kwargs
        )
        if not engine._params.runs_behind:
            self.settle()

    def made_none(self) -> None:
        """A call of step() was not on a boundary."""
        self.settle()
        self._applied = False

    def settle(self) -> None:
        """Collective in nothing: ranks may call it at different times."""
        made, self._made = self._made, None
        if made is None:
            return
        engine = self._engine
        result = engine._params.result()
        self._grad_norm = GradNorm(before=result.grad_norm, after=result.grad_norm * result.clip, factor=result.clip)
        self._applied = not result.skipped
        self._skipped_steps += result.skipped
        scale, self._scale = self._scale, engine._params.loss_scale()
        optimizer, scheduler = engine._optimizer, engine._scheduler
        optimizer.overflow, optimizer.loss_scale = result.skipped, self.loss_scale
        if result.skipped:
            self._report_nonfinite(made, scale, result.nonfinite, result.exhausted)
        else:
            for each in (optimizer, optimizer.source):
                if each is not None:  # what its own step() would have noted; torch's schedulers warn without
                    each._opt_called = True  # type: ignore[attr-defined]
            if scheduler is not None:
                scheduler.step(**made.lr_kwargs)
        lrs = [float(group["lr"]) for group in optimizer.param_groups]
        engine._reports.end_step(
            made.losses, loss_divisor=made.loss_divisor, lr=lrs[0], loss_scale=self._scale, samples=made.samples
        )
        every = engine.config.steps_per_print
        if every is not None and (made.step + 1) % every == 0 and engine.rank == 0:
            logger.info(
                "[engine] step %d: lr %s, grad norm %g, skipped %d",
                made.step + 1,
                lrs,
                result.grad_norm,
                self._skipped_steps,
            )

    @property
    def applied(self) -> bool:
        self.settle()
        return self._applied

    @property
    def grad_norm(self) -> GradNorm | None:
        self.settle()
        return self._grad_norm

    @property
    def skipped_steps(self) -> int:
        self.settle()
        return self._skipped_steps

    @skipped_steps.setter
    def skipped_steps(self, count: int) -> None:
        self._skipped_steps = count

    @property
    def loss_scale(self) -> float:
        self.settle()
        return 1.0 if self._scale is None else self._scale

    def reload(self) -> None:
        """The loss scale was set by somebody else."""
        self._scale = self._engine._params.loss_scale()

    def _report_nonfinite(self, made: _Made, scale: float | None, params: list[str], exhausted: bool) -> None:
        precision, rank = self._engine.config.precision, self._engine.rank
        bad_losses = [float(loss) for loss in made.losses if not math.isfinite(float(loss))]
        what = (
            f"[engine] step {made.step}: gradients are not finite, nothing was updated: got inf or NaN in "
            f"{len(params)} parameters, first {', '.join(params[:5])}; loss on rank {rank} "
            f"{f'was {bad_losses[0]}' if bad_losses else 'was finite'}"
        )
        if exhausted and precision.on_nonfinite != "clamp":
            raise NonFiniteError(
                f"{what}; the loss scale is at its minimum {scale:g}. A loss that is not finite comes from the model "
                f"or the data; otherwise "
                "use bf16, lower the learning rate, clip gradients, or set precision.on_nonfinite='clamp' to go on."
            )
        if _raises_on_nonfinite(precision):
            raise NonFiniteError(
                f"{what}. Look at the data of this step, lower the learning rate, clip gradients, or set "
                f"precision.on_nonfinite='skip'."
            )
        if rank == 0:
            then = "" if scale is None else f"; loss scale was {scale:g}, is {self._scale:g}"
            logger.warning("%s%s", what, then)


def _raises_on_nonfinite(precision: PrecisionConfig) -> bool:
    whole = {precision.dtype, precision.compute_dtype or precision.dtype} == {"fp32"}
    return precision.on_nonfinite == "raise" or (precision.on_nonfinite is None and whole)
