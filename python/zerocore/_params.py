"""The trainable parameters of an engine: their place in the core's buckets and the hooks that hand gradients over."""

from __future__ import annotations

import contextlib
import logging
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from zerocore import _core, _tensor
from zerocore._optimizer import Optimizer
from zerocore.config import ResolvedConfig
from zerocore.errors import ConfigError, DeviceError, UnsupportedError

logger = logging.getLogger("zerocore")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NUM_GRAD_BUFFERS = 2  # one is filled while the other is in flight


class TrainableParams:
    """Moves the optimizer's parameters into the core's buckets, and feeds it their gradients.

    The move is in place: `p.data` becomes a view. Parameters are numbered in the model's registration order. Collective
    over `comm`: rank 0's values count.

    Args:
        on_first_gradient: called when a gradient arrives outside a micro-step; must begin one.

    Raises:
        ConfigError: a parameter of the optimizer is not the model's, or stands in two groups.
        DeviceError, UnsupportedError: a device, dtype or layout without code here.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer,
        config: ResolvedConfig,
        comm: _core.Communicator,
        *,
        on_first_gradient: Callable[[], None],
    ) -> None:
        self._optimizer = optimizer
        self._dtype = DTYPES[config.precision.dtype]
        group_of = _groups(optimizer)
        named = [(name, p) for name, p in model.named_parameters() if id(p) in group_of]
        _check(model, named, group_of, config)
        self.names = [name for name, _ in named]
        self.params = [p for _, p in named]
        specs = [_core.ParamSpec(name, p.numel(), _tensor.DTYPES[self._dtype], group_of[id(p)]) for name, p in named]
        self._core = _core.StepEngine(
            comm=comm,
            params=specs,
            groups=optimizer.hypers(),
            stage=config.zero.stage,
            bucket_numel=config.zero.bucket_numel,
            num_grad_buffers=_NUM_GRAD_BUFFERS,
        )
        self._in_bucket: list[list[int]] = [[] for _ in range(self._core.num_buckets())]
        for index, param in enumerate(self.params):
            self._in_bucket[self._core.bucket_of(index)].append(index)
            self._move(index, param)
        self._homes = [p.data_ptr() for p in self.params]
        self._versions = [p._version for p in self.params]
        self._not_trained = [(name, p) for name, p in model.named_parameters() if id(p) not in group_of]
        self._told_not_trained = {name for name, p in self._not_trained if p.requires_grad}
        # Gradients that the core points to, with their versions: kept alive until it has copied them.
        self._held: list[tuple[torch.Tensor, int] | None] = [None] * len(self.params)
        self.in_micro_step = False
        self.closed = False
        self._scaled = config.precision.dtype == "fp16"
        self._in_backward = False
        self._on_first_gradient = on_first_gradient
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._hook(i))  # type: ignore[no-untyped-call]
            for i, p in enumerate(self.params)
        ]

    def _move(self, index: int, param: torch.nn.Parameter) -> None:
        memory, offset_bytes = self._core.param_memory(index)
        with torch.no_grad():
            home = _tensor.like_in_memory(memory, offset_bytes, param, self._dtype)
            values = torch.empty_like(home, dtype=torch.float32).copy_(param)
            self._core.load_param(index, _tensor.view(values))
            param.data = home
            param.grad = None

    def _hook(self, index: int) -> Any:
        def on_gradient(param: torch.Tensor) -> None:
            if self._scaled and not self._in_backward:
                raise ConfigError(
                    f"[engine] a gradient of {self.names[index]} arrived outside engine.backward(): under fp16 the "
                    "loss must be scaled. Call engine.backward(loss) instead of loss.backward(); when the loss is "
                    "another engine's, switch this one's parameters off with requires_grad_(False) meanwhile."
                )
            if not self.in_micro_step:
                self._on_first_gradient()
            self._arrived = True
            grad = param.grad
            assert grad is not None
            matched = _tensor.matching(grad, param)
            if matched is not grad:
                param.grad = matched
            self._held[index] = (matched, matched._version)
            launched = self._core.ready(
                index, matched.data_ptr(), matched.numel(), _tensor.DTYPES[matched.dtype], self._in_backward
            )
            for bucket in launched:
                for taken in self._in_bucket[bucket]:
                    self.params[taken].grad = self._held[taken] = None

        return on_gradient

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Within this block gradients are the engine's: scaled, under fp16."""
        self._in_backward = True
        try:
            yield
        finally:
            self._in_backward = False

    @property
    def took_gradients(self) -> bool:
        """Whether a gradient has arrived in the open micro-step."""
        return self.in_micro_step and self._arrived

    def begin_micro_step(self, *, has_micro_batch: bool) -> None:
        self._check_homes()
        self._core.begin_micro_step(has_micro_batch)
        self.in_micro_step = True
        self._arrived = False

    def _check_homes(self) -> None:
        """The model and the engine must not have come apart."""
        if self.closed:
            raise ConfigError("[engine] the engine was closed, expected one that is open. Build a new one to train on.")
        for name, param, home in zip(self.names, self.params, self._homes, strict=True):
            if param.data_ptr() != home:
                raise ConfigError(
                    f"[engine] parameter {name} no longer lies in the engine's memory: it was given other storage "
                    "(p.data = ..., model.to(), load_state_dict(assign=True), a second engine). Copy values in place "
                    "instead, as in p.copy_(values), or build a new engine."
                )
        for name, param in self._not_trained:
            if param.requires_grad and name not in self._told_not_trained:
                self._told_not_trained.add(name)
                logger.warning(
                    "[engine] parameter %s requires a gradient now, but did not when the engine was built: it is not "
                    "trained. Build a new engine to train it.",
                    name,
                )

    def end_micro_step(self, *, drop: bool = False) -> None:
        """Ends it. drop: gradients that the user has removed or changed meanwhile are no error."""
        for name, param, held in zip(self.names, self.params, self._held, strict=True):
            if held is not None and not drop and (param.grad is not held[0] or held[0]._version != held[1]):
                raise ConfigError(
                    f"[engine] the gradient of {name} was removed or changed between backward() and step(): the engine "
                    "takes gradients as they arrive, mostly before backward() returns. Drop them with "
                    "engine.zero_grad(), and clip with gradient_clipping in the config."
                )
        late = self._core.end_micro_step()
        self.in_micro_step = False
        for index, param in enumerate(self.params):
            param.grad = self._held[index] = None
        if late:
            logger.warning(
                "[engine] gradients of %d parameters (first %s) arrived after their bucket had been reduced: one "
                "extra round carried them. Nothing is lost; these bits depend on the number of ranks.",
                len(late),
                self.names[late[0]],
            )

    def step(self, *, divisor: float, max_norm: float) -> StepOutcome:
        written = self._reload_masters()
        result = self._core.step(self._optimizer.hypers(), divisor, max_norm, zlib.crc32(repr(written).encode()))
        if not result.skipped:
            torch.autograd.graph.increment_version(self.params)  # torch must see the core's writes
            self._versions = [p._version for p in self.params]
        return StepOutcome(result, [self.names[i] for i in result.nonfinite])

    def zero_grad(self) -> None:
        """Drops everything that was folded since the last step."""
        self._core.zero_grad()

    def _reload_masters(self) -> list[int]:
        """Masters follow values that were written to the model, by load_state_dict() for one. Returns which."""
        written = [i for i, p in enumerate(self.params) if p._version != self._versions[i]]
        for index in written:
            self._versions[index] = self.params[index]._version
            self._core.reload_master(index)
        return written

    def memory_report(self) -> dict[str, int]:
        return dict(self._core.memory_report())

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.closed = True


class StepOutcome:
    """What an optimizer step did; `grad_norm` is before clipping by `clip`, `nonfinite` names parameters."""

    def __init__(self, result: _core.StepResult, nonfinite: list[str]) -> None:
        self.skipped: bool = result.skipped
        self.grad_norm: float = result.grad_norm
        self.clip: float = result.clip
        self.nonfinite = nonfinite


def share_other_state(
    model: torch.nn.Module, trained: TrainableParams, comm: _core.Communicator, dtype: torch.dtype
) -> None:
    """Gives every rank rank 0's values of what is not trained: frozen parameters and buffers.

    Under bf16 and fp16 they are cast, as the trained ones are; under fp32 they keep their dtypes.
    """
    ours = {id(p) for p in trained.params}
    if dtype != torch.float32:
        _cast_other_state(model, ours, dtype)
    broadcast([p for p in model.parameters() if id(p) not in ours], comm, "frozen parameters")
    broadcast(list(model.buffers()), comm, "buffers")


def _cast_other_state(model: torch.nn.Module, ours: set[int], dtype: torch.dtype) -> None:
    with torch.no_grad():
        for param in model.parameters():
            if id(param) not in ours and param.is_floating_point():
                param.data = param.data.to(dtype)
        casts: dict[int, torch.Tensor] = {}  # a buffer that two modules share stays shared
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
                if buffer.is_floating_point() and buffer.dtype != dtype:
                    module._buffers[name] = casts.setdefault(id(buffer), buffer.to(dtype))


def broadcast(tensors: list[torch.Tensor], comm: _core.Communicator, label: str) -> None:
    """Replaces the values of `tensors` by rank 0's. Collective."""
    if comm.size == 1:
        return
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        whole = tensor.detach().contiguous()
        comm.broadcast(_tensor.bytes_view(whole), 0, label).wait()
        if whole.data_ptr() == tensor.data_ptr():
            continue
        try:
            tensor.detach().copy_(whole)
        except RuntimeError as error:
            raise UnsupportedError(
                f"[engine] {label}: got one of shape {tuple(tensor.shape)} and strides {tensor.stride()} that cannot "
                f"be written to ({error}). Clone it in the module."
            ) from error


def _groups(optimizer: Optimizer) -> dict[int, int]:
    group_of: dict[int, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if param.requires_grad:
                group_of[id(param)] = index
    return group_of


def _check(model: torch.nn.Module, named: list[Any], group_of: dict[int, int], config: ResolvedConfig) -> None:
    if len(named) != len(group_of):
        raise ConfigError(
            f"[engine] the optimizer holds {len(group_of)} trainable parameters, {len(named)} of them the model's: "
            f"expected all. Build the "
            "optimizer over the parameters of the model that the engine gets."
        )
    if not named:
        raise ConfigError(
            "[engine] no trainable parameter: the optimizer's parameters are all frozen. Set requires_grad=True."
        )
    for name, param in model.named_parameters():
        if param.device.type != "cpu":
            raise DeviceError(
                f"[engine] parameter {name} lies on {param.device}: got no code for it, expected cpu. Move the model "
                f"to the CPU."
            )
    for name, param in named:
        if param.dtype not in _tensor.DTYPES:
            raise UnsupportedError(
                f"[engine] parameter {name} is {param.dtype}: expected fp32, fp16 or bf16. Convert the model, e.g. "
                f"model.float()."
            )
        if config.precision.dtype == "fp32" and param.dtype != torch.float32:
            raise ConfigError(
                f"[engine] parameter {name} is {param.dtype} but the config trains in fp32. Enable bf16 or fp16 in "
                f"the config, or call model.float()."
            )
    left_out = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in group_of]
    if left_out:
        logger.warning(
            "[engine] %d parameters require a gradient but stand in no optimizer group (first %s): they are not "
            "trained.",
            len(left_out),
            left_out[0],
        )
