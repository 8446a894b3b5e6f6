"""Tensors as the core sees them: checked, typed addresses. The only place where torch memory meets the core."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import xxhash

from zerocore import _core
from zerocore.errors import DeviceError, UnsupportedError

DTYPES = {
    torch.float32: _core.DType.fp32,
    torch.float16: _core.DType.fp16,
    torch.bfloat16: _core.DType.bf16,
}
TORCH_DTYPES = {core: dtype for dtype, core in DTYPES.items()}


def is_dense(tensor: torch.Tensor) -> bool:
    """True when the elements fill their memory without gaps or overlaps, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def view(tensor: torch.Tensor) -> _core.BufferView:
    """The memory of a dense tensor of fp32, fp16 or bf16. Keeps nothing alive: the caller does.

    Raises:
        DeviceError: the tensor is neither on the CPU nor on a CUDA device.
        UnsupportedError: another dtype, a sparse layout, or elements with gaps.
    """
    if tensor.dtype not in DTYPES or tensor.layout != torch.strided or not is_dense(tensor):
        raise UnsupportedError(
            f"[tensor] got a {tensor.layout} tensor of {tensor.dtype} with strides {tuple(tensor.stride())}, "
            "expected dense fp32, fp16 or bf16. Convert it first."
        )
    return _core.BufferView(tensor.data_ptr(), tensor.numel(), DTYPES[tensor.dtype], _cuda_index(tensor))


def bytes_view(tensor: torch.Tensor) -> _core.BufferView:
    """The memory of a dense tensor of any dtype, as bytes."""
    return _core.BufferView(tensor.data_ptr(), tensor.nbytes, _core.DType.uint8, _cuda_index(tensor))


def digest(tensor: torch.Tensor) -> int:
    """XXH3 of a tensor's elements: reads them once (several GB/s), from a copy where they are on a device."""
    values = tensor.detach().cpu()
    values = values if is_dense(values) else values.contiguous()
    return xxhash.xxh3_64_intdigest((ctypes.c_char * values.nbytes).from_address(values.data_ptr()))


def stream_of(tensor: torch.Tensor) -> int:
    """The handle of the stream that operations on a tensor run on; 0 on the CPU."""
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0


def _cuda_index(tensor: torch.Tensor) -> int:
    if tensor.device.type == "cpu":
        return -1
    if tensor.device.type != "cuda":
        raise DeviceError(
            f"[tensor] a tensor lies on {tensor.device}: expected cpu or cuda, for which there is code. Move the model."
        )
    return tensor.device.index


def shaped(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A view of a 1-D tensor with `like`'s shape and order of dimensions."""
    strides = like.stride() if is_dense(like) else torch.empty(like.shape, device="meta").stride()
    return flat.as_strided(like.shape, strides)


def matching(grad: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """The gradient, dense, with the parameter's dtype and order of elements; itself in the usual case.

    Rows of a sparse one are added up in their order, which is also that of torch's dense backward of an embedding.
    """
    if grad.layout != torch.strided:
        grad = grad.to_dense()
    if grad.dtype == param.dtype and (
        grad.stride() == param.stride() or (grad.is_contiguous() and param.is_contiguous())
    ):
        return grad
    return torch.empty_like(param).copy_(grad)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested tuples, lists, mappings and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))
