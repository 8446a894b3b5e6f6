"""What `engine.optimizer` is: torch-like parameter groups over the core's optimizers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch

from zerocore import _core, _foreign, _muon
from zerocore.config import OptimizerConfig
from zerocore.config._sections import OPTIMIZER_KEYS
from zerocore.errors import ConfigError, UnsupportedError
from zerocore.ops.lion import FusedLion

logger = logging.getLogger("zerocore")

_TORCH_TYPES = {
    torch.optim.AdamW: "adamw",
    torch.optim.Adam: "adam",
    torch.optim.SGD: "sgd",
    torch.optim.Adagrad: "adagrad",
    FusedLion: "lion",
}
_FLAGS = ("amsgrad", "maximize", "differentiable")  # of torch's optimizers: what the twins cannot do
_STATE_NAMES = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "adam": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
    "lion": ("exp_avg",),
    "adagrad": ("sum",),
}
_MUON_STATE_NAMES = ("momentum_buffer",)


class Optimizer(torch.optim.Optimizer):
    """Parameter groups whose hyperparameters the engine reads at each step. State lives in the core, as shards.

    Attributes:
        type: as in OptimizerConfig; of one that has no native twin, its class.
        source: the torch optimizer that this stands for, if there is one; schedulers may hold that one.
        foreign: the source has no native twin: its code runs on the shards.
        param_groups: as in torch.optim; `lr`, `weight_decay` and the like may be changed between steps.
        overflow: whether the last step was skipped, since gradients were not finite.
        loss_scale: as the next step will use it.
        has_gradients: there are some that no step has used yet.
    """

    overflow = False
    loss_scale = 1.0
    _built = False
    _told_kept = False

    def __init__(
        self,
        params: Iterable[Any],
        *,
        type: str,
        defaults: dict[str, Any],
        source: torch.optim.Optimizer | None = None,
        foreign: bool = False,
    ) -> None:
        self.type = type
        self.source = source
        self.foreign = foreign
        self.has_gradients = False
        super().__init__(params, defaults)
        self._built = True

    @property
    def cur_scale(self) -> float:
        return self.loss_scale

    def state_names(self, group: int) -> tuple[str, ...]:
        """The names in torch of the states that the core keeps for each parameter of a group, in its order."""
        if self.foreign:
            return ()
        if self.type == "sgd" and not any(each["momentum"] for each in self.param_groups):
            return ()
        if self.type == "muon":
            return _MUON_STATE_NAMES if self.param_groups[group]["use_muon"] else _STATE_NAMES["adamw"]
        return _STATE_NAMES[self.type]

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Raises UnsupportedError: gradients and state are sharded, so only the engine can step."""
        raise UnsupportedError(
            "[optimizer] step: got a call, expected none: gradients and state are sharded over ranks. Call "
            "engine.step(), which steps the optimizer."
        )

    def state_dict(self) -> dict[str, Any]:
        """Raises UnsupportedError: the state is sharded in the core."""
        raise UnsupportedError(
            "[optimizer] state_dict: got a call, expected none: the state is sharded over ranks. Call "
            "engine.save_checkpoint(), or zerocore.utils.safe_get_full_optimizer_state() for one parameter's."
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises UnsupportedError: the state is sharded in the core."""
        raise UnsupportedError(
            "[optimizer] load_state_dict: got a call, expected none: the state is sharded over ranks. Call "
            "engine.load_checkpoint(), or zerocore.utils.safe_set_full_optimizer_state() for one parameter's."
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises ConfigError: the core has its groups."""
        if self._built:
            raise ConfigError(
                "[optimizer] add_param_group: got a call after the engine was built, expected all groups before. Build "
                "a new engine to add groups."
            )
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: `engine.step()` starts from zero, `engine.zero_grad()` drops what is pending."""
        if self.has_gradients and not self._told_kept:
            self._told_kept = True
            logger.warning(
                "[optimizer] zero_grad: got a call with gradients that no step has used yet: they are kept. Call "
                "engine.zero_grad() to drop them."
            )

    def hypers(self) -> list[Any]:
        """The groups' hyperparameters for the core, in group order.

        Raises:
            UnsupportedError: a group asks for what the native twin cannot do.
        """
        if self.foreign:
            return [_core.ForeignHyper() for _ in self.param_groups]
        for flag in _FLAGS:
            if any(group.get(flag) for group in self.param_groups):
                raise UnsupportedError(
                    f"[optimizer] {self.type}: got {flag}=True, expected False: the native optimizer has none."
                )
        return [self._hyper(group) for group in self.param_groups]

    def _hyper(self, group: dict[str, Any]) -> Any:
        lr, weight_decay = float(group["lr"]), group["weight_decay"]
        if self.type == "muon" and group["use_muon"]:
            return _core.MuonHyper(
                lr=lr,
                momentum=group["momentum"],
                weight_decay=weight_decay,
                nesterov=group["nesterov"],
                iterations=group["ns_steps"],
            )
        if self.type == "sgd":
            return _core.SgdHyper(
                lr=lr,
                momentum=group["momentum"],
                dampening=group["dampening"],
                weight_decay=weight_decay,
                nesterov=group["nesterov"],
            )
        if self.type == "adagrad":
            return _core.AdagradHyper(
                lr=lr,
                lr_decay=group["lr_decay"],
                eps=group["eps"],
                weight_decay=weight_decay,
                initial_accumulator=group["initial_accumulator_value"],
            )
        beta1, beta2 = map(float, group["betas"])
        if self.type == "lion":
            return _core.LionHyper(lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay)
        return _core.AdamHyper(
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=weight_decay,
            decoupled_weight_decay=group.get("decoupled_weight_decay", self.type in ("adamw", "muon")),
            bias_correction=group.get("bias_correction", True),
        )


def plain_settings(group: dict[str, Any]) -> dict[str, Any]:
    """What is plain in a parameter group; a learning rate in a tensor becomes a number."""
    plain = {key: value for key, value in group.items() if isinstance(value, (bool, int, float, tuple, list, str))}
    return {key: value for key, value in plain.items() if key != "params"} | {"lr": float(group["lr"])}


def from_config(config: OptimizerConfig, params: Iterable[Any], model: torch.nn.Module) -> Optimizer:
    """An optimizer over parameters of a model or parameter groups (dicts, as torch.optim takes them)."""
    if config.type == "muon":
        return Optimizer(_muon.groups(config, params, model), type="muon", defaults={})
    defaults = {name: getattr(config, name) for name in ("lr", "weight_decay", *OPTIMIZER_KEYS[config.type])}
    return Optimizer(params, type=config.type, defaults=defaults)


def from_torch(source: torch.optim.Optimizer, *, allow_untested: bool = False) -> Optimizer:
    """The native twin of a torch optimizer; where there is none and `allow_untested`, what runs it on shards.

    It shares the source's group dicts, so that schedulers built on the source are seen.

    Raises:
        UnsupportedError: a class without a twin, a feature the twin lacks, or an optimizer that already holds state.
    """
    kind = _TORCH_TYPES.get(source.__class__)
    name = f"{source.__class__.__module__}.{source.__class__.__qualname__}"
    foreign = kind is None
    if kind is None:
        twins = ", ".join(each.__name__ for each in _TORCH_TYPES)
        if not allow_untested:
            raise UnsupportedError(
                f"[optimizer] got {name}, expected one of torch.optim that has a native twin, or that of ops.lion: "
                f"{twins}. Subclasses are not taken for their parents. Set allow_untested_optimizer "
                "(zero_allow_untested_optimizer in DeepSpeed's configuration) to run its own code on shards, which is "
                "right if it treats each element alike."
            )
        _foreign.check(source, name)
        kind = name
        logger.warning("[optimizer] %s has no native twin: its own code runs on each rank's shards.", name)
    elif any(state.get("step") != 0 for state in source.state.values()):  # Adagrad's is there from the start
        raise UnsupportedError(
            f"[optimizer] {name} already holds state of {len(source.state)} parameters, expected a fresh optimizer. "
            "Hand it to the engine before its first step."
        )
    defaults = {k: v for k, v in source.defaults.items() if k not in ("foreach", "fused", "capturable")}
    groups = [{"params": list(group["params"])} for group in source.param_groups]
    twin = Optimizer(groups, type=kind, defaults=defaults, source=source, foreign=foreign)
    twin.param_groups = source.param_groups
    twin.hypers()  # refuses what it cannot do
    return twin


def build(
    given: torch.optim.Optimizer | Callable[[Any], Any] | None,
    config: OptimizerConfig | None,
    params: Iterable[Any],
    *,
    model: torch.nn.Module,
    allow_untested: bool = False,
) -> Optimizer:
    """The engine's optimizer from what the user gave: an optimizer, a function of the parameters, or the config.

    With neither, AdamW with its default hyperparameters, and a warning.

    Raises:
        ConfigError: `given` is neither.
    """
    if given is None:
        if config is None:
            config = OptimizerConfig()
            logger.warning(
                "[optimizer] no optimizer was given and the config has none: using AdamW with lr %g.", config.lr
            )
        return from_config(config, params, model)
    if isinstance(given, torch.optim.Optimizer):
        return from_torch(given, allow_untested=allow_untested)
    if callable(given):
        made = given(params)
        if isinstance(made, torch.optim.Optimizer):
            return from_torch(made, allow_untested=allow_untested)
        raise ConfigError(
            f"[optimizer] the function given as optimizer returned {made!r}, expected a torch.optim.Optimizer."
        )
    raise ConfigError(f"[optimizer] got {given!r}, expected a torch.optim.Optimizer or a function that makes one.")
