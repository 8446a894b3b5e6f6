"""Builds the native configuration from checked DeepSpeed values, with DeepSpeed's defaults where ours differ."""

from __future__ import annotations

import glob
from typing import Any

from zerocore.config._native import Config
from zerocore.config._reading import Reading
from zerocore.config._sections import (
    NEEDED,
    NEEDED_VALUES,
    SCHEDULER_KEYS,
    TORCH_SCHEDULERS,
    ActivationCheckpointingConfig,
    CsvMonitorConfig,
    DataConfig,
    FlopsProfilerConfig,
    LossScaleConfig,
    OptimizerConfig,
    PrecisionConfig,
    SchedulerConfig,
    TensorBoardConfig,
    WandbConfig,
    ZeroConfig,
)
from zerocore.config._table import TABLE
from zerocore.config._types import one_of

OPTIMIZERS = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD", "lion": "Lion", "adagrad": "Adagrad", "muon": "Muon"}
SCHEDULERS = {name.lower(): name for name in SCHEDULER_KEYS}

GRADIENT_CLIPPING = 1.0  # DeepSpeed clips unless told not to
ADAGRAD = {"lr": 1e-2, "eps": 1e-10}  # DeepSpeed's defaults where ours, which are the same for all optimizers, differ
MUON = {"lr": 3e-4, "muon_lr": 0.02, "betas": (0.9, 0.95), "eps": 1e-10}
TORCH_ADAMW_WEIGHT_DECAY = 0.01  # torch.optim.AdamW's default, which "torch_adam" brings with it
WARMUP_DECAY_MAX_LR = 1e-3  # WarmupLR's default, in contrast, is the optimizer's learning rate

# Honoured keys that take more than copying to the native key of the same meaning.
_CONVERTED = {
    "optimizer.type",
    "optimizer.params.adam_w_mode",
    "optimizer.params.torch_adam",
    "optimizer.params.adam_lr",
    "optimizer.params.muon_lr",
    "scheduler.type",
    "fp16.enabled",
    "fp16.loss_scale",
    "bf16.enabled",
    "zero_optimization.stage3_module_granularity_threshold",
    "zero_optimization.leaf_module.name_suffixes",
    "activation_checkpointing.number_checkpoints",
}
# Blocks that are None unless "enabled".
_REPORTS = {
    "tensorboard": TensorBoardConfig,
    "csv_monitor": CsvMonitorConfig,
    "wandb": WandbConfig,
    "flops_profiler": FlopsProfilerConfig,
}
_CONVERTED |= {f"{name}.enabled" for name in _REPORTS}
_OFFLOADS = (
    "cpu_offload",
    "cpu_offload_param",
    "cpu_offload_params",
    "offload_optimizer.device",
    "offload_param.device",
)
# Any of these in DeepSpeed's block means that the model is to be checkpointed.
_CHECKPOINTING = ("partition_activations", "cpu_checkpointing", "number_checkpoints")


def build(reading: Reading) -> Config | None:
    """The configuration; or None, when there are problems, with those added that only show in the whole."""
    _check_batch(reading)
    _check_precision(reading)
    _check_types(reading)
    if reading.problems:
        return None
    native = _by_section(reading.values)
    return Config(
        **{"gradient_clipping": GRADIENT_CLIPPING, **native.get("", {})},
        optimizer=_optimizer(reading, native.get("optimizer", {})),
        scheduler=_scheduler(reading, native.get("scheduler", {})),
        precision=_precision(reading.values, native.get("precision", {}), native.get("precision.loss_scale", {})),
        zero=_zero(reading, native.get("zero", {})),
        activation_checkpointing=ActivationCheckpointingConfig(
            enabled=any(reading.values.get(f"activation_checkpointing.{name}") for name in _CHECKPOINTING),
            **native.get("activation_checkpointing", {}),
        ),
        data=DataConfig(**native.get("data", {})),
        **{
            name: cls(**native.get(name, {})) for name, cls in _REPORTS.items() if reading.values.get(f"{name}.enabled")
        },
    )


def _by_section(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The values that are copied, by native section and name."""
    sections: dict[str, dict[str, Any]] = {}
    for key in TABLE:
        if key.path in values and key.path not in _CONVERTED:
            section, _, name = key.note.partition(" ")[0].rpartition(".")
            sections.setdefault(section, {})[name] = values[key.path]
    return sections


def _check_batch(reading: Reading) -> None:
    sizes = ("train_micro_batch_size_per_gpu", "train_batch_size")
    autos = [name for name in sizes if name in reading.autos]
    if autos and not any(reading.values.get(name) for name in sizes):
        reading.problems.append(
            f'{" and ".join(autos)}: got "auto", expected an integer >= 1. Nothing fills "auto" in here; write how '
            "many samples a rank processes at once into train_micro_batch_size_per_gpu."
        )


def _check_precision(reading: Reading) -> None:
    values = reading.values
    if not values.get("fp16.enabled"):
        return
    if values.get("bf16.enabled"):
        reading.problems.append(
            "fp16.enabled: got true together with bf16.enabled, expected one of them at most. Set one to false."
        )
    floor = values.get("fp16.min_loss_scale", 1)
    start = values.get("fp16.initial_scale_power", 16)
    if not values.get("fp16.loss_scale") and not 0 < floor <= 2**start:
        reading.problems.append(
            f"fp16.min_loss_scale: got {floor:g}, expected a number > 0 and at most the initial scale 2^{start} when "
            "loss_scale is 0 (dynamic)."
        )


def _check_types(reading: Reading) -> None:
    for section, known, other in (
        ("optimizer", OPTIMIZERS, "Other optimizers are not available in this version."),
        ("scheduler", SCHEDULERS, "Pass another schedule to Engine(lr_scheduler=...)."),
    ):
        path = f"{section}.type"
        name = reading.values.get(path)
        if name is not None and name.lower() not in known:
            reading.problems.append(f'{path}: got "{name}", expected {one_of(known.values())}. {other}')
        elif path not in reading.given and any(each.startswith(f"{section}.") for each in reading.given):
            reading.problems.append(
                f"{path}: got nothing, expected {one_of(known.values())}. Set it, or remove {section}."
            )
    if reading.types["optimizer"] == "muon" and reading.values.get("optimizer.params.adam_w_mode") is False:
        reading.problems.append(
            "optimizer.params.adam_w_mode: got false, expected true: what Muon does not orthogonalise is updated by "
            "AdamW. Remove it."
        )
    scheduler = SCHEDULERS.get(reading.types["scheduler"] or "", "")
    for name in NEEDED.get(scheduler, ()):
        path = f"scheduler.params.{name}"
        if path not in reading.given:
            reading.problems.append(f"{path}: got nothing, expected {NEEDED_VALUES[name]}. {scheduler} needs it.")


def _optimizer(reading: Reading, given: dict[str, Any]) -> OptimizerConfig | None:
    name = reading.types["optimizer"]
    if name is None:
        return None
    if name == "muon":
        return _muon(reading.values, given)
    if name not in ("adam", "adamw"):
        return OptimizerConfig(**{"type": name, **(ADAGRAD if name == "adagrad" else {}), **given})
    decoupled = reading.values.get("optimizer.params.adam_w_mode", True)
    if name == "adamw" and not decoupled:
        decoupled = True
        reading.without_effect.append("optimizer.params.adam_w_mode: AdamW decouples weight decay; Adam can do without")
    if decoupled and reading.values.get("optimizer.params.torch_adam"):
        given = {"weight_decay": TORCH_ADAMW_WEIGHT_DECAY, **given}
    return OptimizerConfig(type="adamw" if decoupled else "adam", **given)


def _muon(values: dict[str, Any], given: dict[str, Any]) -> OptimizerConfig:
    """`lr` is that of both halves; each may have its own beside it."""
    lr, momentum = given.get("lr"), given.pop("momentum", None)
    own = {"lr": values.get("optimizer.params.adam_lr", lr), "muon_lr": values.get("optimizer.params.muon_lr", lr)}
    own["muon_momentum"] = momentum
    return OptimizerConfig(**{"type": "muon", **MUON, **given, **{k: v for k, v in own.items() if v is not None}})


def _scheduler(reading: Reading, given: dict[str, Any]) -> SchedulerConfig | None:
    name = reading.types["scheduler"]
    if name is None:
        return None
    if name == "warmupdecaylr" and "scheduler.params.warmup_max_lr" not in reading.autos:
        given = {"warmup_max_lr": WARMUP_DECAY_MAX_LR, **given}
    if SCHEDULERS[name] in TORCH_SCHEDULERS:
        given = {**given, "torch_params": reading.values.get("scheduler.params", {})}
    return SchedulerConfig(**{"type": SCHEDULERS[name], **given})


def _precision(values: dict[str, Any], dtypes: dict[str, Any], loss_scale: dict[str, Any]) -> PrecisionConfig:
    dtypes = {name: value for name, value in dtypes.items() if value is not None}
    if values.get("fp16.enabled"):
        static = values.get("fp16.loss_scale")
        rule = LossScaleConfig(static_scale=static) if static else LossScaleConfig(**loss_scale)
        return PrecisionConfig(dtype="fp16", loss_scale=rule, **dtypes)
    return PrecisionConfig(dtype="bf16" if values.get("bf16.enabled") else "fp32", **dtypes)


def _zero(reading: Reading, given: dict[str, Any]) -> ZeroConfig:
    values = reading.values
    if threshold := values.get("zero_optimization.stage3_module_granularity_threshold"):
        given = {**given, "unit_numel": threshold}
    suffixes = values.get("zero_optimization.leaf_module.name_suffixes", ())
    patterns = tuple(f"*{glob.escape(suffix)}" for suffix in suffixes)
    if any(reading.idle.get(f"zero_optimization.{name}") in (True, "cpu") for name in _OFFLOADS):
        given = {**given, "offload": "cpu"}
    return ZeroConfig(**{**given, "unit_names": (*given.get("unit_names", ()), *patterns)})
