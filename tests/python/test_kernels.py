"""The CPU's kernels against plain torch operations, through the cases that compare a GPU's with them (bench/gpu)."""

from __future__ import annotations

import math
from fractions import Fraction

import kernel_cases
import pytest
import torch
from kernel_cases import FACTOR, PARTS, PIECES
from reference import Reference, block_square_sums, orthogonalized, rounded
from zerocore import _core, _device, _tensor
from zerocore.errors import Error

CASES = list(kernel_cases.all_cases(large=False))
LIMB_BITS, LOWEST = 32, -1074  # of the exact sum


def test_every_kernel_has_cases():
    assert {case.kernel for case in CASES} == set(REFERENCES)


def test_a_wrong_element_is_told():
    case = next(c for c in CASES if c.kernel == "scale" and "37" in c.name)
    right = kernel_cases.outcome(case, _device.Host())
    for index, element in ((-1, 100), (0, -64)):  # one after the buffer and one before it
        wrong = kernel_cases.outcome(case, _device.Host())
        wrong.memory["inout"][index] = 8
        assert f"inout[{element}] is 0x41000000" in kernel_cases.difference(case, wrong, right)
    assert kernel_cases.difference(case, right, right) is None


def test_buffers_that_do_not_fit_are_refused():
    kernels = _core.Kernels(_core.cpu_device())
    four, five = (_tensor.view(torch.zeros(n)) for n in (4, 5))
    elsewhere = _core.BufferView(0, 4, _core.DType.fp32, 0)
    with pytest.raises(Error, match=r"\[kernels\] cast: got 5 elements of fp32 in host memory"):
        kernels.cast(four, five)
    with pytest.raises(Error, match=r"\[kernels\] cast: got 4 elements of fp32 in cuda:0, .* not in host memory"):
        kernels.cast(four, elsewhere)
    with pytest.raises(Error, match=r"\[kernels\] fold"):
        kernels.fold([four, five], four, first=True)
    with pytest.raises(Error, match=r"slice leaves its buffer"):
        kernels.pack([(four, 2, 4)], five)
    with pytest.raises(Error, match=r"\[kernels\] got a piece at 0 of 4 elements in slot 1 of 1"):
        _core.Norm(_core.cpu_device(), [(0, 4, 1)], 1)
    update = _core.Update(_core.cpu_device(), [(0, 5, 0)], [kernel_cases.core_hyper(kernel_cases.OPTIMIZERS["sgd"][0])])
    with pytest.raises(Error, match=r"expected a begin_step"):
        update.run(grad=five, param=five)
    update.begin_step(used=[True], factor=1.0, skip=False)
    with pytest.raises(Error, match=r"\[kernels\] update: got 4 elements"):
        update.run(grad=five, param=four)


# The references: each changes the tensors of a case as its kernel does, and returns what else comes out.


def zero(case, at):
    at["out"].zero_()


def cast(case, at):
    at["out"].copy_(converted(at["in"], at["out"].dtype))


def converted(values, dtype):
    """A NaN stays what it is as far as there is room: quiet, and in fp16 without a payload."""
    if values.dtype == dtype:
        return values
    wide = values.float()
    if values.dtype == torch.bfloat16:
        wide = (values.view(torch.int16).to(torch.int32) << 16).view(torch.float32)
    if dtype == torch.float32:
        return wide
    upper = wide.view(torch.int32) >> 16
    nan = upper | 0x40 if dtype == torch.bfloat16 else upper & 0x8000 | 0x7E00
    return torch.where(wide.isnan(), nan.to(torch.int16), wide.to(dtype).view(torch.int16)).view(dtype)


def pack(case, at):
    for name, (offset, numel) in PARTS.items():
        part = at["out"][offset : offset + numel]
        part.copy_(converted(at[name], part.dtype)) if name else part.zero_()


def fold(case, at):
    add([at[name] for name in case.settings["sources"]], at["acc"], first=case.settings["first"])


def add(sources, acc, *, first):
    """One at a time, each sum rounded; a 16-bit sum is never -0."""
    if first:
        acc.zero_()
    for source in sources:
        acc.copy_(acc.float() + source.float())
        if acc.dtype != torch.float32:
            acc[acc == 0] = 0


def fold_parts(case, at):
    for name, (offset, numel) in PARTS.items():
        source = at[name].to(case.settings["dtype"]) if name else torch.zeros(numel)
        add([source], at["acc"][offset : offset + numel], first=case.settings["first"])


def scale(case, at):
    at["inout"].mul_(rounded(case.settings["factor"]))


def square_sum(case, at):
    total, nonfinite = Fraction(0), [0] * len(PIECES)
    for offset, numel, slot in PIECES:
        for block in block_square_sums(at["in"][offset : offset + numel].float()):
            if math.isfinite(block):
                total += Fraction(block)
            else:
                nonfinite[slot] = 1
    units = total / Fraction(2) ** LOWEST
    assert units.denominator == 1
    limbs = [units.numerator >> (LIMB_BITS * i) & (1 << LIMB_BITS) - 1 for i in range(70)]
    return limbs, nonfinite


def finish_norm(case, at):
    limbs, nonfinite = square_sum(case, at)
    total = sum(limb << (LIMB_BITS * i) for i, limb in enumerate(limbs)) * Fraction(2) ** LOWEST
    scaled = case.settings["scaled"]
    divisor = 6.0 * (1024.0 if scaled else 1.0)
    if any(nonfinite):
        scalars = (math.inf, 1.0, 1.0, 1)
        state = (512.0, 8, 7, 1)
    else:
        norm = math.sqrt(float(total)) / divisor
        clip = min(1.0, case.settings["max_norm"] / (norm + 1e-6)) if case.settings["max_norm"] else 1.0
        scalars = (norm, clip, rounded(clip / divisor).item(), 0)
        state = (2048.0, 8, 4, 1)  # two clean steps before this one
    return *scalars, *(state if scaled else (1024.0, 7, 4, 1)), 0


def update(case, at):
    settings = case.settings
    for step in (1, 2):
        for offset, numel, slot in settings["pieces"]:
            if settings["skip"] or not settings["used"][slot]:
                continue
            piece = {name: tensor[offset : offset + numel] for name, tensor in at.items()}
            loop = Reference(torch.nn.ParameterList(), [piece["param"]], hyper=settings["hypers"][slot])
            loop.state = [[piece.get(state, torch.zeros(numel)) for state in ("state1", "state2")]]
            loop.steps = [step]
            loop.update(0, piece["grad"].float() * rounded(FACTOR))
            if "model" in piece:
                piece["model"].copy_(piece["param"])


def muon(case, at):
    if case.settings["skip"]:
        return
    for shape, (offset, numel, slot) in zip(kernel_cases.MATRICES, case.settings["pieces"], strict=True):
        if not case.settings["used"][slot]:
            continue
        piece = {name: tensor[offset : offset + numel].view(shape) for name, tensor in at.items()}
        hyper = case.settings["hypers"][slot]
        decay, keep = rounded(hyper["muon_momentum"]), rounded(1 - hyper["muon_momentum"])
        grad = piece["grad"].float() * rounded(FACTOR)
        momentum = piece["state1"].copy_(decay * piece["state1"] + keep * grad)
        direction = keep * grad + decay * momentum if hyper["muon_nesterov"] else momentum
        piece["direction"].copy_(orthogonalized(direction, 5))
        step_size = rounded(hyper["muon_lr"] * math.sqrt(max(1.0, shape[0] / shape[1])))
        shrink = rounded(1 - hyper["muon_lr"] * hyper["weight_decay"])
        piece["param"].copy_(shrink * piece["param"] - step_size * piece["direction"])
        if "model" in piece:
            piece["model"].copy_(piece["param"])


def orthogonalize(case, at):
    shape = case.settings["shape"]
    at["matrix"].copy_(orthogonalized(at["matrix"].view(shape), 5).flatten())


REFERENCES = {
    "zero": zero,
    "cast": cast,
    "pack": pack,
    "fold": fold,
    "fold_first": fold,
    "fold_parts": fold_parts,
    "scale": scale,
    "square_sum": square_sum,
    "finish_norm": finish_norm,
    **dict.fromkeys(("adam", "sgd", "momentum", "lion", "adagrad"), update),
    "muon": muon,
    "orthogonalize": orthogonalize,
}


@pytest.mark.parametrize("kernel", REFERENCES)
def test_bits_are_those_of_torch_operations(kernel):
    differences = []
    for case in CASES:
        if case.kernel == kernel:
            expected = kernel_cases.expected(case, REFERENCES[kernel])
            differences.append(kernel_cases.difference(case, kernel_cases.outcome(case, _device.Host()), expected))
    assert differences and not any(differences), next(filter(None, differences))
