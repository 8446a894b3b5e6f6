"""The training engine: a torch module whose model states are sharded over ranks."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from zerocore import _comm, _core, _data, _device, _init, _memory, _optimizer, _profile, checkpointing, schedulers, zero
from zerocore._accumulation import Accumulation, Backward, Loop, Weights
from zerocore._agreement import check_agreement
from zerocore._buffers import RunningStatistics
from zerocore._calls import Calls
from zerocore._checkpoint import Checkpoints
from zerocore._join import Join
from zerocore._other_state import broadcast, move_other_state, other_state_bytes, share_other_state
from zerocore._outcome import GradNorm, Outcomes
from zerocore._param_specs import DTYPES
from zerocore._params import ModelParams
from zerocore._random import named_generator
from zerocore._reports import Reports, collectives
from zerocore._saving import Saving
from zerocore._whole_model import WholeModel
from zerocore.config import Config, as_config
from zerocore.errors import ConfigError, Error

logger = logging.getLogger("zerocore")


class Engine(WholeModel, Saving, Calls):
    """Trains `model` with its states sharded as the ZeRO stage says.

    It is used like the module itself:

        loss = engine(batch); engine.backward(loss); engine.step()

    What it does not have itself it has from the module: `engine.generate(...)`.

    Args:
        model: any torch module, on the CPU or on the engine's device. Parameters are moved, in place, into the
            engine's buckets in the dtype of the precision config; rank 0's values count. Gradients are taken by the
            engine: `p.grad` is None after `backward`.
        config: a zerocore.Config, or DeepSpeed's JSON as a dict or a path.
        optimizer: a fresh torch.optim.AdamW, Adam, SGD or Adagrad, or ops.lion.FusedLion, over the model's parameters
            (its groups and hyperparameters are honoured), or a function of the parameters that returns one; by default
            the config's. Other classes run with allow_untested_optimizer.
        lr_scheduler: an object with step(), or a function of the optimizer that returns one; by default the config's.
            It is stepped after each optimizer step that was applied.
        training_data: a map-style dataset; `engine.training_dataloader` then deals this rank's micro-batches.
        collate_fn: for that loader.
        model_parameters: parameters or parameter groups to train, for an optimizer of the config; by default all that
            require a gradient.
        comm: a communicator over all ranks of the job; by default the one of the process.

    Raises:
        ConfigError: the config is wrong, ranks disagree on config or model, or nothing is to be trained.
        UnsupportedError, DeviceError: a parameter, dtype, device or optimizer that this build has no code for.
        CommError: another rank failed or did not arrive.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        config: Config | Mapping[str, Any] | str | os.PathLike[str],
        *,
        optimizer: torch.optim.Optimizer | Callable[[Any], Any] | None = None,
        lr_scheduler: Any = None,
        training_data: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        model_parameters: Iterable[Any] | None = None,
        comm: Any = None,
    ) -> None:
        super().__init__()
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(f"[engine] model: got {type(model).__name__}, expected a torch.nn.Module.")
        if _init.open_inits:
            raise ConfigError(
                "[engine] got an engine built inside `with zerocore.zero.Init():`, expected one after it. Leave the "
                "block when the model is constructed."
            )
        unresolved = as_config(config)
        world = (
            comm
            if comm is not None
            else _comm.world(timeout_ms=unresolved.comm.timeout_ms, backend=unresolved.comm.backend)
        )
        self.config = unresolved.resolve(world.size)
        _core.set_num_threads(torch.get_num_threads())  # ranks share cores: the core takes as many as torch does
        self._device = _device.choose(self.config)
        self._host_comm = _core.shard_group(world)
        self.comm = self._device.communicator(self._host_comm, fast_reduction=self.config.comm.reduction == "fast")
        self.module = model
        given = model_parameters if model_parameters is not None else [p for p in model.parameters() if p.requires_grad]
        self._optimizer = _optimizer.build(
            optimizer,
            self.config.optimizer,
            _trainable(given, model),
            model=model,
            allow_untested=self.config.allow_untested_optimizer,
        )
        check_agreement(self.comm, config=self.config, model=model, optimizer=self._optimizer)
        # What can fail for the user's sake comes first: from here on the model is changed.
        self._statistics = RunningStatistics(model, self.comm, ordered=self.config.buffers == "ordered")
        self._reports = Reports(self.config, rank=self.rank)
        self._scheduler = schedulers.build(lr_scheduler, self.config.scheduler, self._optimizer)
        self._accumulation = Accumulation(self.config, rank=self.rank, world_size=self.world_size)
        self.training_dataloader = None
        if training_data is not None:
            self.training_dataloader = _data.make_loader(
                training_data, config=self.config, rank=self.rank, world_size=self.world_size, collate_fn=collate_fn
            )
        units = zero.units_of(model, self.config)
        with _memory.direct_allocations():
            self._params = ModelParams(
                model,
                self._optimizer,
                self.config,
                self.comm,
                device=self._device,
                units=units,
                on_foreign_gradient=self._on_foreign_gradient,
                on_read_gradient=self._end_micro_step_early,
            )
            precision = self.config.precision
            dtypes = [DTYPES[precision.dtype], DTYPES[precision.compute_dtype or precision.dtype]]
            move_other_state(model, self._params.params, self.device)
            share_other_state(model, self._params.params, self.comm, dtypes)
        self._statistics.attach()
        self.global_steps = 0
        self.global_samples = 0  # that the steps so far went through, over all ranks
        self.micro_steps = 0
        self._forwards = 0  # in training since the last micro-step ended
        self._had_micro_batch = True
        self._ended_early = False  # the micro-step, by somebody who read gradients
        self._losses: list[torch.Tensor] = []  # of this step, to tell the source of a NaN
        self._weights = Weights()
        self._weighed: Backward | None = None  # the last whose weight, or lack of one, counts in the open micro-step
        self._in_vain = False  # the only backward() of the open micro-step failed before it brought anything
        self._saw_forward = False  # since the last micro-step ended
        self._told_of_unseen_forwards = False
        self._outcomes = Outcomes(self)
        self._optimizer.loss_scale = self.loss_scale
        self._broken_by: str | None = None  # what has left the state in parts
        # Of its own: users call all_reduce_mean() between backward() and step(), where ranks may be at different points
        # of their reductions.
        self._mean_comm = self._host_comm.split(0, self.rank)
        self._joining: Join | None = None  # the open join() block
        self._join_comm: _core.Communicator | None = None  # once there was one
        if self.config.comms_logger:
            for each in self._comms():
                each.time_calls()
        self._checkpoints = Checkpoints(self)
        self._undo_checkpointing: Callable[[], None] = lambda: None
        if self.config.activation_checkpointing.enabled:
            self._undo_checkpointing = checkpointing.apply(units, self.config.activation_checkpointing)
        self.comm.set_activity("step 0")

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    # Training

    @_profile.phase("forward")
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module. In training, random numbers are drawn by name and the user's generator is left as it was."""
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        if self._params.gradients.in_micro_step and self._accumulation.forward_ends_micro_step() and not self._in_vain:
            self._end_micro_step()
        self._saw_forward = True
        if not self.module.training:
            return self.module(*args, **kwargs)
        if self._joining is not None:
            self._joining.begin_micro_step()
        names = (self.config.seed, self.global_steps, self._accumulation.micro_batch(), self._forwards)
        with named_generator(*names, device=self.device):
            self._forwards += 1
            return self._reports.run(self.module, args, kwargs, self.global_steps)

    @_profile.phase("backward")
    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, *, weight: Any = None
    ) -> torch.Tensor:
        """Computes gradients and takes them. Not to be divided by anything: `step()` divides once, exactly.

        Where micro-batches differ in their number of tokens, the mean of their means is not the mean over all tokens.
        Then pass the sum, and how many tokens it is over: the gradient of the step is the sum over all micro-batches of
        all ranks, divided once by the sum of all weights, which is exact. Either every backward() of a step has a
        weight or none has; those of one micro-batch add up (give a second loss over the same tokens 0). Where the loss
        goes through other engines' models too, the weight is also theirs.

        Args:
            loss: a scalar that depends on the model's parameters; the mean over the micro-batch, or with a weight, the
                sum over it.
            retain_graph: as in torch.
            scale_wrt_gas: False: the losses of this step are divided by the number of its micro-steps already, or by
                what they all have in common; `step()` then averages over ranks only. Not with a weight.
            weight: the number of tokens (or samples); a finite number of 0 or more, or a tensor of one.

        Returns:
            The loss, detached: divided by its weight, if that is not 0; without one, divided by
            gradient_accumulation_steps (as DeepSpeed does) under managed accumulation and with scale_wrt_gas.

        Raises:
            ConfigError: the loss is not a scalar or has no graph; or the weight is no such number. From step(), on all
                ranks: some micro-batches have a weight and others not, or all weights are 0.
        """
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            got = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ConfigError(
                f"[engine] backward: got a loss of shape {got}, expected a scalar tensor. Reduce it with mean()."
            )
        if loss.is_complex():
            raise ConfigError(
                f"[engine] backward: got a loss of {loss.dtype}, expected a real one. Take its real part."
            )
        if not loss.requires_grad:
            raise ConfigError(
                "[engine] backward: the loss has no graph, expected one that depends on the parameters. Do not detach "
                "it, and compute it "
                "outside torch.no_grad()."
            )
        if weight is not None and not scale_wrt_gas:
            raise ConfigError(
                "[engine] backward: got a weight and scale_wrt_gas=False, expected one of them. With a weight the loss "
                "is a sum that nothing was divided by: leave scale_wrt_gas out."
            )
        if isinstance(weight, torch.Tensor) and weight.is_cuda:
            weight = weight.cpu()  # once, before backward: it waits for what computes the weight
        self._accumulation.set_divided(not scale_wrt_gas)
        self._check_forwards()
        self._begin_micro_step()
        weighed, losses, given, missing = (
            self._weighed,
            len(self._losses),
            len(self._weights.given),
            self._weights.missing,
        )
        backward, around = Backward(weight), Backward.under_way
        try:
            self._weigh(backward)
            if self._had_micro_batch:
                self._losses.append(loss.detach())
            scaled = self._params.scale_loss(loss)
            Backward.under_way = backward
            with self._params.backward():
                scaled.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        except BaseException as error:
            for engine in (self, *backward.reached):
                if engine._params.gradients.took_any:
                    engine._broken_by = (
                        f"an earlier backward() failed ({type(error).__name__}: {error}) and the gradients of its "
                        "micro-batch are partly in, on this rank only"
                    )
            if self._broken_by is None:
                self._weighed, self._in_vain, self._weights.missing = weighed, weighed is None, missing
                del self._losses[losses:], self._weights.given[given:]
            raise
        finally:
            Backward.under_way = around
            backward.reached.clear()
        if weight is not None:
            return loss.detach() / (float(weight) or 1.0)
        managed = self.config.managed_gradient_accumulation and scale_wrt_gas
        return loss.detach() / self.gradient_accumulation_steps() if managed else loss.detach()

    @_profile.phase("step")
    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Ends the micro-step and, on an accumulation boundary, updates the parameters on all ranks.

        A step whose gradients are not finite changes no parameter; it counts in global_steps and skipped_steps, the
        scheduler stands, and `was_step_applied()` is False.

        Args:
            lr_kwargs: what the scheduler's step() is called with.

        Raises:
            ConfigError: no backward since the last step, or a call inside no_sync().
            NonFiniteError: gradients are not finite and the policy is "raise", or the loss scale is exhausted.
        """
        self._check_may_step()
        pending = self._accumulation.micro_steps > 0 and self._accumulation.forward_ends_micro_step()
        if self._in_vain or not (self._params.gradients.in_micro_step or pending or self._ended_early):
            failed = ": the last one failed. Call it again, for another batch" if self._in_vain else ""
            raise ConfigError(f"[engine] step: no gradients, expected a backward() since the last step(){failed}.")
        if self._params.gradients.in_micro_step:
            self._end_micro_step()
        self._ended_early = False
        self._accumulation.decide()
        if not self._accumulation.reached_boundary():
            self._outcomes.made_none()
            return
        divisor = self._accumulation.divisor()
        if self._joining is not None:
            self._joining.step(divisor)
        self._update(divisor, lr_kwargs)

    def _update(self, divisor: float, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Steps the optimizer on all ranks; divisor: of the gradients as they would be without a loss scale."""
        self._outcomes.settle()  # the last step's: the scheduler may move learning rates
        stop = self._params.step(
            divisor=divisor,
            weights=self._weights,
            max_norm=self.config.gradient_clipping,
            stop=self._checkpoints.stop_asked,
        )
        broadcast(self._statistics.rank0_buffers(), self.comm, "buffers")
        loss_divisor = sum(self._weights.given) or self._accumulation.loss_divisor(len(self._losses))
        self._accumulation.reset()
        losses = self._losses
        self._losses, self._weights = [], Weights()
        self.global_steps += 1
        self.global_samples += self.config.train_batch_size
        self.comm.set_activity(f"step {self.global_steps}")
        self._outcomes.made(losses=losses, loss_divisor=loss_divisor, lr_kwargs=lr_kwargs)
        if stop:
            self._checkpoints.stop()

    def join(self) -> Join:
        """A block around a training loop whose ranks have unequal numbers of batches. Every rank must enter it.

            with engine.join():
                for batch in batches:  # of this rank
                    loss = engine(batch)
                    engine.backward(loss)
                    engine.step()

        A rank that leaves its loop waits at the block's end and does its part of what the others still do: it
        contributes nothing, and takes over their updates, so that all ranks leave the block together, after equally
        many steps. Gradients are means over the micro-batches that there were, and equal, bit for bit, those of one
        rank that goes through these micro-batches in their order (micro-step by micro-step, rank by rank). Inside, the
        ranks exchange a few bytes before each micro-step and step; all_reduce_mean() works, and other collectives (a
        checkpoint, state_dict()) as long as no rank has run out. BatchNorm's buffers are rank 0's, unless
        buffers="ordered", also when it has run out.

        Raises:
            UnsupportedError: stage 3 on several ranks, whose forward needs all of them; or a block inside of another.
            CommError: from calls inside, as ever; and when ranks that still have batches do not do the same.
        """
        return Join(self)

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """From now on the user says which `step()` updates; a forward after a backward begins a new micro-step."""
        self._accumulation.set_boundary(is_boundary)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-step is the last before an update."""
        return self._accumulation.is_boundary()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients of the open micro-step, if there is one; `step()` needs no call of this. Collective then.

        In a loop of PyTorch's kind (see `managed_gradient_accumulation`), and after a step() that failed, it drops all
        gradients since the last step.

        Raises:
            ConfigError: the step's earlier micro-batches are already added up with it.
        """
        is_open = self._params.gradients.in_micro_step or self._ended_early
        loop_drops_all = self._accumulation.loop is Loop.PER_STEP and self._accumulation.micro_steps > 0
        loop_drops_all |= not is_open and self._accumulation.step_has_failed()
        if not is_open and not loop_drops_all:
            return
        if self._joining is not None:
            self._joining.check_drop()
        earlier = self._accumulation.micro_steps - self._ended_early
        if earlier > 0 and not loop_drops_all:
            raise ConfigError(
                f"[engine] zero_grad: got a call in micro-step {earlier + 1} of a step, "
                "expected one in the first, or after step(). The earlier micro-batches' gradients are already in the "
                "same sum."
            )
        if self._params.gradients.in_micro_step:
            self._params.end_micro_step(drop=True)
            self._statistics.drop()
        self._params.zero_grad()
        self._accumulation.reset()
        self._ended_early = False
        self._forwards = 0
        self._losses, self._weights = [], Weights()
        self._broken_by = None
        self._in_vain = self._saw_forward = False

    # What happened

    def get_global_grad_norm(self) -> float | None:
        """L2 norm of the mean gradient in the last step, before clipping; None before the first."""
        norm = self._outcomes.grad_norm
        return None if norm is None else norm.before

    def grad_norm_report(self) -> GradNorm | None:
        """The norm before and after clipping, and the factor between them; None before the first step."""
        return self._outcomes.grad_norm

    def was_step_applied(self) -> bool:
        """Whether the last `step()` updated parameters: on a boundary and not skipped."""
        return self._outcomes.applied

    def get_lr(self) -> list[float]:
        """The learning rate of each parameter group, as the next step will use it."""
        self._outcomes.settle()
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def all_reduce_mean(self, value: float) -> float:
        """The mean of `value` over the ranks that had a micro-batch in the last micro-step. Collective.

        Exact, and rounded once, so that it does not depend on the order of ranks.
        """
        if self._joining is not None:
            return self._joining.mean(float(value), self._had_micro_batch)
        return _core.exact_mean(self._mean_comm, float(value), self._had_micro_batch)

    def memory_report(self) -> dict[str, int]:
        """Bytes this rank holds at this moment, by name.

        parameters, gradient_accumulator, master_weights, optimizer_state: the model states. gradient_buckets: what
        gradients are collected in on their way, at most two of the largest bucket, from the first backward on.
        matrix_update: what Muon orthogonalises in. gathered_parameters: stage 3's, and those in a dtype of computation
        of their own. messages: what ranks receive in. frozen_parameters, buffers: what is not trained.
        checkpoint_snapshot: kept by checkpoint.async_save.
        """
        report = self._params.memory_report()
        others = other_state_bytes(self.module, self._params.params)
        others["frozen_parameters"] += report.get("frozen_parameters", 0)
        return report | {
            "messages": sum(comm.staging_bytes() for comm in self._comms()),
            **others,
            "checkpoint_snapshot": self._checkpoints.snapshot_bytes(),
        }

    def _comms(self) -> list[_core.Communicator]:
        """All communicators that training uses."""
        comms = (self.comm, self._params.core.gather_comm, self._mean_comm, self._join_comm)
        return list({id(comm): comm for comm in comms if comm is not None}.values())

    def comm_report(self) -> dict[str, dict[str, int]]:
        """Calls and payload elements handed to each kind of collective since the engine was built."""
        report: dict[str, dict[str, int]] = {}
        for comm in self._comms():
            for op, count in comm.counters().items():
                for name, value in count.items():
                    report.setdefault(op, {"calls": 0, "elements": 0})[name] += value
        return report

    def log_summary(self) -> None:
        """Prints calls, bytes and time of each kind of collective since the engine was built: rank 0's own.

        Bytes are the payload handed in. A collective's time is that from its call to its end; those that overlap count
        in full.

        Raises:
            ConfigError: comms_logger is off.
        """
        if not self.config.comms_logger:
            raise ConfigError(
                "[engine] log_summary: got no times, expected a configuration with comms_logger. Set "
                '"comms_logger": {"enabled": true}.'
            )
        if self.rank == 0:
            print(
                f"[engine] collectives of rank 0 in {self.global_steps} steps\n{collectives(self._comms())}", flush=True
            )

    def profile(self, path: str | os.PathLike[str]) -> contextlib.AbstractContextManager[None]:
        """A block whose steps are recorded, on all ranks, in one file that Perfetto shows. Collective.

            with engine.profile("trace.json"):
                loss = engine(batch)
                engine.backward(loss)
                engine.step()

        There is a process a rank: what its threads did (forward, backward, step; inside of them copies of gradients,
        waits, the norm and updates, by bucket; in stage 3 gathers and releases, by unit), and each collective from its
        call to its end. Outside of such a block nothing is recorded.

        Raises:
            ConfigError: rank 0 cannot write the file; or a block inside of another.
        """
        return _profile.profile(self._mean_comm, path)

    # Settings

    @property
    def rank(self) -> int:
        """This rank's number, from 0 to world_size - 1."""
        return self.comm.rank

    @property
    def world_size(self) -> int:
        """How many ranks train together."""
        return self.comm.size

    @functools.cached_property
    def local_rank(self) -> int:
        """This rank's number on its machine."""
        return _comm.local_rank()

    @property
    def global_rank(self) -> int:
        """This rank's number, from 0 to world_size - 1."""
        return self.comm.rank

    @property
    def dp_world_size(self) -> int:
        """Ranks that share a step's data: all."""
        return self.comm.size

    @property
    def mp_world_size(self) -> int:
        """Ranks that share a model: each has its own."""
        return 1

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self._device.torch

    @property
    def skipped_steps(self) -> int:
        """Steps whose gradients were not finite, which changed nothing; they count in global_steps."""
        return self._outcomes.skipped_steps

    @property
    def optimizer(self) -> _optimizer.Optimizer:
        """The parameter groups and their settings. Waits for the outcome of the last step."""
        self._outcomes.settle()
        return self._optimizer

    @property
    def lr_scheduler(self) -> Any:
        """The scheduler, or None. Waits for the outcome of the last step."""
        self._outcomes.settle()
        return self._scheduler

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by before backward; 1 unless fp16."""
        return self._outcomes.loss_scale

    def close(self) -> None:
        """Takes the engine's hooks off the model, which keeps its parameters. Idempotent.

        In stage 3 they stay sharded: zero.GatheredParameters reads them, and another engine may take the model over.

        Raises:
            IoError: the last checkpoint could not be written.
        """
        self._undo_checkpointing()
        self._params.close()
        self._statistics.close()
        self._reports.close()
        self._checkpoints.close()

    destroy = close

    # Inside

    def _begin_micro_step(self) -> None:
        self._check_whole()
        if self._ended_early:
            raise ConfigError(
                "[engine] got a backward() after the gradient was read or set, which ended the micro-step, expected "
                "step() first. Read gradients after the micro-step's last backward()."
            )
        self._in_vain = False
        if not self._params.gradients.in_micro_step:
            if self._joining is not None:
                self._joining.begin_micro_step()
            self._had_micro_batch = self._accumulation.has_micro_batch()
            self._weighed = None
            self._params.begin_micro_step(has_micro_batch=self._had_micro_batch)

    def _check_forwards(self) -> None:
        """At a backward(): where forwards tell micro-batches apart, the engine must see them."""
        if (
            self._told_of_unseen_forwards
            or self._saw_forward
            or not self._params.gradients.in_micro_step
            or not self._accumulation.forward_ends_micro_step()
        ):
            return
        self._told_of_unseen_forwards = True
        logger.warning(
            "[engine] backward: got a second call, and no forward of the engine before either: taken as two losses of "
            "one micro-batch, which add up. If they are of two, compute each by engine(...), not by the module or "
            "another method of it: the engine tells micro-batches apart by its forwards."
        )

    def _on_foreign_gradient(self) -> None:
        """Before a gradient is taken whose loss is another engine's, or nobody's."""
        if self._in_vain or not self._params.gradients.in_micro_step:
            self._begin_micro_step()
        backward = Backward.under_way
        if backward is not None and backward is not self._weighed:
            self._weigh(backward)
            backward.reached.append(self)

    def _weigh(self, backward: Backward) -> None:
        if self._had_micro_batch:
            self._weights.add(backward.weight)
        self._weighed = backward

    def _check_all_here(self, call: str) -> None:
        if self._joining is not None:
            self._joining.check_all_here(call)

    def _settle(self) -> None:
        """After a load: a step begins."""
        self._broken_by = None
        self._statistics.drop()
        self._accumulation.reset()
        self._ended_early = False
        self._forwards = 0
        self._in_vain = self._saw_forward = False
        self._losses, self._weights = [], Weights()
        self.comm.set_activity(f"step {self.global_steps}")

    def _check_whole(self) -> None:
        if self._broken_by is not None:
            raise Error(
                f"[engine] this engine's state is not whole: {self._broken_by}. Build a new engine, and load a "
                "checkpoint into it."
            )

    def _end_micro_step(self) -> None:
        self._check_whole()
        if self._had_micro_batch and self._weighed is None:  # its gradients came by loss.backward()
            self._weights.add(None)
        self._params.end_micro_step()
        self._statistics.end_micro_step(counts=self._had_micro_batch)
        self._accumulation.end_micro_step()
        if self._joining is not None:
            self._joining.end_micro_step()
        self.micro_steps += 1
        self._forwards = 0
        self._saw_forward = False

    def _end_micro_step_early(self) -> float:
        """For who reads gradients before step(): folds them all; what they are to be divided by. Collective."""
        if self._params.gradients.in_micro_step:
            self._end_micro_step()
            self._ended_early = not self._accumulation.forward_ends_micro_step()
        if self._accumulation.micro_steps == 0:
            raise ConfigError(
                "[engine] there is no gradient: got a read or write of one before backward() or after step(), expected "
                "one between the two."
            )
        total = _core.sum_weights(self._mean_comm, self._weights.given, self._weights.missing)
        return (self._accumulation.divisor() if total is None else total) * self.loss_scale


def _trainable(given: Iterable[Any], model: torch.nn.Module) -> list[Any]:
    listed = list(given)
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError(
            f"[engine] the model has no trainable parameter: got {sum(1 for _ in model.parameters())} parameters, all "
            f"frozen. Set "
            "requires_grad=True on those to train."
        )
    if not listed:
        raise ConfigError(
            "[engine] model_parameters is empty, expected parameters or groups. Leave it out to train all."
        )
    return listed
