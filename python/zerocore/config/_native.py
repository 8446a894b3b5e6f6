"""zerocore.Config: the whole native configuration. Its parts are in _sections.py.

The string below a key is its documentation; docs/configuration.md is made from it.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Any, Literal

from zerocore.config._batch import resolve_batch
from zerocore.config._problems import config_error, show
from zerocore.config._schema import schema
from zerocore.config._sections import (
    ActivationCheckpointingConfig,
    CheckpointConfig,
    CommConfig,
    CsvMonitorConfig,
    DataConfig,
    FlopsProfilerConfig,
    OptimizerConfig,
    PrecisionConfig,
    SchedulerConfig,
    TensorBoardConfig,
    WandbConfig,
    ZeroConfig,
)
from zerocore.config._types import Bool, NonNegativeFloat, PositiveInt, SeedInt


@schema("")
class Config:
    """Everything a training run is configured by. Frozen; a changed copy is made by dataclasses.replace.

    Raises:
        ConfigError: on an unknown key, a wrong type or value, or keys that contradict each other.
    """

    train_batch_size: PositiveInt | None = None
    """Samples an optimizer step, over all ranks."""
    micro_batch_size: PositiveInt | None = None
    """Samples a rank puts through one forward and backward."""
    gradient_accumulation_steps: PositiveInt | None = None
    """Micro-batches that a rank goes through in one step."""
    managed_gradient_accumulation: Bool = True
    """True: the engine knows which step() ends an accumulation; False: every step() updates the parameters."""
    gradient_clipping: NonNegativeFloat = 0.0
    """Largest L2 norm of the whole gradient; larger ones are scaled down to it. 0: off."""
    steps_per_print: PositiveInt | None = None
    """Steps between two log lines of the engine; None: none."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where model states lie and steps run; "auto": CUDA where it can be had, else the CPU."""
    seed: SeedInt = 1234
    """Seed of the data order and of dropout."""
    buffers: Literal["rank0", "ordered"] = "rank0"
    """rank0: after a step all ranks take rank 0's; ordered: running statistics get all micro-batches, in order."""
    optimizer: OptimizerConfig | None = None
    """None: what is handed to Engine(optimizer=...); without that, AdamW with the defaults below and a warning."""
    allow_untested_optimizer: Bool = False
    """True: a torch optimizer without a native twin runs on the shards, which is right if it treats elements alike."""
    scheduler: SchedulerConfig | None = None
    """None: a constant learning rate, or the schedule handed to Engine(lr_scheduler=...)."""
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    """See below."""
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    """See below."""
    activation_checkpointing: ActivationCheckpointingConfig = field(default_factory=ActivationCheckpointingConfig)
    """See below."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """See below."""
    comm: CommConfig = field(default_factory=CommConfig)
    """See below."""
    data: DataConfig = field(default_factory=DataConfig)
    """See below."""
    wall_clock_breakdown: Bool = False
    """Print the milliseconds of forward, backward and step every steps_per_print steps (each, without it). Rank 0's."""
    comms_logger: Bool = False
    """Time collectives, for Engine.log_summary()."""
    tensorboard: TensorBoardConfig | None = None
    """None: off. See below."""
    csv_monitor: CsvMonitorConfig | None = None
    """None: off. See below."""
    wandb: WandbConfig | None = None
    """None: off. See below."""
    flops_profiler: FlopsProfilerConfig | None = None
    """None: off. See below."""

    @staticmethod
    def from_deepspeed(source: Mapping[str, Any] | str | os.PathLike[str], *, warn: bool = True) -> Config:
        """Translates a DeepSpeed configuration.

        Args:
            source: the configuration as a dict, the path of its JSON file, or JSON as base64.
            warn: False leaves out the ConfigWarnings (on ranks other than the first, say).

        Returns:
            A native configuration that means the same. DeepSpeed's defaults hold where the source says nothing.

        Raises:
            ConfigError: on an unknown key, a wrong value, or a key for what is not available in this version.
        """
        from zerocore.config._deepspeed import translate

        return translate(source, warn=warn)

    def resolve(self, world_size: int) -> ResolvedConfig:
        """Completes the batch sizes for a number of ranks.

        Any two of the three imply the third; one of the first two alone means no accumulation. With all three given,
        train_batch_size = micro_batch_size * gradient_accumulation_steps * world_size must hold.

        Args:
            world_size: number of data-parallel ranks.

        Returns:
            A copy in which every batch size is known, with micro_batches and world_size.

        Raises:
            ConfigError: when the batch sizes are too few, do not divide, or contradict each other.
        """
        batch = resolve_batch(
            train_batch_size=self.train_batch_size,
            micro_batch_size=self.micro_batch_size,
            gradient_accumulation_steps=self.gradient_accumulation_steps,
            world_size=world_size,
        )
        values = {each.name: getattr(self, each.name) for each in dataclasses.fields(Config)}
        return ResolvedConfig(**{**values, **batch._asdict(), "world_size": world_size})

    def to_dict(self) -> dict[str, Any]:
        """The configuration as nested dicts of JSON values, in a fixed order."""
        values: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return values

    def describe(self) -> str:
        """One line a key, `zero.stage = 2`, in a fixed order: to print, and to compare the configurations of ranks."""

        def lines(value: Any, key: str) -> Iterator[str]:
            if isinstance(value, dict):
                for name, inner in value.items():
                    yield from lines(inner, f"{key}.{name}" if key else name)
            else:
                yield f"{key} = {json.dumps(value)}"

        return "\n".join(lines(self.to_dict(), ""))


@schema("")
class ResolvedConfig(Config):
    """A Config whose batch sizes are complete: what the engine trains by. Made by Config.resolve."""

    train_batch_size: PositiveInt
    micro_batch_size: PositiveInt
    gradient_accumulation_steps: PositiveInt
    micro_batches: PositiveInt
    """Micro-batches a step, over all ranks: train_batch_size / micro_batch_size."""
    world_size: PositiveInt
    """Number of data-parallel ranks that the batch sizes were resolved for."""

    def get(self, key: str, default: Any = None) -> Any:
        """What scripts for DeepSpeed ask `engine.config`, its JSON: batch sizes, clipping, stage, precision.

        Anything else is `default`, as a key that the JSON does not have.
        """
        computes_in = self.precision.compute_dtype or self.precision.dtype
        return {
            "train_batch_size": self.train_batch_size,
            "train_micro_batch_size_per_gpu": self.micro_batch_size,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "gradient_clipping": self.gradient_clipping,
            "zero_optimization": {"stage": self.zero.stage},
            "fp16": {"enabled": computes_in == "fp16"},
            "bf16": {"enabled": computes_in == "bf16"},
        }.get(key, default)

    def resolve(self, world_size: int) -> ResolvedConfig:
        """This configuration itself; raises ConfigError for another number of ranks than it was resolved for."""
        if world_size != self.world_size:
            raise config_error(
                [
                    f"world_size: got {show(world_size)}, expected {self.world_size}, for which this configuration was "
                    "resolved. Resolve the original configuration again."
                ]
            )
        return self


def as_config(source: Config | Mapping[str, Any] | str | os.PathLike[str]) -> Config:
    """What users may hand over as a configuration: a Config as it is, anything else by Config.from_deepspeed."""
    return source if isinstance(source, Config) else Config.from_deepspeed(source)
