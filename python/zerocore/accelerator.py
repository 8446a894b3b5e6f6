"""What device there is, as scripts for DeepSpeed ask: `get_accelerator().device_name()`. In this version: the CPU."""

from __future__ import annotations

import torch

from zerocore import _comm


class Accelerator:
    """The CPU: one device, whose operations are done when they return."""

    def device_name(self, device_index: int | None = None) -> str:
        """What `.to()` takes."""
        return "cpu"

    current_device_name = device_name

    def device(self, device_index: int | None = None) -> torch.device:
        """What `.to()` takes."""
        return torch.device(self.device_name())

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
        """Of torch.distributed."""
        return "gloo"

    def is_bf16_supported(self) -> bool:
        """Of everything that torch computes on a CPU."""
        return True

    is_fp16_supported = is_bf16_supported

    def synchronize(self, device_index: int | None = None) -> None:
        """Does nothing: operations are done when they return."""

    def empty_cache(self) -> None:
        """Does nothing: torch keeps no cache of host memory."""

    def manual_seed(self, seed: int) -> None:
        """Seeds torch's generator."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed


_accelerator = Accelerator()


def get_accelerator() -> Accelerator:
    """The one there is."""
    return _accelerator
