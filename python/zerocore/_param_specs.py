"""What the core is told of an engine's parameters: how it keeps them, in which groups, units and dtypes."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from zerocore import _core, _muon, _released, _tensor
from zerocore._optimizer import Optimizer
from zerocore._units import Unit
from zerocore.config import PrecisionConfig, ResolvedConfig, ZeroConfig
from zerocore.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from zerocore._params import ModelParams

logger = logging.getLogger("zerocore")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NUM_GRAD_BUFFERS = 2  # one is filled while the other is in flight


class ParamsForCore(_released.NotPickled):
    """The parameters that the core holds: the optimizer's, and in stage 3 the frozen ones too; and how it keeps them.

    They are numbered in the model's registration order. Makes no use of their values, which may be on the meta device.

    Args:
        units: of the model, every parameter in one; for stage 3 and for a dtype of computation of its own.

    Attributes:
        core_arguments: of _core.StepEngine, but for the communicator.

    Raises:
        ConfigError: a parameter of the optimizer is not the model's, stands in two groups, or is another engine's.
        UnsupportedError: a dtype without code here.
    """

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer, config: ResolvedConfig, units: list[Unit]) -> None:
        self._optimizer = optimizer
        group_of = _groups(optimizer)
        trained = [(name, p) for name, p in model.named_parameters() if id(p) in group_of]
        _check(model, trained, group_of, config, foreign=optimizer.foreign)
        precision = config.precision
        self._dtype = DTYPES[precision.dtype]
        self._compute_dtype = DTYPES[precision.compute_dtype or precision.dtype]
        shards = config.zero.stage == 3
        named = [
            (n, p) for n, p in model.named_parameters() if id(p) in group_of or (shards and p.dtype in _tensor.DTYPES)
        ]
        self.names = [name for name, _ in named]
        self.params = [p for _, p in named]
        self._index_of = {id(p): index for index, p in enumerate(self.params)}
        self._is_trained = [id(p) in group_of for p in self.params]
        self._groups = [group_of.get(id(p)) for p in self.params]
        self._kept, self._used = zip(*map(self._dtypes, self.params), strict=True)
        sharded = _sharded(self.params, config.zero) if shards else set()
        casts = {id(p) for p, kept, used in zip(self.params, self._kept, self._used, strict=True) if kept != used}
        gathered = sharded | casts
        units = units if gathered else []
        unit_of = {id(p): index for index, unit in enumerate(units) for p in unit.params if id(p) in gathered}
        specs = []
        for (name, param), kept, used in zip(named, self._kept, self._used, strict=True):
            group = group_of.get(id(param))
            is_matrix = group is not None and optimizer.param_groups[group].get("use_muon", False)
            rows, rows_by_columns = _muon.as_matrix(param, name) if is_matrix else (0, 0.0)
            specs.append(
                _core.ParamSpec(
                    name=name,
                    numel=param.numel(),
                    dtype=_tensor.DTYPES[kept],
                    group=group or 0,
                    unit=unit_of.get(id(param), -1),
                    compute_dtype=_tensor.DTYPES[used],
                    sharded=id(param) in sharded,
                    trainable=id(param) in group_of,
                    rows=rows,
                    rows_by_columns=rows_by_columns,
                )
            )
        reduce_dtype = DTYPES[precision.reduce_dtype] if precision.reduce_dtype else self._compute_dtype
        self.core_arguments: dict[str, Any] = {
            "params": specs,
            "groups": optimizer.hypers(),
            "stage": config.zero.stage,
            "bucket_numel": config.zero.bucket_numel,
            "num_grad_buffers": _NUM_GRAD_BUFFERS,
            "reduce_dtype": _tensor.DTYPES[reduce_dtype],
            "accumulate_dtype": _tensor.DTYPES[DTYPES[precision.accumulate_dtype]],
            "share_parameters": config.zero.share_parameters,
            "units": [
                (unit.name or type(model).__name__, -1 if unit.parent is None else unit.parent) for unit in units
            ],
            "max_live_numel": config.zero.max_live_numel,
            "max_reuse_numel": config.zero.max_reuse_numel,
            "prefetch_numel": config.zero.prefetch_numel,
            "loss_scale": _loss_scale_rule(precision) if self._compute_dtype == torch.float16 else None,
        }
        self._units = units
        self._unit_of = unit_of
        self._gathered = gathered

    def _dtypes(self, param: torch.nn.Parameter) -> tuple[torch.dtype, torch.dtype]:
        """In which dtype a parameter is kept, and in which it is used."""
        if self._dtype == self._compute_dtype == torch.float32:
            return param.dtype, param.dtype  # frozen ones may have their own
        narrows = self._compute_dtype.itemsize < self._dtype.itemsize
        if narrows and not param.requires_grad:
            return self._compute_dtype, self._compute_dtype  # nothing needs the other bits
        return self._dtype, self._compute_dtype


def owner_of(param: torch.Tensor) -> ModelParams | None:
    """The parameters of the open engine that a parameter belongs to."""
    owner: ModelParams | None = getattr(param, "_zc_owner", None)
    return None if owner is None or owner.closed else owner


def _sharded(params: list[torch.nn.Parameter], zero: ZeroConfig) -> set[int]:
    """Which parameters stage 3 shards: all but the small ones, as long as these are few enough in all."""
    room = zero.persistent_total_numel
    sharded = set()
    for param in params:
        small = param.numel() <= zero.persistent_param_numel or param.numel() == 0
        if small and (room is None or param.numel() <= room):
            room = None if room is None else room - param.numel()
        else:
            sharded.add(id(param))
    return sharded


def _groups(optimizer: Optimizer) -> dict[int, int]:
    group_of: dict[int, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if param.requires_grad:
                group_of[id(param)] = index
    return group_of


def _check(
    model: torch.nn.Module, named: list[Any], group_of: dict[int, int], config: ResolvedConfig, *, foreign: bool
) -> None:
    for name, param in model.named_parameters():
        if owner_of(param) is not None:
            raise ConfigError(
                f"[engine] parameter {name} belongs to another engine: got a model that was wrapped before, expected "
                "one engine a model. Call close() on the other engine first."
            )
    if len(named) != len(group_of):
        raise ConfigError(
            f"[engine] the optimizer holds {len(group_of)} trainable parameters, {len(named)} of them the model's: "
            f"expected all. Build the "
            "optimizer over the parameters of the model that the engine gets."
        )
    if foreign and config.precision.accumulate_dtype != "fp32":
        raise UnsupportedError(
            f"[optimizer] precision.accumulate_dtype: got {config.precision.accumulate_dtype} with an optimizer that "
            "has no native twin, expected fp32, which torch's code needs. Set it to fp32."
        )
    if not named:
        raise ConfigError(
            "[engine] no trainable parameter: the optimizer's parameters are all frozen. Set requires_grad=True."
        )
    for name, param in named:
        if param.dtype not in _tensor.DTYPES:
            raise UnsupportedError(
                f"[engine] parameter {name} is {param.dtype}: expected fp32, fp16 or bf16. Convert the model, e.g. "
                f"model.float()."
            )
        if config.precision.dtype == "fp32" and param.dtype != torch.float32:
            raise ConfigError(
                f"[engine] parameter {name} is {param.dtype} but the config trains in fp32. Enable bf16 or fp16 in "
                f"the config, or call model.float()."
            )
    left_out = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in group_of]
    if left_out:
        logger.warning(
            "[engine] %d parameters require a gradient but stand in no optimizer group (first %s): they are not "
            "trained.",
            len(left_out),
            left_out[0],
        )


def _loss_scale_rule(precision: PrecisionConfig) -> _core.LossScaleRule:
    rule = precision.loss_scale
    return _core.LossScaleRule(
        dynamic=rule.static_scale is None,
        initial_scale=2.0**rule.initial_scale_power if rule.static_scale is None else rule.static_scale,
        window=rule.window,
        hysteresis=rule.hysteresis,
        consecutive_hysteresis=rule.consecutive_hysteresis,
        min_scale=rule.min_scale,
    )
