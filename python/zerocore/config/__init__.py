"""Configuration: the native dataclasses, and the translation of DeepSpeed's JSON into them."""

from zerocore.config._native import Config, ResolvedConfig, as_config
from zerocore.config._problems import ConfigWarning
from zerocore.config._sections import (
    ActivationCheckpointingConfig,
    CheckpointConfig,
    CommConfig,
    DataConfig,
    LossScaleConfig,
    OptimizerConfig,
    PrecisionConfig,
    SchedulerConfig,
    ZeroConfig,
)

__all__ = [
    "ActivationCheckpointingConfig",
    "CheckpointConfig",
    "CommConfig",
    "Config",
    "ConfigWarning",
    "DataConfig",
    "LossScaleConfig",
    "OptimizerConfig",
    "PrecisionConfig",
    "ResolvedConfig",
    "SchedulerConfig",
    "ZeroConfig",
    "as_config",
]
