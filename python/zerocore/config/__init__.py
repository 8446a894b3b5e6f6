"""Configuration: the native dataclasses, and the translation of DeepSpeed's JSON into them."""

from zerocore.config._native import Config, ResolvedConfig, as_config
from zerocore.config._problems import ConfigWarning
from zerocore.config._sections import (
    ActivationCheckpointingConfig,
    CheckpointConfig,
    CommConfig,
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

__all__ = [
    "ActivationCheckpointingConfig",
    "CheckpointConfig",
    "CommConfig",
    "Config",
    "ConfigWarning",
    "CsvMonitorConfig",
    "DataConfig",
    "FlopsProfilerConfig",
    "LossScaleConfig",
    "OptimizerConfig",
    "PrecisionConfig",
    "ResolvedConfig",
    "SchedulerConfig",
    "TensorBoardConfig",
    "WandbConfig",
    "ZeroConfig",
    "as_config",
]
