"""The parts of zerocore.Config: every key with its default, unit and meaning.

The string below a key is its documentation; docs/configuration.md is made from it.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from dataclasses import field
from typing import Any, Literal

from zerocore.config._problems import show
from zerocore.config._schema import schema
from zerocore.config._types import (
    Betas,
    Bool,
    DType,
    Float,
    IterationInt,
    LrOrList,
    Names,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Ratio,
    ScalePower,
    Stage,
    WarmupType,
)


@schema("optimizer")
class OptimizerConfig:
    """The optimizer that the engine builds over the model's trainable parameters."""

    type: Literal["adamw", "adam", "sgd", "lion", "adagrad", "muon"] = "adamw"
    """AdamW (decoupled weight decay), Adam (weight decay added to the gradient, L2), SGD, Lion, Adagrad or Muon."""
    lr: NonNegativeFloat = 1e-3
    """Learning rate; muon: of what AdamW updates, which is all but matrices, and embeddings and heads."""
    betas: Betas = (0.9, 0.999)
    """adamw, adam: decay rates of the two moments; lion: of the update's direction and of the moment."""
    eps: NonNegativeFloat = 1e-8
    """adamw, adam: added to the root of the second moment; adagrad: to that of the sum of squares."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay a step, relative to the learning rate."""
    bias_correction: Bool = True
    """adamw, adam: correct the moments for their start at zero."""
    momentum: NonNegativeFloat = 0.0
    """sgd: momentum; 0 is plain SGD and keeps no state."""
    dampening: Float = 0.0
    """sgd: the part of each gradient that is kept out of the momentum."""
    nesterov: Bool = False
    """sgd: Nesterov momentum; needs momentum > 0 and dampening 0."""
    lr_decay: NonNegativeFloat = 0.0
    """adagrad: the learning rate of step t is divided by 1 + (t - 1) lr_decay."""
    initial_accumulator_value: NonNegativeFloat = 0.0
    """adagrad: what the sum of squares starts at."""
    muon_lr: NonNegativeFloat = 0.02
    """muon: learning rate of the matrices that are orthogonalised; sqrt(rows / columns) times as much for tall ones."""
    muon_momentum: NonNegativeFloat = 0.95
    """muon: momentum of the matrices."""
    muon_nesterov: Bool = True
    """muon: orthogonalise the gradient and the momentum, mixed (Nesterov), or the momentum alone."""
    muon_ns_steps: NonNegativeInt = 5
    """muon: Newton-Schulz iterations."""

    def _contradictions(self) -> Iterator[str]:
        yield from _without_effect(self, "optimizer", _keys_of_others(OPTIMIZER_KEYS, self.type))
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            yield (
                f"optimizer.nesterov: got momentum {self.momentum} and dampening {self.dampening}, expected "
                "momentum > 0 and dampening 0 with Nesterov momentum. Change them, or set nesterov=False."
            )


# What each type of optimizer takes besides lr and weight_decay.
OPTIMIZER_KEYS = {
    "adamw": ("betas", "eps", "bias_correction"),
    "adam": ("betas", "eps", "bias_correction"),
    "sgd": ("momentum", "dampening", "nesterov"),
    "lion": ("betas",),
    "adagrad": ("eps", "lr_decay", "initial_accumulator_value"),
    "muon": ("betas", "eps", "bias_correction", "muon_lr", "muon_momentum", "muon_nesterov", "muon_ns_steps"),
}


# Those of torch.optim.lr_scheduler whose arguments are JSON values.
TorchScheduler = Literal[
    "ConstantLR",
    "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts",
    "CyclicLR",
    "ExponentialLR",
    "LinearLR",
    "MultiStepLR",
    "OneCycleLR",
    "PolynomialLR",
    "StepLR",
]
TORCH_SCHEDULERS = typing.get_args(TorchScheduler)


@schema("scheduler")
class SchedulerConfig:
    """A learning-rate schedule, moved on by each applied step. The formulas are in zerocore.schedulers."""

    type: Literal["WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest", TorchScheduler]
    """Warmup*: a warm-up, then constant, down in a line, or down a cosine. OneCycle, LRRangeTest. Or one of torch's."""
    warmup_num_steps: NonNegativeInt = 1000
    """Warmup*: steps of the warm-up."""
    warmup_type: WarmupType = "log"
    """Warmup*: shape of the warm-up."""
    total_num_steps: PositiveInt | None = None
    """WarmupDecayLR, WarmupCosineLR: steps of the whole run; must be set."""
    warmup_min_lr: LrOrList = 0.0
    """WarmupLR, WarmupDecayLR: learning rate at the start, one for all or one a parameter group."""
    warmup_max_lr: LrOrList | None = None
    """WarmupLR, WarmupDecayLR: learning rate after the warm-up; None takes each group's own."""
    warmup_min_ratio: Ratio = 0.0
    """WarmupCosineLR: the start of the warm-up, as a part of each group's learning rate."""
    cos_min_ratio: Ratio = 1e-4
    """WarmupCosineLR: the end of the cosine, as a part of each group's learning rate."""
    cycle_min_lr: LrOrList | None = None
    """OneCycle: learning rate at the ends of the cycle; must be set."""
    cycle_max_lr: LrOrList | None = None
    """OneCycle: learning rate in the middle of the cycle; must be set."""
    cycle_first_step_size: PositiveInt = 2000
    """OneCycle: steps of the way up."""
    cycle_second_step_size: NonNegativeInt | None = None
    """OneCycle: steps of the way down; None: as many as up."""
    cycle_first_stair_count: NonNegativeInt = 0
    """OneCycle: stairs on the way up; 0: a line."""
    cycle_second_stair_count: NonNegativeInt | None = None
    """OneCycle: stairs on the way down; None: as many as up."""
    decay_step_size: NonNegativeInt = 0
    """OneCycle: steps of an interval of decay after the cycle; 0: no decay."""
    decay_lr_rate: NonNegativeFloat = 0.0
    """OneCycle: after n intervals the learning rate is cycle_min_lr / (1 + n decay_lr_rate)."""
    cycle_momentum: Bool = True
    """OneCycle: move the first of betas as well, against the learning rate; the second becomes 0.99."""
    cycle_min_mom: LrOrList = 0.8
    """OneCycle: momentum in the middle of the cycle."""
    cycle_max_mom: LrOrList = 0.9
    """OneCycle: momentum at the ends of the cycle."""
    decay_mom_rate: NonNegativeFloat = 0.0
    """OneCycle: after n intervals the momentum is cycle_max_mom (1 + n decay_mom_rate)."""
    lr_range_test_min_lr: LrOrList = 1e-3
    """LRRangeTest: learning rate at the start."""
    lr_range_test_step_size: PositiveInt = 2000
    """LRRangeTest: steps an interval."""
    lr_range_test_step_rate: NonNegativeFloat = 1.0
    """LRRangeTest: what an interval adds, as a part of lr_range_test_min_lr."""
    lr_range_test_staircase: Bool = False
    """LRRangeTest: add it once an interval; False: a part at each step."""
    torch_params: dict[str, Any] = field(default_factory=dict)
    """One of torch's: its arguments."""
    last_batch_iteration: IterationInt = -1
    """Steps already made, less one; -1 starts afresh. Not of torch's, which have last_epoch."""

    def _contradictions(self) -> Iterator[str]:
        yield from _without_effect(self, "scheduler", _keys_of_others(SCHEDULER_KEYS, self.type))
        if self.type in TORCH_SCHEDULERS:
            yield from _without_effect(self, "scheduler", ("last_batch_iteration",))
        for name in NEEDED.get(self.type, ()):
            if getattr(self, name) is None:
                yield f"scheduler.{name}: got None, expected {NEEDED_VALUES[name]}. {self.type} needs it."


# What each type of schedule takes, and what it must be given.
_WARMUP = ("warmup_num_steps", "warmup_type")
SCHEDULER_KEYS = {
    "WarmupLR": (*_WARMUP, "warmup_min_lr", "warmup_max_lr"),
    "WarmupDecayLR": (*_WARMUP, "warmup_min_lr", "warmup_max_lr", "total_num_steps"),
    "WarmupCosineLR": (*_WARMUP, "warmup_min_ratio", "cos_min_ratio", "total_num_steps"),
    "OneCycle": (
        *("cycle_min_lr", "cycle_max_lr", "cycle_first_step_size", "cycle_second_step_size"),
        *("cycle_first_stair_count", "cycle_second_stair_count", "decay_step_size", "decay_lr_rate"),
        *("cycle_momentum", "cycle_min_mom", "cycle_max_mom", "decay_mom_rate"),
    ),
    "LRRangeTest": (
        *("lr_range_test_min_lr", "lr_range_test_step_size", "lr_range_test_step_rate", "lr_range_test_staircase"),
    ),
    **dict.fromkeys(TORCH_SCHEDULERS, ("torch_params",)),
}
NEEDED = {
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
}
NEEDED_VALUES = {
    "total_num_steps": "the number of steps of the run",
    "cycle_min_lr": "the learning rate at the ends of the cycle",
    "cycle_max_lr": "the learning rate in its middle",
}


@schema("precision.loss_scale")
class LossScaleConfig:
    """Loss scaling of fp16 training: dynamic unless static_scale is set."""

    static_scale: PositiveFloat | None = None
    """A constant scale; None scales dynamically, by the keys below."""
    initial_scale_power: ScalePower = 16
    """The dynamic scale starts at two to this power."""
    window: PositiveInt = 1000
    """Steps without overflow after which the scale doubles."""
    hysteresis: PositiveInt = 2
    """Overflows until the scale is halved for the first time; each skips its step."""
    consecutive_hysteresis: Bool = False
    """True: a step without overflow restores the full hysteresis; False: only a doubling does."""
    min_scale: PositiveFloat = 1.0
    """The dynamic scale falls no further; an overflow there ends the training, unless on_nonfinite is "clamp"."""

    def _contradictions(self) -> Iterator[str]:
        if self.static_scale is None and self.min_scale > 2.0**self.initial_scale_power:
            yield (
                f"precision.loss_scale.min_scale: got {self.min_scale}, expected at most the initial scale "
                f"2^{self.initial_scale_power}. Lower min_scale or raise initial_scale_power."
            )


@schema("precision")
class PrecisionConfig:
    """The dtypes of parameters, computation and gradients. Master weights and moments are always fp32."""

    dtype: DType = "fp32"
    """What the model is cast to: the dtype that parameters are kept in."""
    compute_dtype: DType | None = None
    """What parameters are cast to when they are gathered for use; None: dtype. fp16 scales the loss."""
    reduce_dtype: DType | None = None
    """What gradients travel between ranks in; None: the dtype of computation."""
    accumulate_dtype: DType = "fp32"
    """What gradients are summed in, over ranks and micro-batches. Narrower ones save memory and lose bits."""
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    """fp16: see below."""
    on_nonfinite: Literal["skip", "clamp", "raise"] | None = None
    """inf or NaN in gradients: skip the step, clamp (skip at any loss scale), raise. None: raise in fp32, else skip."""


@schema("zero")
class ZeroConfig:
    """What is sharded over the ranks, and in stage 3 what is whole when. Changes memory and speed, never the result."""

    stage: Stage = 0
    """0: nothing; 1 and 2: gradients and optimizer state; 3: parameters as well."""
    bucket_numel: PositiveInt = 4_194_304
    """Elements a bucket: the unit in which gradients are reduced and parameters gathered."""
    offload: Literal["none", "cpu"] = "none"
    """"cpu": states rest in host memory. On the CPU they all do; for a CUDA device there is no such thing yet."""
    share_parameters: Bool = False
    """Stages 1 and 2 on one node: parameters exist once, for all ranks. What a rank writes to them, all ranks see."""

    unit_numel: NonNegativeInt = 100_000
    """A module of at least so many elements becomes a unit: it is gathered before its forward and released after."""
    unit_classes: Names = ()
    """Classes of modules that are units, whole, whatever their size: `Block` or `models.gpt.Block`."""
    unit_names: Names = ()
    """Names of modules that are units, whole, whatever their size; `*` and `?` match: `encoder.layers.*`."""
    persistent_param_numel: NonNegativeInt = 100_000
    """Stage 3: parameters of at most so many elements stay whole on every rank."""
    persistent_total_numel: NonNegativeInt | None = None
    """Stage 3: at most so many elements stay whole in all, first come in order of registration; None: no limit."""
    max_live_numel: PositiveInt = 1_000_000_000
    """Stage 3: at most so many elements are gathered at a time; prefetching and keeping stay below."""
    max_reuse_numel: NonNegativeInt = 1_000_000_000
    """Stage 3: a gathered unit is kept if it is used again within so many elements."""
    prefetch_numel: NonNegativeInt = 50_000_000
    """Stage 3: elements gathered ahead of their use, in the order of the last micro-step; 0: none."""
    gather_16bit_weights_on_save: Bool = False
    """Stage 3: saving a 16-bit model gathers its whole weights."""


@schema("activation_checkpointing")
class ActivationCheckpointingConfig:
    """Units of the model keep only their inputs until backward and are recomputed there. The result is the same."""

    enabled: Bool = False
    """Recompute each unit of the model, in any stage: what is a unit, zero.unit_numel, unit_classes, unit_names say."""
    reentrant: Bool = False
    """True: torch's reentrant mode, a backward of its own within backward; False: the original graph."""
    cpu_checkpointing: Bool = False
    """Keep saved inputs in host memory, copied there while the forward goes on. Those that lie there stay."""
    partition_activations: Bool = False
    """Shard saved inputs over the model-parallel group; a group of one rank has nothing to shard."""


@schema("checkpoint")
class CheckpointConfig:
    """How Engine.save_checkpoint saves."""

    async_save: Bool = False
    """True: it returns when the state is copied to host memory, and a thread writes while training goes on."""
    keep_last: PositiveInt | None = None
    """Keep so many of the checkpoints named global_step<N>, the newest, and delete older ones; None: keep all."""


@schema("comm")
class CommConfig:
    """Communication between ranks."""

    timeout_ms: PositiveInt = 600_000
    """Milliseconds that a collective waits for a rank before it raises CommError."""
    backend: Literal["auto", "shm", "mpi"] = "auto"
    """What connects ranks: "shm", memory shared on one node; "mpi"; "auto": shm where all ranks reach each other so."""
    reduction: Literal["ordered", "fast"] = "ordered"
    """How gradients are summed over ranks: "ordered", equal bits on any number of them; "fast": NCCL's own, on CUDA."""


@schema("data")
class DataConfig:
    """How the loader made from Engine(training_data=...) deals out samples."""

    shuffle: Bool = True
    """A new order each epoch, from the seed; False keeps the data set's own."""
    drop_last: Bool = False
    """True: drop the samples that do not fill a last step; False: fill it from the epoch's start."""
    num_workers: NonNegativeInt = 0
    """Loader processes a rank; 0 loads in the training process."""


@schema("tensorboard")
class TensorBoardConfig:
    """Losses, learning rates and loss scales for TensorBoard, by samples so far. Rank 0 writes. Needs tensorboard."""

    output_path: str = ""
    """The folder around the run's; none: the working folder."""
    job_name: str = "DeepSpeedJobName"
    """The run's folder."""


@schema("csv_monitor")
class CsvMonitorConfig:
    """The same in CSV files, one a quantity, with the columns step (samples so far) and value. Rank 0 writes."""

    output_path: str = ""
    """The folder around the run's; none: the working folder."""
    job_name: str = "DeepSpeedJobName"
    """The run's folder."""


@schema("wandb")
class WandbConfig:
    """The same for Weights & Biases: offline, for `wandb sync`, unless WANDB_MODE says otherwise. Needs wandb."""

    project: str = "deepspeed"
    """The project."""
    group: str | None = None
    """A group of runs."""
    team: str | None = None
    """The team, or user, to which the project belongs."""


@schema("flops_profiler")
class FlopsProfilerConfig:
    """Prints parameters, FLOPs and latency of one forward by module. Rank 0 prints its own."""

    profile_step: IterationInt = 1
    """The forward that begins the step after so many steps is profiled; -1: none."""
    module_depth: IterationInt = -1
    """Modules down to this depth are printed, the model being 0; -1: all."""
    top_modules: PositiveInt = 1
    """So many modules with most parameters, FLOPs and latency are named at each depth."""
    detailed: Bool = True
    """Print the tree of modules as well."""
    output_file: str | None = None
    """The file to write; None: print."""
    recompute_fwd_factor: NonNegativeFloat = 0.0
    """Forwards that the backward runs again, for the estimate of a whole step's FLOPs."""


def _keys_of_others(keys: dict[str, tuple[str, ...]], own: str) -> tuple[str, ...]:
    """The keys of the other types."""
    every = dict.fromkeys(name for names in keys.values() for name in names)
    return tuple(name for name in every if name not in keys[own])


def _without_effect(config: Any, prefix: str, names: tuple[str, ...]) -> Iterator[str]:
    """Problems for keys that are set although they mean nothing for `config.type`."""
    defaults = {
        each.name: each.default if each.default_factory is dataclasses.MISSING else each.default_factory()
        for each in dataclasses.fields(config)
    }
    for name in names:
        value = getattr(config, name)
        if value != defaults[name]:
            yield f'{prefix}.{name}: got {show(value)}, expected no value: type "{config.type}" has none. Remove it.'
