"""Activation checkpointing: a forward keeps its inputs only, and is run again in backward for what else it needs.

    hidden = zerocore.checkpointing.checkpoint(block, hidden, mask)

The `activation_checkpointing` section of the configuration does so for every unit of a model, without a change to it.

On top of torch.utils.checkpoint, with the same random numbers in both runs. Added to that: tensors in keyword
arguments, tuples, lists and dicts are inputs as any; in reentrant mode too they get gradients, results may be of any
structure, and no input need require a gradient; inputs may wait in host memory; batch statistics are counted once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint as _torch_checkpoint

from zerocore._launch import rank_of
from zerocore._units import Unit, original
from zerocore.config import ActivationCheckpointingConfig, Config, as_config
from zerocore.errors import UnsupportedError

__all__ = ["checkpoint", "configure", "is_configured", "is_recomputing", "reset"]

logger = logging.getLogger("zerocore")

_settings: ActivationCheckpointingConfig | None = None  # what configure() set
_told: set[str] = set()
_state = threading.local()  # backward of other devices runs in torch's threads

# Layers that keep nothing but their inputs for backward anyway.
_KEEP_INPUTS_ONLY = (nn.Linear, nn.Embedding)


def checkpoint(fn: Callable[..., Any], *args: Any, use_reentrant: bool | None = None, **kwargs: Any) -> Any:
    """Calls `fn(*args, **kwargs)`; in backward it is called again, with the same random numbers of torch.

    Without gradients, and for a module in evaluation, it is a plain call.

    Args:
        fn: a module or function that gives the same result for the same arguments and random numbers, and changes no
            state that it reads.
        args, kwargs: anything. The tensors among them, also in tuples, lists and dicts, are kept until backward.
        use_reentrant: True runs a backward of its own within backward, which takes a whole `loss.backward()`: no
            torch.autograd.grad(), no `inputs=`. Where an input is used several times, in `fn` and outside, sums of its
            gradient may round differently. None: what configure() set, at first False.

    Returns:
        What `fn` returns.
    """
    if not torch.is_grad_enabled() or (isinstance(fn, nn.Module) and not fn.training):
        return fn(*args, **kwargs)
    settings = _settings or ActivationCheckpointingConfig()
    if use_reentrant is not None:
        settings = dataclasses.replace(settings, reentrant=use_reentrant)
    module = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
    return _checkpoint(fn, args, kwargs, module=module, settings=settings)


def configure(
    mpu_: Any = None,
    deepspeed_config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Sets what `checkpoint()` does in this process; names and order are DeepSpeed's.

    Args:
        mpu_: None, or an object whose get_model_parallel_world_size() is 1.
        deepspeed_config: a configuration whose section `activation_checkpointing` counts, where an argument is None.
        partition_activations: shards saved inputs over the model-parallel group; of one rank there is nothing to shard.
        checkpoint_in_cpu: keeps saved inputs in host memory, copied there while the forward goes on.
        contiguous_checkpointing, num_checkpoints, synchronize, profile: no effect; a warning says so.

    Raises:
        ConfigError: a value or the configuration is wrong.
        UnsupportedError: model parallelism.
    """
    global _settings
    degree = 1 if mpu_ is None else mpu_.get_model_parallel_world_size()
    if degree != 1:
        raise UnsupportedError(
            f"[checkpointing] mpu_: got a model-parallel group of {degree} ranks, expected 1. Model parallelism is not "
            "available in this version."
        )
    settings = ActivationCheckpointingConfig()
    if deepspeed_config is not None:
        settings = as_config(deepspeed_config).activation_checkpointing
    given = {"partition_activations": partition_activations, "cpu_checkpointing": checkpoint_in_cpu}
    _settings = dataclasses.replace(settings, **{name: value for name, value in given.items() if value is not None})
    _tell_of_partitioning(_settings)
    for name, value in (
        ("contiguous_checkpointing", contiguous_checkpointing),
        ("num_checkpoints", num_checkpoints),
        ("synchronize", synchronize),
        ("profile", profile),
    ):
        if value:
            _warn_once(f"[checkpointing] configure: {name}={value!r} has no effect here and can be left out.")


def is_configured() -> bool:
    """Whether configure() was called."""
    return _settings is not None


def reset() -> None:
    """Does nothing: there are no buffers that a forward without a backward would have left full."""


def is_recomputing() -> bool:
    """Whether the calling code runs as part of a recomputation in backward."""
    return getattr(_state, "depth", 0) > 0


def apply(units: Sequence[Unit], config: ActivationCheckpointingConfig) -> Callable[[], None]:
    """Checkpoints the forwards of units, while they train: each is recomputed in backward from its inputs.

    The root stays as it is, since all its inputs are the model's, and so do layers that keep only their inputs anyway.
    A unit's `forward` is replaced on the module object: hooks run around it once, and not in the recomputation, but
    those of the modules in it do.

    Args:
        units: of _units.choose_units.
        config: how; `enabled` is not looked at.

    Returns:
        A function that puts the forwards back. Idempotent.
    """
    _tell_of_partitioning(config)
    wraps = [
        _Checkpointed(unit.module, config)
        for unit in units
        if unit.parent is not None and not isinstance(original(unit.module), _KEEP_INPUTS_ONLY)
    ]
    for wrap in wraps:
        wrap.install()
    if not wraps:
        _warn_once(
            "[checkpointing] activation_checkpointing is enabled but the model has no unit to recompute: got none "
            "among its modules but for the root and single layers. Lower zero.unit_numel, or name modules in "
            "zero.unit_classes or zero.unit_names."
        )

    def undo() -> None:
        for wrap in reversed(wraps):
            wrap.remove()

    return undo


class _Checkpointed:
    """Stands for the forward of a module, and checkpoints it when the module trains."""

    def __init__(self, module: nn.Module, settings: ActivationCheckpointingConfig) -> None:
        self._module = module
        self._forward = module.forward
        self.__wrapped__ = self._forward  # its signature is the original's
        self._own = "forward" in module.__dict__  # not the class's: a compiled module, or one patched before
        self._settings = settings
        self._active = False

    def install(self) -> None:
        self._active = True
        self._module.forward = self

    def remove(self) -> None:
        """Where another has been put over this one meanwhile, it stays, and calls straight through."""
        if self._active and self._module.__dict__.get("forward") is self:
            if self._own:
                self._module.forward = self._forward
            else:
                del self._module.forward
        self._active = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self._active and self._module.training and torch.is_grad_enabled()):
            return self._forward(*args, **kwargs)
        return _checkpoint(self._forward, args, kwargs, module=self._module, settings=self._settings)


def _checkpoint(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    module: Any,
    settings: ActivationCheckpointingConfig,
) -> Any:
    args, kwargs = _without_caches(args, kwargs)
    tensors, rebuild = _split((args, kwargs))
    calls = 0

    def run(*given: torch.Tensor) -> Any:
        nonlocal calls
        calls += 1
        inputs, keywords = rebuild(given)
        with _recomputation(module) if calls > 1 else contextlib.nullcontext():
            return fn(*inputs, **keywords)

    with _kept_on_host(tensors) if settings.cpu_checkpointing else contextlib.nullcontext():
        if settings.reentrant:
            return _reentrant(run, tensors)
        return _torch_checkpoint(run, *tensors, use_reentrant=False)


def _without_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments without Hugging Face's key-value caches, into which the recomputation would write a second time."""
    module = sys.modules.get("transformers.cache_utils")
    cls = getattr(module, "Cache", ())
    caches = [each for each in (*args, *kwargs.values()) if isinstance(each, cls)]
    if not caches:
        return args, kwargs
    for cache in caches:
        with contextlib.suppress(ValueError):  # of a model without attention
            if cache.get_seq_length() > 0:
                raise UnsupportedError(
                    f"[checkpointing] a checkpointed forward was given a key-value cache: got a {type(cache).__name__} "
                    f"of {cache.get_seq_length()} tokens, expected none or an empty one, since recomputation would "
                    "write into it again. Train without it, or with activation checkpointing off."
                )
    _warn_once(
        "[checkpointing] use_cache: key-value caches are left empty while activations are checkpointed, since "
        "recomputation would write into them again. Pass use_cache=False to the model in training."
    )
    if "use_cache" in kwargs:
        kwargs = kwargs | {"use_cache": False}
    args = tuple(None if isinstance(each, cls) else each for each in args)
    return args, {name: None if isinstance(each, cls) else each for name, each in kwargs.items()}


def _reentrant(run: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Any:
    """Reentrant mode in torch takes and returns tensors only, and needs an input and a result with a gradient.

    The anchor is both, whatever the function's own are: a first layer, or frozen ones.
    """
    rebuilds: list[Callable[[Sequence[torch.Tensor]], Any]] = []

    def flat(anchor: torch.Tensor, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results, rebuild = _split(run(*given) if torch.is_grad_enabled() else _on_a_dropped_graph(run, given))
        rebuilds[:] = [rebuild]
        return (*results, anchor.clone())

    anchor = torch.empty(0, requires_grad=True)
    results = _torch_checkpoint(flat, anchor, *tensors, use_reentrant=True)
    return rebuilds[0](results[:-1])


def _on_a_dropped_graph(run: Callable[..., Any], given: Sequence[torch.Tensor]) -> Any:
    """Calls as the recomputation will, with gradients: some kernels, LSTM's for one, round differently without.

    Nothing is saved for the graph.
    """

    def refuse(_: None) -> torch.Tensor:
        raise UnsupportedError(
            "[checkpointing] gradients were taken inside a checkpointed function: got reentrant mode, expected the "
            "other. Pass use_reentrant=False, or set activation_checkpointing.reentrant to false."
        )

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda _: None, refuse):
        results = run(*(each.detach().requires_grad_(each.requires_grad) for each in given))
    tensors, rebuild = _split(results)
    return rebuild([each.detach() for each in tensors])


def _split(tree: Any) -> tuple[list[torch.Tensor], Callable[[Sequence[torch.Tensor]], Any]]:
    """The tensors in nested containers, and a function that puts others in their places; it keeps none alive."""
    leaves, structure = tree_flatten(tree)
    is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
    others = [None if tensor else leaf for leaf, tensor in zip(leaves, is_tensor, strict=True)]
    tensors = [leaf for leaf, tensor in zip(leaves, is_tensor, strict=True) if tensor]

    def rebuild(given: Sequence[torch.Tensor]) -> Any:
        rest = iter(given)
        return tree_unflatten(
            [next(rest) if tensor else other for other, tensor in zip(others, is_tensor, strict=True)], structure
        )

    return tensors, rebuild


@contextlib.contextmanager
def _recomputation(module: Any) -> Iterator[None]:
    """Within this block is_recomputing() is true, and running statistics in `module` are copies, to be dropped."""
    norms = [each for each in module.modules() if isinstance(each, _NormBase)] if isinstance(module, nn.Module) else []
    kept = [(norm, dict(norm._buffers)) for norm in norms]
    for norm, buffers in kept:
        norm._buffers.update({name: None if each is None else each.clone() for name, each in buffers.items()})
    _state.depth = getattr(_state, "depth", 0) + 1
    try:
        yield
    finally:
        _state.depth -= 1
        for norm, buffers in kept:
            norm._buffers.update(buffers)


# Saved inputs in host memory


def _kept_on_host(tensors: Sequence[torch.Tensor]) -> contextlib.AbstractContextManager[Any]:
    """Inputs saved in this block wait in host memory. Those that lie there are saved as ever, without a copy."""
    if all(_on_host(tensor) for tensor in tensors):
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_to_host, _from_host)


def _on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type in ("cpu", "meta")


@functools.cache
def _copy_stream(device: torch.device) -> Any:
    return torch.get_device_module(device).Stream(device=device)


def _to_host(tensor: torch.Tensor) -> Any:
    """Starts the copy, on a stream of its own behind what computes the tensor; the forward goes on meanwhile."""
    if _on_host(tensor):
        return tensor
    source = tensor.detach()
    module, copies = torch.get_device_module(source.device), _copy_stream(source.device)
    host = torch.empty_like(source, device="cpu", pin_memory=torch.accelerator.is_available())
    copies.wait_stream(module.current_stream(source.device))
    with module.stream(copies):
        host.copy_(source, non_blocking=True)
    source.record_stream(copies)  # its memory is not handed out before the copy is made
    return host, source.device, copies.record_event()


def _from_host(kept: Any) -> torch.Tensor:
    if isinstance(kept, torch.Tensor):
        return kept
    host, device, copied = kept
    torch.get_device_module(device).current_stream(device).wait_event(copied)
    restored: torch.Tensor = host.to(device, non_blocking=True)
    return restored


# What is told


def _tell_of_partitioning(settings: ActivationCheckpointingConfig) -> None:
    if settings.partition_activations:
        _warn_once(
            "[checkpointing] partition_activations: there is nothing to partition, since the model-parallel group has "
            "one rank. Every rank keeps the inputs of its own micro-batch."
        )


def _warn_once(message: str) -> None:
    if message not in _told and rank_of(os.environ) == 0:
        logger.warning("%s", message)
    _told.add(message)
