"""Sharded parameters: building models already sharded, and reading and writing parameters that are spread over ranks.

Everything here is collective unless it says otherwise: all ranks call it alike.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any

import torch
from torch.nn.modules import module as _torch_module
from torch.utils.weak import WeakIdKeyDictionary

from zerocore import _comm, _core, _init, _memory, _other_state, _param_specs, _released, _tensor
from zerocore._released import ZeroParamStatus
from zerocore._units import Unit, choose_units
from zerocore.config import Config, _json
from zerocore.errors import ConfigError, Error, UnsupportedError

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "register_external_parameter",
    "unwrap_model_for_generation",
]

_ONE_BY_ONE = "HF_DEACTIVATE_ASYNC_LOAD"

_external: Any = WeakIdKeyDictionary()  # module -> parameters that it uses without holding them


class Init:
    """Modules constructed inside this block are sharded over the ranks as they are constructed.

        with zerocore.zero.Init():
            model = Model()

    On a rank there is never much more than one module whole, beside its part of the others. Initialisers see whole
    tensors and draw the same random numbers as without Init; rank 0's values count. Values are at hand, parameter by
    parameter, while the block is open; after it only in an engine or inside GatheredParameters.

    Hugging Face's from_config() and from_pretrained() work inside; weights are then read and sharded one by one. What
    they build is built in this thread only.

    Args:
        module: an existing model, to be sharded right away.
        config_dict_or_path, config: a configuration, DeepSpeed's or native; with a ZeRO stage below 3 nothing is done.
        enabled: False: nothing is done.
        dtype: what floating-point parameters are rounded to and kept in; None: their own. An engine's fp32 masters
            start from these values.
        comm: a communicator over all ranks of the job; by default the one of the process.
        remote_device, pin_memory, mem_efficient_linear, data_parallel_group, mpu: DeepSpeed's, of which parameters on
            the CPU and one group of ranks leave one value; another is refused, or has no effect (pin_memory,
            mem_efficient_linear).

    Raises:
        UnsupportedError: another device than the CPU, or a group of ranks.
        ConfigError: a block inside another, an engine built inside it, or a module constructed in another thread.
        CommError: ranks construct different modules.
    """

    def __init__(
        self,
        module: torch.nn.Module | None = None,
        config_dict_or_path: Any = None,
        config: Any = None,
        *,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        comm: _core.Communicator | None = None,
        remote_device: str | None = None,
        pin_memory: bool = False,
        mem_efficient_linear: bool = True,
        data_parallel_group: Any = None,
        mpu: Any = None,
    ) -> None:
        for name, got, allowed in (
            ("remote_device", remote_device, (None, "none", "cpu")),
            ("data_parallel_group", data_parallel_group, (None,)),
            ("mpu", mpu, (None,)),
        ):
            if got not in allowed:
                raise UnsupportedError(
                    f"[zero] Init: {name}: got {got!r}, expected None: parameters are sharded over all ranks, on the "
                    "CPU. Leave it out."
                )
        given = config if config is not None else config_dict_or_path
        self._enabled = enabled and (given is None or _stage(given) == 3)
        self._dtype = dtype
        self._comm = comm
        self._shards: _init.InitShards | None = None
        self._handles: list[Any] = []
        self._direct = _memory.direct_allocations()
        if module is not None and self._enabled:
            shards = self._make_shards()
            for owner in module.modules():
                for name, param in owner.named_parameters(recurse=False):
                    shards.new_param(owner, name, param)
            shards.shard_all()

    def _make_shards(self) -> _init.InitShards:
        world = self._comm if self._comm is not None else _comm.world()
        return _init.InitShards(_core.shard_group(world), self._dtype)

    def __enter__(self) -> Init:
        if not self._enabled:
            return self
        if _init.open_inits:
            raise ConfigError(
                "[zero] Init inside another Init: expected one block at a time. Leave the outer one first."
            )
        shards = self._shards = self._make_shards()
        shards.is_open = True

        def on_parameter(module: torch.nn.Module, name: str, param: Any) -> None:
            if isinstance(param, torch.nn.Parameter):
                shards.new_param(module, name, param)

        def on_module(module: torch.nn.Module, name: str, child: Any) -> None:
            shards.shard_all(but_of=module)

        self._handles = [
            _torch_module.register_module_parameter_registration_hook(on_parameter),
            _torch_module.register_module_module_registration_hook(on_module),
        ]
        # Else Hugging Face's threads read files ahead without a bound.
        self._reads_ahead = _ONE_BY_ONE not in os.environ
        os.environ.setdefault(_ONE_BY_ONE, "1")
        _init.open_inits.append(self)
        self._direct.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shards is None:
            return
        for handle in self._handles:
            handle.remove()
        self._direct.__exit__(None, None, None)
        if self._reads_ahead:
            os.environ.pop(_ONE_BY_ONE, None)
        _init.open_inits.remove(self)
        self._shards.is_open = False
        if kind is None:  # else other ranks may be elsewhere
            self._shards.shard_all()
        self._shards = None


def _stage(config: Any) -> int:
    """The ZeRO stage of a configuration, of which other parts may still be "auto"."""
    if isinstance(config, Config):
        return config.zero.stage
    raw, _ = _json.read(config)
    part = {key: value for key, value in raw.items() if key == "zero_optimization"}
    return Config.from_deepspeed(part, warn=False).zero.stage


class GatheredParameters:
    """Inside this block parameters are whole on every rank.

        with zerocore.zero.GatheredParameters(model.head.weight, modifier_rank=0):
            if rank == 0:
                torch.nn.init.zeros_(model.head.weight)

    Parameters that are whole anyway are taken as they are.

    Args:
        params: parameters, or one; or a module, for all of its own.
        modifier_rank: the rank whose changes all ranks take over when the block ends. None: nobody may change anything.
        fwd_module: a module whose forward uses the parameters: each is given to register_external_parameter() with it.
        enabled: False: nothing is done.

    Raises:
        ConfigError: ranks name different parameters.
        Error: a parameter was changed without a modifier_rank, or on other ranks than that one.
    """

    def __init__(
        self,
        params: torch.nn.Parameter | Iterable[torch.nn.Parameter] | torch.nn.Module,
        modifier_rank: int | None = None,
        fwd_module: torch.nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        if isinstance(params, torch.nn.Module):
            params = params.parameters()
        listed: list[Any] = [params] if isinstance(params, torch.Tensor) else list(params)
        self._params = list({id(p): p for p in listed}.values()) if enabled else []
        self._modifier_rank = modifier_rank
        if fwd_module is not None:
            for param in self._params:
                register_external_parameter(fwd_module, param)

    def __enter__(self) -> GatheredParameters:
        self._keepers = {id(p): _keeper(p) for p in self._params}
        self._params = [p for p in self._params if self._keepers[id(p)] is not None]
        if not self._params:
            return self
        self._comm = self._keepers[id(self._params[0])].comm
        self._compare()
        for param in self._params:
            home = _released.home_of(param)
            if home is not None:
                home.hold_param(param)
        self._versions = [p._version for p in self._params]
        self._before = self._digests()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._params:
            return
        failed = True
        try:
            if kind is None:
                self._take_over()
                failed = False
        finally:
            # A block that failed has told its error: that its changes are lost needs no other.
            with contextlib.suppress(*[Error] * failed), contextlib.ExitStack() as drops:
                for param in reversed(self._params):
                    home = _released.home_of(param)
                    if home is not None:
                        drops.callback(home.drop_param, param)

    def _compare(self) -> None:
        names = [self._keepers[id(p)].name_of(p) for p in self._params]
        text = f"{names}, modifier_rank={self._modifier_rank}"
        if self._comm.size == 1:
            return
        digests = self._comm.gather_bytes(hashlib.sha256(text.encode()).digest(), "gather parameters")
        if len(set(digests)) > 1:
            raise ConfigError(
                f"[zero] GatheredParameters: ranks name different parameters: got {len(names)} here on rank "
                f"{self._comm.rank} (first {names[0]}, modifier_rank={self._modifier_rank}), expected the same list "
                "and modifier_rank on every rank."
            )

    def _digests(self) -> list[int]:
        """Of the parameters, where changes are wanted: those through `.data` do not show in torch's versions.

        Note: so a block with a modifier_rank reads what it has gathered twice more, on each rank.
        """
        return [0 if self._modifier_rank is None else _tensor.digest(p) for p in self._params]

    def _take_over(self) -> None:
        """Gives all ranks what the modifier rank has changed."""
        now = zip(self._params, self._digests(), strict=True)
        before = zip(self._versions, self._before, strict=True)
        here = bytes((p._version, digest) != then for (p, digest), then in zip(now, before, strict=True))
        root = self._modifier_rank
        if root is None:
            if any(here):
                name = self._name_of_first(here)
                raise Error(
                    f"[zero] GatheredParameters: parameter {name} was changed: got no modifier_rank, expected one, "
                    "else the change is lost. Give modifier_rank=0, or change nothing."
                )
            return
        by_rank = self._comm.gather_bytes(here, "changed parameters")
        changed = by_rank[root]
        elsewhere = bytes(any(flags) and not kept for *flags, kept in zip(*by_rank, changed, strict=True))
        if any(elsewhere):
            raise Error(
                f"[zero] GatheredParameters: parameter {self._name_of_first(elsewhere)} was changed on a rank other "
                f"than modifier_rank={root}, where it was not: that change would be lost. Change it on rank {root}."
            )
        for param, was_changed in zip(self._params, changed, strict=True):
            if was_changed:
                _other_state.broadcast([param], self._comm, "changed parameter", root=root)
                owner = _param_specs.owner_of(param)
                if owner is not None:
                    owner.load(param, param.detach())

    def _name_of_first(self, flags: bytes) -> str:
        param = self._params[flags.index(1)]
        return str(self._keepers[id(param)].name_of(param))


@contextlib.contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[torch.nn.Module]:
    """A block in which an engine's model is whole on every rank, so that generating gathers nothing. Collective.

    It takes the memory of all parameters; ranks may then generate unequal numbers of tokens.

    Args:
        model: the engine.

    Returns:
        The engine's module.
    """
    with GatheredParameters(model.module):
        yield model.module


def _keeper(param: torch.nn.Parameter) -> Any:
    """Who keeps a parameter's values, and its name: an engine's parameters or Init's shards; None for a plain one."""
    return _param_specs.owner_of(param) or _released.home_of(param)


def register_external_parameter(module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
    """Says that `module` uses a parameter that another module holds, so that both find it gathered. Local.

    Call it before the engine is built, on every rank.
    """
    _external.setdefault(module, []).append(parameter)


def units_of(model: torch.nn.Module, config: Config) -> list[Unit]:
    """The modules whose parameters are gathered together, where the config has a use for them."""
    casts = config.precision.compute_dtype not in (None, config.precision.dtype)
    if config.zero.stage < 3 and not casts and not config.activation_checkpointing.enabled:
        return []
    return choose_units(
        model,
        min_numel=config.zero.unit_numel,
        classes=config.zero.unit_classes,
        names=config.zero.unit_names,
        external=external_parameters(model),
    )


def external_parameters(model: torch.nn.Module) -> Mapping[torch.nn.Module, list[torch.nn.Parameter]]:
    """What was registered for the modules of a model."""
    return {module: _external[module] for module in model.modules() if module in _external}
