"""params_sha256: what changes the fingerprint and what does not."""

from __future__ import annotations

import hashlib
import struct

import torch
from zerocore.utils import params_sha256


class Odd(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scalar = torch.nn.Parameter(torch.tensor(1.5))
        self.empty = torch.nn.Parameter(torch.empty(0, 3))
        self.narrow = torch.nn.Parameter(torch.tensor([1.0, -0.0], dtype=torch.bfloat16))
        self.tied = self.scalar


def test_names_dtypes_shapes_and_bytes_in_order():
    written = b"scalar torch.float32 ()\n" + struct.pack("<f", 1.5) + b"empty torch.float32 (0, 3)\n"
    written += b"narrow torch.bfloat16 (2,)\n" + bytes.fromhex("803f0080")
    assert params_sha256(Odd()) == hashlib.sha256(written).hexdigest()


def test_one_bit_counts_and_memory_layout_does_not():
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    other.load_state_dict(model.state_dict())
    other.weight.data = other.weight.data.t().contiguous().t()
    assert params_sha256(other) == params_sha256(model)
    with torch.no_grad():
        model.bias[0], other.bias[0] = 0.0, -0.0
    assert params_sha256(other) != params_sha256(model)


def test_buffers_do_not_count():
    model = torch.nn.BatchNorm1d(2)
    before = params_sha256(model)
    model.running_mean.fill_(7)
    assert params_sha256(model) == before
