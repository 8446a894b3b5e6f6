"""Optimizers under DeepSpeed's names."""

from zerocore.ops import adagrad, adam, lion

__all__ = ["adagrad", "adam", "lion"]
