"""Small helpers for users."""

from __future__ import annotations

import ctypes
import hashlib

import torch

from zerocore import _core, _params
from zerocore.errors import ConfigError

__all__ = [
    "params_sha256",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
]


def params_sha256(module: torch.nn.Module) -> str:
    """A fingerprint of a module's parameters: equal if and only if names, dtypes, shapes and all bits are.

    Collective when parameters are sharded; one unit is gathered at a time.

    Args:
        module: on the CPU; of every parameter in named_parameters() order (a tied one once) its name, dtype, shape and
            bytes count.

    Returns:
        64 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for name, param in module.named_parameters():
        with _params.whole(param):
            values = param.detach().contiguous()
            digest.update(f"{name} {values.dtype} {tuple(values.shape)}\n".encode())
            if values.numel():
                num_bytes = values.numel() * values.element_size()
                digest.update((ctypes.c_char * num_bytes).from_address(values.data_ptr()))
    return digest.hexdigest()


# One parameter's training state, for parameters of an open engine. "Full" is the whole parameter, on every rank, and
# collective; "local" is the part whose state this rank owns, flattened, which may be empty.


def safe_get_full_fp32_param(param: torch.nn.Parameter) -> torch.Tensor:
    """The fp32 master of a parameter, with its shape. Collective.

    Raises:
        ConfigError: the parameter is not trained by an open engine. So do all functions of this kind.
    """
    return _owner(param).read_state(param, _core.StateKind.master)


def safe_set_full_fp32_param(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Sets a parameter and its fp32 master from rank 0's values, which have its shape. Collective."""
    _owner(param).write_state(param, _core.StateKind.master, value)


def safe_get_full_optimizer_state(param: torch.nn.Parameter, optim_state_key: str) -> torch.Tensor:
    """A parameter's optimizer state, fp32, with its shape. Collective.

    Args:
        optim_state_key: "exp_avg" or "exp_avg_sq" of Adam, "momentum_buffer" of SGD, "exp_avg" of Lion, "sum" of
            Adagrad.
    """
    owner = _owner(param)
    return owner.read_state(param, owner.state_kind(optim_state_key))


def safe_set_full_optimizer_state(param: torch.nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Sets a parameter's optimizer state from rank 0's values, which have its shape. Collective."""
    owner = _owner(param)
    owner.write_state(param, owner.state_kind(optim_state_key), value)


def safe_get_full_grad(param: torch.nn.Parameter) -> torch.Tensor:
    """A parameter's gradient, unscaled: the mean over the step's micro-batches so far, fp32, with its shape.

    Between backward() and step(), whose micro-step it ends: no other backward() may come before step(). Collective.
    """
    owner = _owner(param)
    divisor = owner.gradient_divisor()
    return owner.read_state(param, _core.StateKind.grad).div_(divisor)


def safe_set_full_grad(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Sets a parameter's gradient, as safe_get_full_grad() would return it, from rank 0's values. Collective."""
    owner = _owner(param)
    divisor = owner.gradient_divisor()
    owner.write_state(param, _core.StateKind.grad, value.float() * divisor)


def safe_get_local_fp32_param(param: torch.nn.Parameter) -> torch.Tensor:
    """This rank's part of a parameter's fp32 master, 1-D. Local."""
    return _owner(param).read_local(param, _core.StateKind.master)


def safe_set_local_fp32_param(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Sets this rank's part of a parameter and its fp32 master. All ranks call it, each with its own part."""
    _owner(param).write_local(param, _core.StateKind.master, value)


def safe_get_local_optimizer_state(param: torch.nn.Parameter, optim_state_key: str) -> torch.Tensor:
    """This rank's part of a parameter's optimizer state, 1-D, fp32. Local."""
    owner = _owner(param)
    return owner.read_local(param, owner.state_kind(optim_state_key))


def safe_set_local_optimizer_state(param: torch.nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Sets this rank's part of a parameter's optimizer state. Local."""
    owner = _owner(param)
    owner.write_local(param, owner.state_kind(optim_state_key), value)


def safe_get_local_grad(param: torch.nn.Parameter) -> torch.Tensor:
    """This rank's part of what safe_get_full_grad() returns, 1-D. All ranks call it, since it ends the micro-step."""
    owner = _owner(param)
    divisor = owner.gradient_divisor()
    return owner.read_local(param, _core.StateKind.grad).div_(divisor)


def safe_set_local_grad(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Sets this rank's part of a parameter's gradient. All ranks call it, since it ends the micro-step."""
    owner = _owner(param)
    divisor = owner.gradient_divisor()
    owner.write_local(param, _core.StateKind.grad, value.float() * divisor)


def _owner(param: torch.nn.Parameter) -> _params.ModelParams:
    owner = _params.owner_of(param)
    if owner is None or not owner.is_trained(param):
        raise ConfigError(
            f"[zero] a parameter of shape {tuple(param.shape)}: got one that no open engine trains, expected one of an "
            "engine's optimizer. Take it from engine.module.parameters()."
        )
    return owner
