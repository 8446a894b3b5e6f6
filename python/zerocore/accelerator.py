"""What device there is, as scripts for DeepSpeed ask: `get_accelerator().device_name()`."""

from __future__ import annotations

import functools

import torch

from zerocore import _comm, _core, comm


class Accelerator:
    """The CPU: one device, whose operations are done when they return."""

    def device_name(self, device_index: int | None = None) -> str:
        """What `.to()` takes."""
        return "cpu"

    def current_device_name(self) -> str:
        """What `.to()` takes, for this rank's device."""
        return self.device_name()

    def device(self, device_index: int | None = None) -> torch.device:
        """What `.to()` takes."""
        return torch.device(self.device_name(device_index))

    def current_device(self) -> int:
        """This rank's number on its machine, as it would number devices."""
        return _comm.local_rank()

    def device_count(self) -> int:
        """One, on every rank."""
        return 1

    def set_device(self, device_index: int) -> None:
        """Does nothing: there is one device."""

    def is_available(self) -> bool:
        """A CPU is there."""
        return True

    def communication_backend_name(self) -> str:
        """The backend of the group that init_distributed() makes."""
        return comm.BACKEND

    def is_bf16_supported(self) -> bool:
        """True: torch computes in it on every device."""
        return True

    def is_fp16_supported(self) -> bool:
        """True: torch computes in it on every device."""
        return True

    def synchronize(self, device_index: int | None = None) -> None:
        """Does nothing: operations are done when they return."""

    def empty_cache(self) -> None:
        """Does nothing: torch keeps no cache of host memory."""

    def manual_seed(self, seed: int) -> None:
        """Seeds torch's generators."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed


class CudaAccelerator(Accelerator):
    """CUDA's devices, through torch."""

    def device_name(self, device_index: int | None = None) -> str:
        """What `.to()` takes."""
        return "cuda" if device_index is None else f"cuda:{device_index}"

    def current_device_name(self) -> str:
        """What `.to()` takes, for the process's device."""
        return self.device_name(self.current_device())

    def current_device(self) -> int:
        """The process's device; an engine sets it."""
        return torch.cuda.current_device()

    def device_count(self) -> int:
        """Those that the process sees."""
        return torch.cuda.device_count()

    def set_device(self, device_index: int) -> None:
        """Makes it the process's."""
        torch.cuda.set_device(device_index)

    def is_available(self) -> bool:
        """Whether torch sees a device."""
        return torch.cuda.is_available()

    def is_bf16_supported(self) -> bool:
        """Whether the process's device computes in it."""
        return bool(torch.cuda.is_bf16_supported())

    def synchronize(self, device_index: int | None = None) -> None:
        """Waits for everything on a device."""
        torch.cuda.synchronize(device_index)

    def empty_cache(self) -> None:
        """Gives torch's unused memory back."""
        torch.cuda.empty_cache()


@functools.cache
def get_accelerator() -> Accelerator:
    """What an engine with device = "auto" would train on."""
    built, num_devices, _ = _core.cuda_status()
    return CudaAccelerator() if built and num_devices > 0 and torch.cuda.is_available() else Accelerator()
