"""What scripts for DeepSpeed call on an engine besides training it: settings under its names, and hints."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

from zerocore import _data, zero
from zerocore._accumulation import Accumulation
from zerocore._device import Host
from zerocore._optimizer import Optimizer
from zerocore._param_specs import DTYPES
from zerocore._part import EnginePart
from zerocore._units import has_forward, original
from zerocore.config._batch import resolve_batch
from zerocore.errors import ConfigError, UnsupportedError


class Calls(EnginePart):
    """no_sync(), scale(), compile(), set_train_batch_size() and their like."""

    _accumulation: Accumulation
    _device: Host
    _optimizer: Optimizer
    _in_no_sync = 0
    training_dataloader: Any

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A block of backwards that no `step()` follows yet. Legal in every stage, and changes no number.

        It is a hint that is not needed: each micro-step's gradients are folded into the shards as they come, so
        accumulation takes no memory beyond them, and nothing is communicated a second time at `step()`.
        """
        self._in_no_sync += 1
        try:
            yield
        finally:
            self._in_no_sync -= 1

    coalesce_grad_reduction = no_sync

    def _check_may_step(self) -> None:
        if self._in_no_sync:
            raise ConfigError(
                "[engine] step: got a call inside no_sync() or coalesce_grad_reduction(), expected one after the "
                "block. Leave it before the micro-batch that completes the step."
            )

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale, for who calls backward() on it: `engine.scale(loss).backward()`.

        With the engine's own backward(), which scales by itself, it is not needed.
        """
        scaled = self._params.scale_loss(loss)
        if scaled is loss:
            return loss
        scaled.register_hook(self._params.gradients.expect_scaled)  # type: ignore[no-untyped-call]
        return scaled

    def compile(
        self,
        backend: str | Callable[..., Any] = "inductor",
        compile_kwargs: dict[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compiles the model with torch.compile, in place. Names and checkpoints stay as they are.

        In stage 3 each innermost unit is compiled by itself, so that gathering and releasing stay outside of graphs.

        Args:
            backend, compile_kwargs: as torch.compile takes them.
            schedule, compiled_autograd_enabled: must be None and False: there are no passes to schedule.

        Raises:
            UnsupportedError: they are not.
        """
        if schedule is not None or compiled_autograd_enabled:
            raise UnsupportedError(
                f"[engine] compile: got schedule={schedule!r}, compiled_autograd_enabled={compiled_autograd_enabled}, "
                "expected None and False: there are no compiler passes of DeepSpeed's here. Leave them out."
            )
        kwargs = {"backend": backend, **(compile_kwargs or {})}
        units = zero.units_of(self.module, self.config)
        if not units:
            self.module.compile(**kwargs)
        outer = {unit.parent for unit in units}
        for index, unit in enumerate(units):
            if index not in outer and has_forward(unit.module):
                module = original(unit.module)
                module.forward = torch.compile(module.forward, **kwargs)
        self._is_compiled = True

    @property
    def is_compiled(self) -> bool:
        """Whether compile() was called."""
        return getattr(self, "_is_compiled", False)

    def to(self, *args: Any, **kwargs: Any) -> Calls:
        """Returns the engine, whose parameters are on their device and in their dtype; other ones are refused.

        Raises:
            UnsupportedError: another device than `engine.device`, or dtype than the one parameters are used in.
        """
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        used = DTYPES[self._computes_in()]
        ours = self._device.torch
        elsewhere = device is not None and (device.type != ours.type or device.index not in (None, ours.index))
        if elsewhere or dtype not in (None, used):
            raise UnsupportedError(
                f"[engine] to: got {device or ''} {dtype or ''}, expected {ours} and {used}: an engine's parameters "
                'stay where it has put them. Choose the dtype by the precision config, the device by "device".'
            )
        return self

    def empty_partition_cache(self) -> None:
        """Releases what stage 3 keeps gathered for its next use, say after an evaluation. To be called on all ranks.

        Raises:
            ConfigError: between backward() and step(), which needs it.
        """
        if self._params.gradients.in_micro_step:
            raise ConfigError(
                "[engine] empty_partition_cache: got a call between backward() and step(), expected one outside of a "
                "micro-step. Call it after step()."
            )
        self._params.gatherer.invalidate()

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> _data.MicroBatchLoader:
        """A loader of this rank's micro-batches of a data set, as Engine(training_data=...) makes one.

        Args:
            dataset: with a length and an item for each index.
            collate_fn: makes a micro-batch of a list of samples; by default torch's.
            batch_size: None, or samples a micro-batch as configured.
            route, data_sampler: must be "train" and None: the engine deals samples in its own order.
            pin_memory, num_local_io_workers: no effect; data.num_workers counts.

        Raises:
            UnsupportedError: another batch size, route or sampler.
        """
        for name, got, expected in (
            ("batch_size", batch_size, (None, self.config.micro_batch_size)),
            ("route", route, ("train",)),
            ("data_sampler", data_sampler, (None,)),
        ):
            if got not in expected:
                raise UnsupportedError(
                    f"[engine] deepspeed_io: {name}: got {got!r}, expected {expected[-1]!r}. Use a loader of your own."
                )
        return _data.make_loader(
            dataset, config=self.config, rank=self.rank, world_size=self.comm.size, collate_fn=collate_fn
        )

    def set_data_post_process_func(self, post_process_func: Callable[[Any, dict[str, int]], Any] | None) -> None:
        """From the next batch on, `training_dataloader` yields what a function makes of each.

        Args:
            post_process_func: called with the batch and the loader's state_dict(): the epoch, and whole steps of it.

        Raises:
            ConfigError: the engine deals no training_data.
        """
        if not isinstance(self.training_dataloader, _data.MicroBatchLoader):
            raise ConfigError(
                "[engine] set_data_post_process_func: got an engine without training_data, expected one that deals "
                "it. Call the function on the batches of your own loader."
            )
        self.training_dataloader.post_process = post_process_func

    # Batch sizes

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """From the next step on: samples a step, over all ranks; a micro-batch's stay, so the accumulation changes.

        To be called on all ranks, between steps.

        Raises:
            ConfigError: it is no multiple of the micro-batch, or a step is under way.
            UnsupportedError: the engine deals training_data, whose order is made for one batch size.
        """
        self._resize("set_train_batch_size", train_batch_size, self.config.micro_batch_size)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """From the next step on: samples a micro-batch; the accumulation stays, so the train batch size changes.

        Raises:
            ConfigError, UnsupportedError: as set_train_batch_size().
        """
        self._resize("set_train_micro_batch_size", micro_batch_size * self.config.micro_batches, micro_batch_size)

    def _resize(self, call: str, train_batch_size: int, micro_batch_size: int) -> None:
        if self._params.gradients.in_micro_step or self._accumulation.micro_steps > 0:
            raise ConfigError(
                f"[engine] {call}: got a call with gradients pending, expected one right after a step() that updates."
            )
        if isinstance(self.training_dataloader, _data.MicroBatchLoader):
            raise UnsupportedError(
                f"[engine] {call}: got an engine that deals training_data, expected one that is given its batches: the "
                "order of the data is made for one batch size. Use a loader of your own."
            )
        batch = resolve_batch(
            train_batch_size=train_batch_size,
            micro_batch_size=micro_batch_size,
            gradient_accumulation_steps=None,
            world_size=self.comm.size,
        )
        self.config = dataclasses.replace(self.config, **batch._asdict())
        self._accumulation.resize(self.config)

    def train_batch_size(self) -> int:
        """Samples a step, over all ranks."""
        return self.config.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples a micro-batch: what a rank puts through one forward and backward."""
        return self.config.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches a rank goes through in one step."""
        return self.config.gradient_accumulation_steps

    def get_batch_info(self) -> tuple[int, int, int]:
        """Samples a step, samples a micro-batch, micro-batches a step and rank."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    # Settings

    def zero_optimization(self) -> bool:
        """Whether the ZeRO stage is above 0."""
        return self.config.zero.stage > 0

    def zero_optimization_stage(self) -> int:
        """0 to 3."""
        return self.config.zero.stage

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are sharded: stage 2 or 3."""
        return self.config.zero.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether parameters are sharded: stage 3."""
        return self.config.zero.stage == 3

    def gradient_clipping(self) -> float:
        """Largest norm of the gradient; 0: off."""
        return self.config.gradient_clipping

    def fp16_enabled(self) -> bool:
        """Whether forward and backward compute in fp16."""
        return self._computes_in() == "fp16"

    def bfloat16_enabled(self) -> bool:
        """Whether forward and backward compute in bf16."""
        return self._computes_in() == "bf16"

    def _computes_in(self) -> str:
        return self.config.precision.compute_dtype or self.config.precision.dtype

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale adapts to overflows."""
        return self._params.loss_scale() is not None and self.config.precision.loss_scale.static_scale is None

    def steps_per_print(self) -> int | None:
        """Steps between two lines of the log; None: no lines."""
        return self.config.steps_per_print

    def optimizer_name(self) -> str:
        """The type of the optimizer, as the configuration spells it."""
        return self._optimizer.type

    def scheduler_name(self) -> str | None:
        """The config's; None where a scheduler was handed in, or none."""
        return None if self.config.scheduler is None else self.config.scheduler.type

    def get_mom(self) -> list[Any]:
        """The momentum of each parameter group, or Adam's betas."""
        return [group.get("momentum", group.get("betas")) for group in self._optimizer.param_groups]

    # Not here

    def offload_states(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises UnsupportedError: states are not moved between tiers of memory."""
        _no_tiers("offload_states")

    def reload_states(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises UnsupportedError: states are not moved between tiers of memory."""
        _no_tiers("reload_states")


def _no_tiers(call: str) -> NoReturn:
    raise UnsupportedError(
        f"[engine] {call}: got a call to move states between tiers of memory, expected none: this version "
        "does not move them. Call destroy() and delete the engine to free its memory; in stage 3 its model, too."
    )
