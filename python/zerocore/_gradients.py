"""Hands gradients to the core as backward produces them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

from zerocore import _core, _tensor
from zerocore.errors import ConfigError

logger = logging.getLogger("zerocore")


class Gradients:
    """Takes the gradients of parameters from backward to the core, from its construction to close().

    Args:
        trained: (the core's number, (name, parameter)) of each parameter that is trained.
        scaled: gradients are those of a scaled loss, so that they may come from engine.backward() only.
        follow: called before the core takes gradients.
        on_foreign: called for each gradient outside backward(), which some loss brings that is not this engine's; must
            begin a micro-step where none is open.
    """

    def __init__(
        self,
        core: _core.StepEngine,
        trained: list[tuple[int, tuple[str, torch.nn.Parameter]]],
        *,
        scaled: bool,
        follow: Callable[[], None],
        on_foreign: Callable[[], None],
    ) -> None:
        self._core = core
        self._names = {index: name for index, (name, _) in trained}
        self._params = {index: param for index, (_, param) in trained}
        self._scaled = scaled
        self._on_foreign = on_foreign
        self._follow = follow
        self._in_bucket: dict[int, list[int]] = {}
        for index in self._params:
            self._in_bucket.setdefault(core.location(index)[0], []).append(index)
        # Gradients that the core points to, with their versions: kept alive until it has copied them.
        self._held: dict[int, tuple[torch.Tensor, int]] = {}
        self._in_backward = False
        self._scaled_task: int | None = None  # torch's number of the last backward of a loss that the user scaled
        self._arrived = False
        self._told_of_sparse = False
        self.in_micro_step = False
        self._hooks: list[Any] = [
            param.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]
            for index, param in self._params.items()
        ]

    def _hook(self, index: int) -> Any:
        own = self._params[index]
        dtype, numel, stride = own.dtype, own.numel(), own.stride()
        core_dtype = _tensor.DTYPES[dtype]
        ready, held, follow = self._core.ready, self._held, self._follow

        def on_gradient(param: torch.Tensor) -> None:
            if self._scaled and not self._in_backward and _current_task() != self._scaled_task:
                raise ConfigError(
                    f"[engine] a gradient of {self._names[index]} arrived outside engine.backward(): under fp16 the "
                    "loss must be scaled. Call engine.backward(loss) or engine.scale(loss).backward() instead of "
                    "loss.backward(); when the loss is "
                    "another engine's, switch this one's parameters off with requires_grad_(False) meanwhile."
                )
            if not self._in_backward:
                self._on_foreign()
            self._arrived = True
            grad = param.grad
            assert grad is not None
            if grad.dtype is not dtype or grad.layout is not torch.strided or grad.stride() != stride:
                if grad.layout is not torch.strided:
                    self._tell_of_sparse(index)
                matched = _tensor.matching(grad, param)
                if matched is not grad:
                    param.grad = grad = matched
            held[index] = (grad, grad._version)
            follow()
            for bucket in ready(index, grad.data_ptr(), numel, core_dtype, self._in_backward):
                for taken in self._in_bucket[bucket]:
                    self._params[taken].grad = None
                    held.pop(taken, None)

        return on_gradient

    def _tell_of_sparse(self, index: int) -> None:
        if not self._told_of_sparse:
            self._told_of_sparse = True
            logger.warning(
                "[engine] the gradient of %s is sparse: it is made dense as it arrives, and reduced like all others. "
                "The result is that of sparse=False, which saves the conversion.",
                self._names[index],
            )

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Within this block gradients are the engine's: scaled, under fp16."""
        self._in_backward = True
        try:
            yield
        finally:
            self._in_backward = False

    def expect_scaled(self, _grad: torch.Tensor) -> None:
        """A hook of a loss that the user has scaled: the backward under way may bring gradients."""
        self._scaled_task = _current_task()

    @property
    def took_any(self) -> bool:
        """Whether a gradient has arrived in the open micro-step."""
        return self.in_micro_step and self._arrived

    def begin_micro_step(self, *, has_micro_batch: bool) -> None:
        self._core.begin_micro_step(has_micro_batch)
        self.in_micro_step = True
        self._arrived = False

    def end_micro_step(self, *, drop: bool) -> None:
        """Ends it. drop: gradients that the user has removed or changed meanwhile are no error. Collective."""
        for index, (grad, version) in self._held.items():
            if not drop and (self._params[index].grad is not grad or grad._version != version):
                raise ConfigError(
                    f"[engine] the gradient of {self._names[index]} was removed or changed between backward() and "
                    "step(): the engine takes gradients as they arrive, mostly before backward() returns. Drop them "
                    "with engine.zero_grad(), and clip with gradient_clipping in the config."
                )
        late = self._core.end_micro_step()
        self.in_micro_step = False
        self._held.clear()
        for param in self._params.values():
            param.grad = None
        if late:
            logger.warning(
                "[engine] gradients of %d parameters (first %s) arrived after their bucket had been reduced: one "
                "extra round carried them. Nothing is lost; these bits depend on the number of ranks.",
                len(late),
                self._names[late[0]],
            )

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _current_task() -> int:
    """The number of the backward that this thread is in."""
    return torch._C._current_graph_task_id()
