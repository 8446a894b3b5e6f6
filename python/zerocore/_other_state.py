"""What the core does not hold: buffers, and frozen parameters below stage 3. All ranks have rank 0's values."""

from __future__ import annotations

import torch

from zerocore import _core, _tensor
from zerocore.errors import UnsupportedError


def share_other_state(
    model: torch.nn.Module, held: list[torch.nn.Parameter], comm: _core.Communicator, dtypes: list[torch.dtype]
) -> None:
    """Gives every rank rank 0's values of what the core does not hold: frozen parameters below stage 3, and buffers.

    They are cast as the others are, to one dtype after the other; under fp32 they keep their own.

    Args:
        held: the parameters that the core holds.
    """
    ours = {id(p) for p in held}
    for dtype in dtypes:
        if set(dtypes) != {torch.float32}:
            _cast_other_state(model, ours, dtype)
    broadcast([p for p in model.parameters() if id(p) not in ours], comm, "frozen parameters")
    broadcast(list(model.buffers()), comm, "buffers")


def _cast_other_state(model: torch.nn.Module, ours: set[int], dtype: torch.dtype) -> None:
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
    """Replaces the values of `tensors` by those of rank `root`. Collective."""
    if comm.size == 1:
        return
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        dense = tensor.detach().contiguous()
        comm.broadcast(_tensor.bytes_view(dense), root, label).wait()
        if dense.data_ptr() == tensor.data_ptr():
            continue
        try:
            tensor.detach().copy_(dense)
        except RuntimeError as error:
            raise UnsupportedError(
                f"[engine] {label}: got one of shape {tuple(tensor.shape)} and strides {tensor.stride()} that cannot "
                f"be written to ({error}). Clone it in the module."
            ) from error
