"""Trains one step on one rank with the zerocore that is installed, and says where that is."""

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
print(f"zerocore {zerocore.__version__} in {zerocore.__file__}: one step on one rank")
