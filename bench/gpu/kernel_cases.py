"""Calls of every kernel on small buffers, for any device.

gpu_check compares the bits that CUDA computes with the CPU's (kernel_bits.py); tests/python/test_kernels.py compares
the CPU's with plain torch operations.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from zerocore import _core, _tensor
from zerocore._device import Host

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_GUARD = 64  # elements around a buffer, which nobody may write
_LARGE = 5_000_003  # elements: more than the threads of a GPU take at a time

# Pieces (offset, numel, slot) of a flat buffer as the engine has them, with room between them; slot 2 is not used.
PIECES = [(0, 2500, 0), (2560, 64, 1), (3072, 1024, 2), (4096, 3077, 3), (7232, 1, 4)]
USED = [True, True, False, True, True]
FLAT = 7240
FACTOR = 0.3  # what gradients are multiplied by
MATRICES = {(33, 70): 0, (70, 33): 2368, (40, 40): 4736}  # rows, columns: offset

_ADAM = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
_SGD = {"type": "sgd", "lr": 0.05, "weight_decay": 0.01, "momentum": 0.0, "dampening": 0.0, "nesterov": False}
_MUON = {"muon_lr": 0.02, "muon_momentum": 0.95, "muon_ns_steps": 5, "weight_decay": 0.1}
OPTIMIZERS: dict[str, list[dict[str, Any]]] = {  # groups that slots take in turn
    "adam": [{"type": "adamw"} | _ADAM, {"type": "adam"} | _ADAM],
    "sgd": [_SGD, _SGD | {"lr": 0.1, "weight_decay": 0.0}],
    "momentum": [_SGD | {"momentum": 0.9, "dampening": 0.5}, _SGD | {"momentum": 0.8, "nesterov": True}, _SGD],
    "lion": [{"type": "lion", "lr": 0.003, "betas": (0.9, 0.99), "weight_decay": 0.1}],
    "adagrad": [
        {
            "type": "adagrad",
            "lr": 0.05,
            "lr_decay": 0.1,
            "eps": 1e-10,
            "weight_decay": 0.1,
            "initial_accumulator_value": 0.25,
        }
    ],
    "muon": [{"type": "muon", "muon_nesterov": nesterov} | _MUON for nesterov in (True, False)],
}
NUM_STATES = {"adam": 2, "sgd": 0, "momentum": 1, "lion": 1, "adagrad": 1, "muon": 1}


def core_hyper(hyper: dict[str, Any]) -> Any:
    """A group's hyperparameters as the core takes them."""
    kind = hyper["type"]
    if kind == "sgd":
        keys = ("lr", "momentum", "dampening", "weight_decay", "nesterov")
        return _core.SgdHyper(**{key: hyper[key] for key in keys})
    if kind == "adagrad":
        keys = ("lr", "lr_decay", "eps", "weight_decay")
        initial = hyper["initial_accumulator_value"]
        return _core.AdagradHyper(**{key: hyper[key] for key in keys}, initial_accumulator=initial)
    if kind == "muon":
        return _core.MuonHyper(
            lr=hyper["muon_lr"],
            momentum=hyper["muon_momentum"],
            weight_decay=hyper["weight_decay"],
            nesterov=hyper["muon_nesterov"],
            iterations=hyper["muon_ns_steps"],
        )
    betas = {"beta1": hyper["betas"][0], "beta2": hyper["betas"][1]}
    common = {"lr": hyper["lr"], "weight_decay": hyper["weight_decay"]}
    if kind == "lion":
        return _core.LionHyper(**common, **betas)
    decoupled = kind == "adamw"
    more = {"eps": hyper["eps"], "decoupled_weight_decay": decoupled, "bias_correction": True}
    return _core.AdamHyper(**common, **betas, **more)


class Run:
    """A device, and a case's buffers in its memory."""

    def __init__(self, device: Host, buffers: dict[str, torch.Tensor]) -> None:
        self.core = device.core
        self.kernels = _core.Kernels(device.core)
        self.buffers = buffers
        self.stream = device.stream()
        self.kept: list[Any] = []  # what kernels may still read

    def view(self, name: str) -> _core.BufferView:
        """A buffer as the core sees it."""
        return _tensor.view(self.buffers[name])

    def views(self, *names: str) -> dict[str, _core.BufferView]:
        """Those of the named buffers that there are."""
        return {name: self.view(name) for name in names if name in self.buffers}

    def empty(self, numel: int) -> _core.BufferView:
        """Room for fp32 elements."""
        self.kept.append(torch.empty(numel, device=next(iter(self.buffers.values())).device))
        return _tensor.view(self.kept[-1])


@dataclasses.dataclass
class Case:
    """One call of a kernel, or a few that belong together.

    Attributes:
        kernel: which; name: with what.
        buffers: by name, on the CPU: (values, by how many elements it lies off 128 bytes).
        call: makes it, which changes buffers; returns what else comes out.
        settings: what the call is made with, for a reference.
        any_nan: a NaN may have any bits. (Arithmetic: processors choose them.)
    """

    kernel: str
    name: str
    buffers: dict[str, tuple[torch.Tensor, int]]
    call: Callable[[Run], Any]
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    any_nan: bool = True


@dataclasses.dataclass
class Outcome:
    """What a call leaves behind. memory: the buffers with what is around them, on the CPU."""

    memory: dict[str, torch.Tensor]
    result: Any = None


def outcome(case: Case, device: Host) -> Outcome:
    """Makes the call on a device. Waits for it."""
    memory = {name: _inside_guards(values, shift).to(device.torch) for name, (values, shift) in case.buffers.items()}
    run = Run(device, {n: m[_GUARD + case.buffers[n][1] : m.numel() - _GUARD] for n, m in memory.items()})
    result = case.call(run)
    device.core.synchronize(run.stream)
    return Outcome({name: whole.cpu() for name, whole in memory.items()}, result)


def expected(case: Case, reference: Callable[[Case, dict[str, torch.Tensor]], Any]) -> Outcome:
    """What a reference leaves behind, which changes tensors on the CPU and returns what else comes out."""
    memory = {name: _inside_guards(values, shift) for name, (values, shift) in case.buffers.items()}
    tensors = {n: m[_GUARD + case.buffers[n][1] : m.numel() - _GUARD] for n, m in memory.items()}
    return Outcome(memory, reference(case, tensors))


def difference(case: Case, got: Outcome, wanted: Outcome) -> str | None:
    """Where two outcomes differ, in words; None: the bits are equal."""
    for name, whole in got.memory.items():
        a, b = _bits(whole, any_nan=case.any_nan), _bits(wanted.memory[name], any_nan=case.any_nan)
        differ = (a != b).nonzero().flatten()
        if len(differ):
            at = int(differ[0])
            mask = (1 << 8 * whole.element_size()) - 1
            element = at - _GUARD - case.buffers[name][1]
            return (
                f"{case.kernel} {case.name}: {name}[{element}] is 0x{a[at].item() & mask:x}, expected "
                f"0x{b[at].item() & mask:x}; {len(differ)} elements differ"
            )
    if got.result != wanted.result:
        return f"{case.kernel} {case.name}: got {got.result}, expected {wanted.result}"
    return None


def _inside_guards(values: torch.Tensor, shift: int) -> torch.Tensor:
    whole = torch.full((values.numel() + shift + 2 * _GUARD,), 7, dtype=values.dtype)
    whole[_GUARD + shift : whole.numel() - _GUARD] = values
    return whole


def _bits(tensor: torch.Tensor, *, any_nan: bool) -> torch.Tensor:
    bits = tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)
    return torch.where(tensor.isnan(), -1, bits) if any_nan else bits


def patterns(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bits: NaN, infinity and subnormals among them."""
    half = 1 << (8 * dtype.itemsize - 1)
    integers = torch.int32 if dtype.itemsize == 4 else torch.int16
    return torch.randint(-half, half, (numel,), generator=_generator(seed)).to(integers).view(dtype)


def numbers(numel: int, dtype: torch.dtype, seed: int, *, special: bool = False) -> torch.Tensor:
    """Normal numbers of many magnitudes; special: every 97th is any bits. None is -0."""
    random = _generator(seed)
    values = torch.randn(numel, generator=random) * 2.0 ** torch.randint(-9, 9, (numel,), generator=random)
    values = values.to(dtype)
    if special:
        values[96::97] = patterns(len(values[96::97]), dtype, seed + 1)
    return torch.where(values == 0, torch.zeros((), dtype=dtype), values)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# The cases


def all_cases(*, large: bool) -> Iterator[Case]:
    """Every kernel and dtype. large: also buffers of some MB."""
    yield from _zeros()
    yield from _casts(large)
    yield from _packs()
    yield from _folds(large)
    yield from _fold_parts()
    yield from _scales(large)
    yield from _norms(large)
    yield from _updates(large)
    yield from _muons()
    yield from _orthogonalizations(large)


def _zeros() -> Iterator[Case]:
    for name, numel, shift in itertools.product(DTYPES, (0, 1, 37, 5003), (0, 3)):
        yield Case(
            "zero",
            f"{name}, {numel} elements, off by {shift}",
            {"out": (numbers(numel, DTYPES[name], 1), shift)},
            lambda run: run.kernels.zero(run.view("out"), run.stream),
        )


def _casts(large: bool) -> Iterator[Case]:
    sizes = [(numel, shifts) for numel in (1, 37, 5003) for shifts in ((0, 0), (1, 0), (0, 1), (3, 3))]
    sizes += [(65_536, (0, 0))] + [(_LARGE, (1, 1))] * large
    for (source, out), (numel, shifts) in itertools.product(itertools.product(DTYPES, repeat=2), sizes):
        values = patterns(numel, DTYPES[source], numel)
        if numel == 65_536 and source != "fp32":
            values = torch.arange(-32_768, 32_768, dtype=torch.int32).to(torch.int16).view(DTYPES[source])
        yield Case(
            "cast",
            f"{source} to {out}, {numel} elements, off by {shifts}",
            {"in": (values, shifts[0]), "out": (torch.zeros(numel, dtype=DTYPES[out]), shifts[1])},
            lambda run: run.kernels.cast(run.view("in"), run.view("out"), run.stream),
            any_nan=source == "fp16",  # widened by a multiplication
        )


PARTS = {"a": (3, 1029), "b": (1536, 37), "": (1600, 101), "c": (2048, 2003)}  # offset, numel; "": no data
PARTS_NUMEL = 4100


def _parts(run: Run) -> list[Any]:
    return [(run.view(name) if name else None, *place) for name, place in PARTS.items()]


def _part_buffers(dtypes: tuple[str, str, str], shift: int) -> dict[str, tuple[torch.Tensor, int]]:
    named = zip(("a", "b", "c"), dtypes, strict=True)
    return {n: (numbers(PARTS[n][1], DTYPES[d], i, special=True), shift) for i, (n, d) in enumerate(named)}


_MIXES = [*((name,) * 3 for name in DTYPES), ("fp32", "bf16", "fp16")]


def _packs() -> Iterator[Case]:
    for dtypes, out, shift in itertools.product(_MIXES, DTYPES, (0, 1)):
        yield Case(
            "pack",
            f"{'/'.join(dtypes)} to {out}, off by {shift}",
            _part_buffers(dtypes, shift) | {"out": (numbers(PARTS_NUMEL, DTYPES[out], 7), shift)},
            lambda run: run.kernels.pack(_parts(run), run.view("out"), run.stream),
        )


def _folds(large: bool) -> Iterator[Case]:
    settings = itertools.product((1, 2, 3, 9), DTYPES, DTYPES, (False, True))
    sizes = [(1, 0, 0), (1023, 1, 0), (5003, 1, 1), (5003, 0, 3)]
    small = [(*each, *size) for each, size in itertools.product(settings, sizes)]
    big = [(3, "bf16", acc, False, _LARGE, 0, 0) for acc in DTYPES] if large else []
    for sources, dtype, acc, first, numel, shift, acc_shift in small + big:
        names = [f"in{k}" for k in range(sources)]
        buffers = {n: (numbers(numel, DTYPES[dtype], k, special=True), shift) for k, n in enumerate(names)}
        buffers["acc"] = (numbers(numel, DTYPES[acc], 50, special=True), acc_shift)

        def call(run: Run, names: list[str] = names, first: bool = first) -> None:
            run.kernels.fold([run.view(n) for n in names], run.view("acc"), first=first, stream=run.stream)

        name = f"of {sources} {dtype} into {acc}, {numel} elements, off by {shift} and {acc_shift}"
        yield Case("fold_first" if first else "fold", name, buffers, call, {"sources": names, "first": first})


def _fold_parts() -> Iterator[Case]:
    for dtypes, dtype, acc, first, shift in itertools.product(_MIXES, DTYPES, DTYPES, (False, True), (0, 1)):

        def call(run: Run, dtype: str = dtype, first: bool = first) -> None:
            core = _tensor.DTYPES[DTYPES[dtype]]
            run.kernels.fold_parts(_parts(run), core, run.view("acc"), first=first, stream=run.stream)

        yield Case(
            "fold_parts",
            f"{'/'.join(dtypes)} as {dtype} into {acc}, first {first}, off by {shift}",
            _part_buffers(dtypes, shift) | {"acc": (numbers(PARTS_NUMEL, DTYPES[acc], 7, special=True), 0)},
            call,
            {"dtype": DTYPES[dtype], "first": first},
        )


def _scales(large: bool) -> Iterator[Case]:
    sizes = [*itertools.product((1, 37, 5003), (0, 1, 3))] + [(_LARGE, 1)] * large
    for (numel, shift), factor in itertools.product(sizes, (0.0, 0.3, -1e-38)):
        yield Case(
            "scale",
            f"by {factor}, {numel} elements, off by {shift}",
            {"inout": (numbers(numel, torch.float32, 1, special=True), shift)},
            lambda run, factor=factor: run.kernels.scale(run.view("inout"), factor, run.stream),
            {"factor": factor},
        )


def _norms(large: bool) -> Iterator[Case]:
    def measured(run: Run, pieces: list[tuple[int, int, int]]) -> _core.Norm:
        norm = _core.Norm(run.core, pieces, len(PIECES))
        norm.square_sum(run.view("in"), run.stream)
        return norm

    for dtype, kind, shift in itertools.product(DTYPES, ("finite", "NaN", "infinite", "tiny"), (0, 1, 3)):
        values = numbers(FLAT, DTYPES[dtype], 3)
        if kind == "tiny":
            values = values * torch.tensor(2.0**-120 if dtype != "fp16" else 2.0**-14, dtype=DTYPES[dtype])
        elif kind != "finite":
            values[[1500, 4096]] = float("nan" if kind == "NaN" else "-inf")
        buffers = {"in": (values, shift)}
        name = f"of {dtype}, {kind}, off by {shift}"
        yield Case("square_sum", name, buffers, lambda run: measured(run, PIECES).sums(run.stream))
        for max_norm, scaled in itertools.product((0.0, 1.0), (False, True)):
            settings = {"divisor": 6.0, "max_norm": max_norm, "scaled": scaled}

            def call(run: Run, max_norm: float = max_norm, scaled: bool = scaled) -> Any:
                rule = _core.LossScaleRule(
                    dynamic=True,
                    initial_scale=1024.0,
                    window=2,
                    hysteresis=1,
                    consecutive_hysteresis=False,
                    min_scale=1.0,
                )
                return measured(run, PIECES).finish(
                    divisor=6.0,
                    max_norm=max_norm,
                    rule=rule if scaled else None,
                    state=(1024.0, 7, 4, 1),
                    stream=run.stream,
                )

            yield Case("finish_norm", f"{name}, {settings}", buffers, call, settings)
    if large:
        for dtype in DTYPES:
            buffers = {"in": (numbers(_LARGE, DTYPES[dtype], 3), 1)}
            whole = [(0, _LARGE, 0)]
            name = f"of {dtype}, {_LARGE} elements"
            yield Case("square_sum", name, buffers, lambda run, p=whole: measured(run, p).sums(run.stream))


def _updates(large: bool) -> Iterator[Case]:
    models = [None, *DTYPES]
    small = [(grad, model, 0, False) for grad, model in itertools.product(DTYPES, models)]
    small += [("fp32", "bf16", 1, False), ("bf16", "bf16", 3, False), ("fp32", "bf16", 0, True)]
    for kind, (grad, model, shift, skip) in itertools.product(NUM_STATES, small):
        if kind != "muon":
            yield _update(kind, PIECES, USED, FLAT, grad, model, shift, skip)
    if large:
        for kind in ("adam", "momentum", "lion", "adagrad"):
            yield _update(kind, [(0, _LARGE, 0)], [True], _LARGE, "fp32", "bf16", 0, False)


def _update(
    kind: str,
    pieces: list[tuple[int, int, int]],
    used: list[bool],
    numel: int,
    grad: str,
    model: str | None,
    shift: int,
    skip: bool,
) -> Case:
    """Two steps, of which the first may begin the states."""
    groups = OPTIMIZERS[kind]
    hypers = [groups[slot % len(groups)] for slot in range(len(used))]
    buffers = {
        "grad": (numbers(numel, DTYPES[grad], 1), shift),
        "param": (numbers(numel, torch.float32, 2), shift),
    }
    for k in range(NUM_STATES[kind]):
        buffers[f"state{k + 1}"] = (numbers(numel, torch.float32, 3 + k).abs(), shift)
    if model:
        buffers["model"] = (numbers(numel, DTYPES[model], 5), shift)

    def call(run: Run) -> None:
        update = _core.Update(run.core, pieces, [core_hyper(h) for h in hypers])
        run.kept.append(update)
        for _ in range(2):
            update.begin_step(used=used, factor=FACTOR, skip=skip, stream=run.stream)
            update.run(**run.views("grad", "param", "state1", "state2", "model"), stream=run.stream)

    name = f"{grad} gradients, {model or 'no'} copy, {numel} elements, off by {shift}" + ", skipped" * skip
    settings = {"pieces": pieces, "used": used, "hypers": hypers, "skip": skip}
    return Case(kind, name, buffers, call, settings)


def _muons() -> Iterator[Case]:
    """All of a step of Muon: its three kernels."""
    pieces = [(offset, rows * columns, slot) for slot, ((rows, columns), offset) in enumerate(MATRICES.items())]
    numel = 6400
    shapes = [*MATRICES]
    for grad, model, skip in itertools.product(DTYPES, (None, "bf16"), (False, True)):
        groups = OPTIMIZERS["muon"]
        hypers = [groups[slot % len(groups)] for slot in range(len(pieces))]
        used = [True, True, skip]
        buffers = {
            "grad": (numbers(numel, DTYPES[grad], 1), 0),
            "param": (numbers(numel, torch.float32, 2), 0),
            "state1": (numbers(numel, torch.float32, 3), 0),
            "direction": (torch.zeros(numel), 0),
        }
        if model:
            buffers["model"] = (numbers(numel, DTYPES[model], 5), 0)

        def call(run: Run, used: list[bool] = used, skip: bool = skip, hypers: list[Any] = hypers) -> None:
            ratios = [rows / columns for rows, columns in shapes]
            update = _core.Update(run.core, pieces, [core_hyper(h) for h in hypers], ratios)
            run.kept.append(update)
            update.begin_step(used=used, factor=FACTOR, skip=skip, stream=run.stream)
            update.muon_momentum(**run.views("grad", "state1", "direction"), stream=run.stream)
            for (rows, columns), (offset, count, slot) in zip(shapes, pieces, strict=True):
                if used[slot]:
                    matrix = _tensor.view(run.buffers["direction"][offset : offset + count])
                    room = run.empty(_core.orthogonalize_workspace(rows, columns))
                    run.kernels.orthogonalize(matrix, rows, columns, 5, room, run.stream)
            update.run(**run.views("param", "direction", "model"), stream=run.stream)

        name = f"{grad} gradients, {model or 'no'} copy" + ", skipped" * skip
        settings = {"pieces": pieces, "used": used, "hypers": hypers, "skip": skip}
        yield Case("muon", name, buffers, call, settings)


def _orthogonalizations(large: bool) -> Iterator[Case]:
    shapes = [(1, 1), (1, 50), (50, 1), (7, 5), (33, 129), (128, 64)] + [(257, 1031), (512, 512)] * large
    for (rows, columns), shift in itertools.product(shapes, (0, 1)):

        def call(run: Run, rows: int = rows, columns: int = columns) -> None:
            room = run.empty(_core.orthogonalize_workspace(rows, columns))
            run.kernels.orthogonalize(run.view("matrix"), rows, columns, 5, room, run.stream)

        buffers = {"matrix": (numbers(rows * columns, torch.float32, rows), shift)}
        yield Case("orthogonalize", f"{rows} x {columns}, off by {shift}", buffers, call, {"shape": (rows, columns)})
