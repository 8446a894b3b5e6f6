"""Trains one step on one rank with the zerocore that is installed, calls its command, and says where that is."""

import subprocess
import sys
from pathlib import Path

import torch
import zerocore

model = torch.nn.Linear(4, 2)
config = {
    "train_batch_size": 2,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
    "zero_optimization": {"stage": 2},
}
engine = zerocore.Engine(model, config)
before = model.weight.detach().clone()
engine.backward(engine(torch.ones(2, 4)).mean())
engine.step()
assert not torch.equal(before, model.weight), "a step left the parameters as they were"
command = Path(sys.executable).with_name("zerocore")
version = subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout
assert version == f"zerocore {zerocore.__version__}\n", version
print(f"zerocore {zerocore.__version__} in {zerocore.__file__}: one step on one rank")
