"""The device of an engine: where its model states lie, what torch calls it, and which stream its kernels run on."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import logging
from pathlib import Path
from typing import Any

import torch

from zerocore import _comm, _core, _memory, _tensor
from zerocore.config import ResolvedConfig
from zerocore.errors import ConfigError, DeviceError, UnsupportedError

logger = logging.getLogger("zerocore")


class Host:
    """The CPU. Its operations are done when they return.

    Attributes:
        torch: what torch calls the device.
        core: what the core does.
        runs_behind: whether operations go on after the calls that start them have returned.
    """

    def __init__(self) -> None:
        self.torch = torch.device("cpu")
        self.core = _core.cpu_device()
        self.runs_behind = False

    def stream(self) -> int:
        """The handle of the stream that the caller's operations run on."""
        return 0

    def on_current_stream(self) -> contextlib.AbstractContextManager[Any]:
        """A block, for another thread, whose operations run on the stream that is current here."""
        return contextlib.nullcontext()

    def communicator(self, host: _core.Communicator, *, fast_reduction: bool) -> _core.Communicator:
        """The ranks of `host`, for collectives on this device's memory. Collective.

        Raises:
            ConfigError: fast_reduction, where there is no faster one.
        """
        if fast_reduction:
            raise ConfigError(
                '[config] comm.reduction: got "fast", which is NCCL\'s, expected "ordered" on the CPU: there it is the '
                "fastest as well."
            )
        return host

    def view(self, tensor: torch.Tensor) -> _core.BufferView:
        """A dense tensor of this device as the core sees it; see _tensor.view()."""
        return _tensor.view(tensor)

    def tensor(self, memory: _core.Memory, dtype: torch.dtype, numel: int, offset_bytes: int = 0) -> torch.Tensor:
        """A 1-D tensor over core memory, which it keeps alive."""
        return torch.frombuffer(memory, dtype=dtype, count=numel, offset=offset_bytes)

    def tensor_at(self, address: int, dtype: torch.dtype, num_bytes: int) -> torch.Tensor:
        """A 1-D tensor over memory that the caller keeps alive."""
        return torch.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype=dtype)

    def free_bytes(self, *, ranks: int) -> int | None:
        """Memory that is left for a rank; None where nothing says. ranks: that share the machine's."""
        return _memory.free_bytes(ranks=ranks)


class Cuda(Host):
    """A CUDA device: everything runs on torch's current stream, and on the streams of collectives beside it."""

    def __init__(self, index: int) -> None:
        self.torch = torch.device("cuda", index)
        self.core = _core.cuda_device(index)
        self.runs_behind = True
        self._index = index

    def stream(self) -> int:
        return torch.cuda.current_stream(self._index).cuda_stream

    def on_current_stream(self) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(torch.cuda.current_stream(self._index))

    def communicator(self, host: _core.Communicator, *, fast_reduction: bool) -> _core.Communicator:
        path = _nccl_path()
        comm = _core.device_communicator(host, self.core, fast_reduction=fast_reduction, nccl_path=path)
        if comm.backend == "nccl" and comm.size > 1 and comm.rank == 0:
            logger.info("[device] collectives by %s", _core.nccl(path))
        if comm.backend == "staged" and comm.rank == 0:
            logger.warning(
                "[device] ranks share a CUDA device: collectives go through host memory, which is for tests. Start one "
                "rank a device, or look at CUDA_VISIBLE_DEVICES."
            )
        return comm

    def tensor(self, memory: _core.Memory, dtype: torch.dtype, numel: int, offset_bytes: int = 0) -> torch.Tensor:
        return self._wrap(memory, memory.address + offset_bytes, dtype, numel * dtype.itemsize)

    def tensor_at(self, address: int, dtype: torch.dtype, num_bytes: int) -> torch.Tensor:
        return self._wrap(None, address, dtype, num_bytes)

    def _wrap(self, owner: Any, address: int, dtype: torch.dtype, num_bytes: int) -> torch.Tensor:
        if num_bytes == 0:
            return torch.empty(0, dtype=dtype, device=self.torch)
        return torch.as_tensor(_Exported(owner, address, num_bytes), device=self.torch).view(dtype)

    def free_bytes(self, *, ranks: int) -> int | None:
        free: int = torch.cuda.mem_get_info(self._index)[0]
        return free


class _Exported:
    """Device memory for torch, by the CUDA array interface; torch keeps it, and it keeps the owner."""

    def __init__(self, owner: Any, address: int, num_bytes: int) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


def capabilities() -> dict[str, Any]:
    """What this build and machine can do. Creates no context on any device.

    Returns:
        "cuda_built": whether the build has the CUDA backend; "cuda_devices": how many devices it sees; "cuda": that in
        words, such as "CUDA backend built, no device".
    """
    built, num_devices, text = _core.cuda_status()
    return {"cuda_built": built, "cuda_devices": num_devices, "cuda": text}


def choose(config: ResolvedConfig) -> Host:
    """The device that the configuration asks for: "cpu", "cuda", or "auto", which is CUDA's where it can be had.

    A rank takes the device with its number among the ranks on its machine; the process's current CUDA device is set to
    it. Ranks beyond the devices share them.

    Raises:
        DeviceError: "cuda", and there is none, or no code for it in this build.
        UnsupportedError: the configuration asks for what there is on the CPU only.
    """
    wanted = config.device
    if wanted == "cpu":
        return Host()
    built, num_devices, status = _core.cuda_status()
    usable = built and num_devices > 0 and torch.cuda.is_available()
    if wanted == "cuda" and not usable:
        why = "" if not (built and num_devices) else f", but torch {torch.__version__} sees none"
        raise DeviceError(
            f'[device] got device = "cuda", expected a CUDA device and a build for it: {status}{why}. '
            f'{"Look at nvidia-smi and CUDA_VISIBLE_DEVICES" if built else _HOW_TO_BUILD}, or set device = "cpu".'
        )
    if not usable:
        if wanted == "auto" and not built and torch.cuda.is_available():
            _tell_not_built()
        return Host()
    for key, value, off in (
        ("zero.offload (offload_optimizer, offload_param)", config.zero.offload, "none"),
        ("zero.share_parameters", config.zero.share_parameters, False),
    ):
        if value != off:
            raise UnsupportedError(
                f"[device] {key}: got {value!r} for an engine on CUDA, expected {off!r}: it is there on the "
                'CPU only. Remove it, or set device = "cpu".'
            )
    index = _comm.local_rank() % num_devices  # of those in CUDA_VISIBLE_DEVICES, which may be one and this rank's own
    torch.cuda.set_device(index)
    return Cuda(index)


_HOW_TO_BUILD = "Install with `pip install . --config-settings=cmake.define.ZC_CUDA=ON`"


@functools.cache
def _tell_not_built() -> None:
    logger.warning(
        "[device] torch sees a CUDA device, but this build of zerocore has no code for it: the engine runs on the CPU. "
        "%s.",
        _HOW_TO_BUILD,
    )


def _nccl_path() -> str:
    """The library in NVIDIA's wheel, which torch's CUDA builds come with; empty: there is none."""
    try:
        found = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return ""
    folders = [] if found is None else list(found.submodule_search_locations or [])
    files = [path for folder in folders for path in Path(folder).glob("lib/libnccl.so.2")]
    return str(files[0]) if files else ""
