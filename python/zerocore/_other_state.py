"""What the core does not hold: buffers, and frozen parameters below stage 3. All ranks have rank 0's values."""

from __future__ import annotations

import torch

from zerocore import _core, _tensor
from zerocore.errors import UnsupportedError

_SMALL_BYTES = 1 << 16
_AT_ONCE = 64  # tensors in one message


def share_other_state(
    model: torch.nn.Module, held: list[torch.nn.Parameter], comm: _core.Communicator, dtypes: list[torch.dtype]
) -> None:
    """Gives every rank rank 0's values of what the core does not hold: frozen parameters below stage 3, and buffers.

    They are cast as the others are, to one dtype after the other; under fp32 they keep their own.

    Args:
        held: the parameters that the core holds.
    """
    cast_other_state(model, held, dtypes)
    ours = {id(p) for p in held}
    broadcast([p for p in model.parameters() if id(p) not in ours], comm, "frozen parameters")
    broadcast(list(model.buffers()), comm, "buffers")


def cast_other_state(model: torch.nn.Module, held: list[torch.nn.Parameter], dtypes: list[torch.dtype]) -> None:
    """See share_other_state()."""
    ours = {id(p) for p in held}
    for dtype in dtypes:
        if set(dtypes) != {torch.float32}:
            _cast(model, ours, dtype)


def move_other_state(model: torch.nn.Module, held: list[torch.nn.Parameter], device: torch.device) -> None:
    """Moves what the core does not hold to the engine's device."""
    ours = {id(p) for p in held}
    with torch.no_grad():
        for param in model.parameters():
            if id(param) not in ours and param.device != device and not param.is_meta:
                param.data = param.data.to(device)
        moved: dict[int, torch.Tensor] = {}  # a buffer that two modules share stays shared
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
                if buffer.device != device and not buffer.is_meta:  # one without memory is refused when it is saved
                    module._buffers[name] = moved.setdefault(id(buffer), buffer.to(device))


def other_state_bytes(model: torch.nn.Module, held: list[torch.nn.Parameter]) -> dict[str, int]:
    """Bytes of what the core does not hold: frozen_parameters, buffers."""
    ours = {id(p) for p in held}
    frozen = sum(p.numel() * p.element_size() for p in model.parameters() if id(p) not in ours)
    return {"frozen_parameters": frozen, "buffers": sum(b.numel() * b.element_size() for b in model.buffers())}


def _cast(model: torch.nn.Module, ours: set[int], dtype: torch.dtype) -> None:
    with torch.no_grad():
        for param in model.parameters():
            if id(param) not in ours and param.is_floating_point():
                param.data = param.data.to(dtype)
        casts: dict[int, torch.Tensor] = {}  # a buffer that two modules share stays shared
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
                if buffer.is_floating_point() and buffer.dtype != dtype:
                    module._buffers[name] = casts.setdefault(id(buffer), buffer.to(dtype))


def broadcast(tensors: list[torch.Tensor], comm: _core.Communicator, label: str, root: int = 0) -> None:
    """Replaces the values of `tensors` by those of rank `root`; small ones of one dtype travel together. Collective."""
    if comm.size == 1:
        return
    small: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.nbytes > _SMALL_BYTES:
            _broadcast([tensor], comm, label, root)
        elif tensor.numel() > 0:
            small.setdefault(tensor.dtype, []).append(tensor)
    for alike in small.values():
        for first in range(0, len(alike), _AT_ONCE):
            _broadcast(alike[first : first + _AT_ONCE], comm, label, root)


def _broadcast(tensors: list[torch.Tensor], comm: _core.Communicator, label: str, root: int) -> None:
    dense = [tensor.detach().contiguous() for tensor in tensors]
    message = dense[0] if len(dense) == 1 else torch.cat([each.view(-1) for each in dense])
    stream = _tensor.stream_of(message)
    work = comm.broadcast(_tensor.bytes_view(message), root, label, stream)
    if message.is_cpu:
        work.wait()
    else:
        work.order(stream)
    parts = torch.split(message.view(-1), [each.numel() for each in dense])
    for tensor, values in zip(tensors, parts, strict=True):
        if values.data_ptr() == tensor.data_ptr():
            continue
        try:
            tensor.data.copy_(values.view(tensor.shape))  # not counted as a change, nor is what the core writes
        except RuntimeError as error:
            raise UnsupportedError(
                f"[engine] {label}: got one of shape {tuple(tensor.shape)} and strides {tensor.stride()} that cannot "
                f"be written to ({error}). Clone it in the module."
            ) from error
