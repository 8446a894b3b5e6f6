"""Small helpers for users."""

from __future__ import annotations

import ctypes
import hashlib

import torch


def params_sha256(module: torch.nn.Module) -> str:
    """A fingerprint of a module's parameters: equal if and only if names, dtypes, shapes and all bits are.

    Args:
        module: on the CPU; of every parameter in named_parameters() order (a tied one once) its name, dtype, shape and
            bytes count.

    Returns:
        64 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for name, param in module.named_parameters():
        values = param.detach().contiguous()
        digest.update(f"{name} {values.dtype} {tuple(values.shape)}\n".encode())
        if values.numel():
            num_bytes = values.numel() * values.element_size()
            digest.update((ctypes.c_char * num_bytes).from_address(values.data_ptr()))
    return digest.hexdigest()
