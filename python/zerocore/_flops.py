"""The flops profiler: parameters, floating-point operations and latency of one forward, by module."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from zerocore._files import named_errors
from zerocore.config import FlopsProfilerConfig


@dataclasses.dataclass
class ModuleCost:
    """Of a module with all that is in it. flops: as torch counts them, a multiplication and an addition each."""

    name: str
    kind: str
    params: int
    flops: int = 0
    seconds: float = 0.0

    @property
    def depth(self) -> int:
        """0 for the model."""
        return self.name.count(".") + 1 if self.name else 0


def measure(model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, list[ModuleCost]]:
    """Calls the model; what it returned, and the cost of each module in order of registration.

    A module that is called several times has the sum. Counting takes time, which is in `seconds`.
    """
    counter = FlopCounterMode(display=False)
    costs = {}
    handles = []
    for name, module in model.named_modules():
        cost = ModuleCost(name, type(module).__name__, sum(p.numel() for p in module.parameters()))
        enter, leave = _hooks(cost, counter)
        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave))
        costs[name] = cost
    try:
        with counter:
            return model(*args, **kwargs), list(costs.values())
    finally:
        for handle in handles:
            handle.remove()


def _hooks(cost: ModuleCost, counter: FlopCounterMode) -> tuple[Callable[..., None], Callable[..., None]]:
    """What to call before and after a module; calls of one module nest where it calls itself."""
    open_calls: list[tuple[int, float]] = []

    def enter(*_: Any) -> None:
        open_calls.append((counter.get_total_flops(), time.perf_counter()))

    def leave(*_: Any) -> None:
        flops, begin = open_calls.pop()
        if not open_calls:
            cost.flops += counter.get_total_flops() - flops
            cost.seconds += time.perf_counter() - begin

    return enter, leave


def report(costs: list[ModuleCost], config: FlopsProfilerConfig, *, step: int, rank: int) -> str:
    """The text, as `config` asks for it."""
    return "\n".join(_lines(costs, config, step, rank)) + "\n"


def write(text: str, config: FlopsProfilerConfig) -> None:
    """Prints it, or writes the file."""
    if config.output_file is None:
        print(text, end="", flush=True)
        return
    with named_errors(Path(config.output_file), area="engine"):
        Path(config.output_file).write_text(text)


def _lines(costs: list[ModuleCost], config: FlopsProfilerConfig, step: int, rank: int) -> Iterator[str]:
    model = costs[0]
    yield f"[flops profiler] step {step}, rank {rank}: the forward of a micro-batch"
    yield f"  parameters              {model.params:,}"
    yield f"  forward, FLOPs          {model.flops:,}"
    yield f"  forward, latency        {model.seconds * 1e3:.3f} ms, with the counting"
    yield f"  forward, FLOPS          {_rate(model):.3f} G/s"
    whole = int(model.flops * (3 + config.recompute_fwd_factor))
    yield f"  forward and backward    {whole:,} FLOPs, taking the backward for two forwards"
    deepest = max(cost.depth for cost in costs)
    limit = deepest if config.module_depth < 0 else min(config.module_depth, deepest)
    yield f"  first {config.top_modules} at each depth:"
    for depth in range(1, limit + 1):
        level = [cost for cost in costs if cost.depth == depth]
        for what in ("params", "flops", "seconds"):
            first = sorted(level, key=lambda cost: getattr(cost, what), reverse=True)[: config.top_modules]
            shown = ", ".join(f"{cost.name} ({cost.kind}) {_shown(cost, what)}" for cost in first)
            yield f"    {depth}: {'latency' if what == 'seconds' else what:<8} {shown}"
    if not config.detailed:
        return
    kept = [cost for cost in costs if cost.depth <= limit]
    names = [f"{'  ' * cost.depth}{cost.name.rpartition('.')[2] or 'model'} ({cost.kind})" for cost in kept]
    width = max(map(len, names))
    yield f"  {'module':<{width}}{'params':>16}{'FLOPs':>20}{'latency ms':>14}{'G/s':>12}"
    for name, cost in zip(names, kept, strict=True):
        yield f"  {name:<{width}}{cost.params:>16,}{cost.flops:>20,}{cost.seconds * 1e3:>14.3f}{_rate(cost):>12.3f}"


def _shown(cost: ModuleCost, what: str) -> str:
    return f"{cost.seconds * 1e3:.3f} ms" if what == "seconds" else f"{getattr(cost, what):,}"


def _rate(cost: ModuleCost) -> float:
    return cost.flops / cost.seconds / 1e9 if cost.seconds else 0.0
