"""Engines on simulated GPUs: the backend's own code over host memory, with streams that run at once.

With ZC_TEST_SIMULATED_CUDA=<the module that is built for it>, in the environment of pytest and of the ranks it starts,
every engine trains on one. torch's tensors stay on the CPU, whose memory is that of the simulated device as well. Ranks
are processes, which no simulated NCCL connects: they share a device, and collectives go through "pinned" memory.
"""

from __future__ import annotations

import importlib.util
import os
import sys

VARIABLE = "ZC_TEST_SIMULATED_CUDA"


def is_on():
    return VARIABLE in os.environ


def install():
    """Before anything imports the core."""
    import zerocore

    spec = importlib.util.spec_from_file_location("zerocore._core", os.environ[VARIABLE])
    core = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(core)
    sys.modules["zerocore._core"] = zerocore._core = core

    from zerocore import _device, _tensor

    class SimulatedCuda(_device.Host):
        def __init__(self):
            super().__init__()
            self.core = core.cuda_device(0)
            self.runs_behind = True

        def communicator(self, host, *, fast_reduction):
            return core.device_communicator(host, self.core, fast_reduction=fast_reduction, nccl_path="")

        def view(self, tensor):
            checked = _tensor.view(tensor)
            return core.BufferView(tensor.data_ptr(), checked.numel, checked.dtype, cuda_index=0)

    def choose(config):
        assert core.cuda_status() == (True, 2, "CUDA backend, 2 x simulated device 0 and others")
        return SimulatedCuda() if config.device != "cpu" else _device.Host()

    _device.choose = choose
