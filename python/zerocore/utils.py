"""Small helpers for users."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from zerocore import (
    _comm,
    _convert,
    _core,
    _engine_state,
    _load,
    _memory,
    _param_specs,
    _params,
    _restore,
    _units,
    groups,
)
from zerocore._estimate import (
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from zerocore.errors import ConfigError

__all__ = [
    "OnDevice",
    "RepeatingLoader",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "get_fp32_state_dict_from_zero_checkpoint",
    "get_z3_leaf_modules",
    "groups",
    "load_state_dict_from_zero_checkpoint",
    "log_dist",
    "logger",
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
    "safe_update_full_grad_vectorized",
    "see_memory_usage",
    "set_z3_leaf_modules",
    "unset_z3_leaf_modules",
]

logger = logging.getLogger("zerocore")


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str], tag: str | None = None, exclude_frozen_parameters: bool = False
) -> dict[str, torch.Tensor]:
    """A checkpoint's weights, trained ones in fp32, and buffers, for a plain model. Local; needs no engine.

    It takes the memory of all of them; `zerocore export` writes them to files in little.

    Args:
        checkpoint_dir: a checkpoint, or the folder that holds several.
        tag: the one among several; by default the one that `latest` names, or the newest.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    checkpoint = _open(checkpoint_dir, tag)
    roles = ("trained", "buffer") if exclude_frozen_parameters else ("trained", "frozen", "buffer")
    state: dict[str, torch.Tensor] = {}
    for entry in checkpoint.manifest.entries:
        if entry.role not in roles:
            continue
        part = entry.part(_engine_state.MASTER) or entry.part(_engine_state.VALUE)
        assert part is not None
        state |= dict.fromkeys([entry.name, *entry.ties], _restore.read_tensor(checkpoint, entry, part))
    return state


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Writes a checkpoint's weights and buffers, all that are floating-point in fp32, for plain torch. Local.

    Args:
        checkpoint_dir, tag: as get_fp32_state_dict_from_zero_checkpoint().
        output_dir: gets pytorch_model.bin; or, of more than max_shard_size, several and an index.
        max_shard_size: bytes, a size like "5GB", or None for one file.
        safe_serialization: writes model.safetensors in place of pickled files, in little memory.

    Raises:
        CheckpointError: there is none, or it is damaged.
        ConfigError: max_shard_size or output_dir is none.
        IoError: writing failed.
    """
    checkpoint = _open(checkpoint_dir, tag)
    state = None
    if not safe_serialization:
        found = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
        # A tensor of several names stays one.
        once = {id(value): value.float() if value.is_floating_point() else value for value in found.values()}
        state = {name: once[id(value)] for name, value in found.items()}
    _convert.convert(
        checkpoint, state, Path(output_dir), max_shard_size=max_shard_size, exclude_frozen=exclude_frozen_parameters
    )


def _open(checkpoint_dir: str | os.PathLike[str], tag: str | None) -> _load.Checkpoint:
    folder = Path(checkpoint_dir)
    return _load.open_checkpoint(folder if tag is None else folder / tag)


def load_state_dict_from_zero_checkpoint(
    model: torch.nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> torch.nn.Module:
    """Loads a checkpoint's weights and buffers into a plain model, which is returned. Local.

    What only one of the two has is listed in a warning.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    report = model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    if report.missing_keys or report.unexpected_keys:
        logger.warning(
            "[ckpt] %s: %d names of the model are not in the checkpoint (first %s), %d of the checkpoint's not in the "
            "model (first %s).",
            checkpoint_dir,
            len(report.missing_keys),
            report.missing_keys[:3],
            len(report.unexpected_keys),
            report.unexpected_keys[:3],
        )
    return model


def params_sha256(module: torch.nn.Module) -> str:
    """A fingerprint of a module's parameters: equal if and only if names, dtypes, shapes and all bits are.

    Collective when parameters are sharded; one unit is gathered at a time.

    Args:
        module: of every parameter in named_parameters() order (a tied one once) its name, dtype, shape and bytes count.

    Returns:
        64 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for name, param in module.named_parameters():
        with _params.whole(param):
            values = param.detach().cpu().contiguous()
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
            Adagrad, "momentum_buffer" of Muon's matrices.
    """
    owner = _owner(param)
    return owner.read_state(param, owner.state_kind(param, optim_state_key))


def safe_set_full_optimizer_state(param: torch.nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Sets a parameter's optimizer state from rank 0's values, which have its shape. Collective."""
    owner = _owner(param)
    owner.write_state(param, owner.state_kind(param, optim_state_key), value)


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


def safe_update_full_grad_vectorized(
    param_list: Iterable[torch.nn.Parameter], update_func: Callable[[torch.Tensor, torch.nn.Parameter], torch.Tensor]
) -> None:
    """Replaces each parameter's gradient by `update_func(gradient, parameter)`. Collective; rank 0's values count."""
    for param in param_list:
        safe_set_full_grad(param, update_func(safe_get_full_grad(param), param))


def safe_get_local_fp32_param(param: torch.nn.Parameter) -> torch.Tensor:
    """This rank's part of a parameter's fp32 master, 1-D. Local."""
    return _owner(param).read_local(param, _core.StateKind.master)


def safe_set_local_fp32_param(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Sets this rank's part of a parameter and its fp32 master. All ranks call it, each with its own part."""
    _owner(param).write_local(param, _core.StateKind.master, value)


def safe_get_local_optimizer_state(param: torch.nn.Parameter, optim_state_key: str) -> torch.Tensor:
    """This rank's part of a parameter's optimizer state, 1-D, fp32. Local."""
    owner = _owner(param)
    return owner.read_local(param, owner.state_kind(param, optim_state_key))


def safe_set_local_optimizer_state(param: torch.nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Sets this rank's part of a parameter's optimizer state. Local."""
    owner = _owner(param)
    owner.write_local(param, owner.state_kind(param, optim_state_key), value)


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


# Modules that stage 3 gathers whole, such as a layer of experts of which each batch uses others. To be marked on every
# rank before the engine is built.


def set_z3_leaf_modules(
    model: torch.nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[torch.nn.Module]:
    """Marks the modules of these classes. The configuration's zero.unit_classes does the same.

    Returns:
        The modules that were marked.

    Raises:
        ConfigError: there is none, with raise_if_not_found.
    """
    found = _of_classes(model, leaf_module_classes, raise_if_not_found)
    _units.leaves.update(found)
    return found


def unset_z3_leaf_modules(
    model: torch.nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[torch.nn.Module]:
    """Takes the marks away. As set_z3_leaf_modules()."""
    found = _of_classes(model, leaf_module_classes, raise_if_not_found)
    _units.leaves.difference_update(found)
    return found


def get_z3_leaf_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules of a model that are marked."""
    return [module for module in model.modules() if module in _units.leaves]


def _of_classes(model: torch.nn.Module, classes: Sequence[type | str], must_find: bool) -> list[torch.nn.Module]:
    types = tuple(each for each in classes if isinstance(each, type))
    names = {each for each in classes if isinstance(each, str)}
    found = [m for m in model.modules() if isinstance(m, types) or names & _units.class_names(m)]
    if must_find and not found:
        known = sorted({type(module).__name__ for module in model.modules()})
        raise ConfigError(
            f"[zero] leaf modules: got {list(classes)}, which no module of the model is, expected some of "
            f"{', '.join(known[:8])}."
        )
    return found


class RepeatingLoader:
    """Goes through a loader again and again: `next()` starts anew where it has ended."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._batches = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
            return next(self._batches)


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Logs on these ranks, on all with [-1], on none without."""
    if ranks and (ranks[0] == -1 or _comm.world().rank in ranks):
        logger.log(level, "[rank %d] %s", _comm.world().rank, message)


def see_memory_usage(message: str, force: bool = False) -> None:
    """With `force`, logs on rank 0 what its process holds and has held at most, in host memory."""
    if force and _comm.world().rank == 0:
        now, most = _memory.resident_bytes()
        logger.info("%s: %.2f GB of host memory in this process, %.2f GB at most", message, now / 1e9, most / 1e9)


@contextlib.contextmanager
def OnDevice(dtype: torch.dtype, device: str = "meta", enabled: bool = True) -> Iterator[None]:  # noqa: N802
    """A block in which tensors are made on `device`, floating-point ones in `dtype`: for a model without memory."""
    if not enabled:
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def _owner(param: torch.nn.Parameter) -> _params.ModelParams:
    owner = _param_specs.owner_of(param)
    if owner is None or not owner.is_trained(param):
        raise ConfigError(
            f"[zero] a parameter of shape {tuple(param.shape)}: got one that no open engine trains, expected one of an "
            "engine's optimizer. Take it from engine.module.parameters()."
        )
    return owner
