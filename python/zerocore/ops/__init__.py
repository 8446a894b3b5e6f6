"""Optimizers under DeepSpeed's names."""

from zerocore.ops import adam

__all__ = ["adam"]
