"""Learning-rate schedules with DeepSpeed's names, formulas and state, for any optimizer with parameter groups.

A schedule counts iterations from last_batch_iteration + 1. Making it sets the learning rate of the first step, and each
step() that of the next. Note that iteration 0 has the same rate as the start (log 1 = 0), so a warm-up begins with two
steps at its lowest rate; that is DeepSpeed's sequence.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from zerocore.config import ConfigWarning, SchedulerConfig
from zerocore.config._sections import SCHEDULER_KEYS, TORCH_SCHEDULERS
from zerocore.errors import ConfigError

LrOrList = float | Sequence[float]


class _Schedule:
    """What the schedules share; a subclass defines get_lr()."""

    def __init__(self, optimizer: Any, config: SchedulerConfig) -> None:
        groups = getattr(optimizer, "param_groups", None)
        if not isinstance(groups, list):
            raise ConfigError(
                f"[scheduler] optimizer: got a {type(optimizer).__name__}, expected an object with param_groups. Pass "
                "engine.optimizer or a torch optimizer."
            )
        self.optimizer = optimizer
        self.last_batch_iteration = config.last_batch_iteration

    def get_lr(self) -> list[float]:
        """The learning rate of each group at this iteration."""
        raise NotImplementedError

    def get_last_lr(self) -> list[float]:
        """The learning rate of each group as last set; valid from the start, before the first step()."""
        return list(self._last_lr)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Moves on by one iteration and sets the learning rates.

        Args:
            last_batch_iteration: the iteration to move to, the next one unless given.
        """
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._apply()

    def state_dict(self) -> dict[str, int]:
        """What load_state_dict needs to go on."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes back to the iteration of a state_dict() and sets its learning rates."""
        if "last_batch_iteration" not in state:
            raise ConfigError(
                f"[scheduler] state: got the keys {sorted(state)}, expected last_batch_iteration. Load what "
                "state_dict() gave."
            )
        self.last_batch_iteration = state["last_batch_iteration"]
        self._apply()

    def _apply(self) -> None:
        self._last_lr = self.get_lr()
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = lr


class _Warmup(_Schedule):
    """What the schedules with a warm-up share."""

    def __init__(self, optimizer: Any, config: SchedulerConfig) -> None:
        super().__init__(optimizer, config)
        self.warmup_num_steps = max(2, config.warmup_num_steps)
        self.warmup_type = config.warmup_type
        self.total_num_steps = config.total_num_steps
        if self.total_num_steps is not None and self.total_num_steps < self.warmup_num_steps:
            warnings.warn(
                f"[scheduler] total_num_steps: got {self.total_num_steps}, expected at least warmup_num_steps, "
                f"{self.warmup_num_steps}. The run ends in the warm-up.",
                ConfigWarning,
                stacklevel=4,
            )

    def _warmup(self) -> float:
        """How far the warm-up is, from 0 to 1. Only in the warm-up."""
        if self.warmup_type == "log":
            return 1.0 / math.log(self.warmup_num_steps) * math.log(self.last_batch_iteration + 1)
        return self.last_batch_iteration / self.warmup_num_steps


class WarmupLR(_Warmup):
    """From warmup_min_lr up to warmup_max_lr in warmup_num_steps iterations; constant from there.

    Args:
        optimizer: has `param_groups`, dicts with "lr".
        warmup_min_lr: learning rate at the start; a list has one a group.
        warmup_max_lr: learning rate after the warm-up; a list has one a group, None takes each group's own.
        warmup_num_steps: iterations of the warm-up; 0 and 1 count as 2.
        warmup_type: "log", log(1 + i) / log(warmup_num_steps) at iteration i, or "linear", i / warmup_num_steps.
        last_batch_iteration: iterations already made, less one; -1 starts afresh.

    Raises:
        ConfigError: a value is out of range, or a list does not fit the groups.
    """

    def __init__(
        self,
        optimizer: Any,
        *,
        warmup_min_lr: LrOrList = 0.0,
        warmup_max_lr: LrOrList | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        """Sets the learning rates of the first step."""
        self._start(optimizer, _checked("WarmupLR", locals()))

    def _start(self, optimizer: Any, config: SchedulerConfig) -> None:
        super().__init__(optimizer, config)
        own = [group["lr"] for group in optimizer.param_groups]
        self.min_lrs = _one_per_group(config.warmup_min_lr, own, "warmup_min_lr")
        self.max_lrs = (
            own if config.warmup_max_lr is None else _one_per_group(config.warmup_max_lr, own, "warmup_max_lr")
        )
        self._apply()

    def get_lr(self) -> list[float]:
        """The learning rate of each group at this iteration."""
        if self.last_batch_iteration < 0:
            return list(self.min_lrs)
        part = self._warmup() if self.last_batch_iteration < self.warmup_num_steps else self._after_warmup()
        return [low + (high - low) * part for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def _after_warmup(self) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """WarmupLR, then down to warmup_min_lr in a straight line, which it reaches at iteration total_num_steps.

    Args:
        optimizer, warmup_min_lr, warmup_num_steps, warmup_type, last_batch_iteration: as in WarmupLR.
        total_num_steps: iterations of the whole run.
        warmup_max_lr: as in WarmupLR, but 0.001 unless given.

    Raises:
        ConfigError: a value is out of range, or a list does not fit the groups.
    """

    def __init__(
        self,
        optimizer: Any,
        *,
        total_num_steps: int,
        warmup_min_lr: LrOrList = 0.0,
        warmup_max_lr: LrOrList | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        """Sets the learning rates of the first step."""
        self._start(optimizer, _checked("WarmupDecayLR", locals()))

    def _after_warmup(self) -> float:
        assert self.total_num_steps is not None
        decay_steps = max(1.0, self.total_num_steps - self.warmup_num_steps)
        return max(0.0, float(self.total_num_steps - self.last_batch_iteration) / float(decay_steps))


class WarmupCosineLR(_Warmup):
    """Each group's own learning rate, times a ratio: from warmup_min_ratio to 1, then down a cosine to cos_min_ratio.

    Args:
        optimizer, warmup_num_steps, warmup_type, last_batch_iteration: as in WarmupLR.
        total_num_steps: iterations of the whole run; the ratio stays at cos_min_ratio after them.
        warmup_min_ratio: ratio at iteration 0. The very first step, before it, has learning rate 0, as in DeepSpeed.
        cos_min_ratio: ratio at the end.

    Raises:
        ConfigError: a value is out of range.
    """

    def __init__(
        self,
        optimizer: Any,
        *,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        """Sets the learning rates of the first step."""
        config = _checked("WarmupCosineLR", locals())
        super().__init__(optimizer, config)
        self.warmup_min_ratio = config.warmup_min_ratio
        self.cos_min_ratio = config.cos_min_ratio
        self.org_lrs = [group["lr"] for group in optimizer.param_groups]
        self._apply()

    def get_lr(self) -> list[float]:
        """The learning rate of each group at this iteration."""
        ratio = self.get_lr_ratio()
        return [lr * ratio for lr in self.org_lrs]

    def get_lr_ratio(self) -> float:
        """What the groups' own learning rates are multiplied by at this iteration."""
        if self.last_batch_iteration < 0:
            return 0.0
        if self.last_batch_iteration < self.warmup_num_steps:
            return self.warmup_min_ratio + self._warmup() * (1.0 - self.warmup_min_ratio)
        assert self.total_num_steps is not None
        decay_steps = max(1, self.total_num_steps - self.warmup_num_steps)
        progress = min(1.0, (self.last_batch_iteration - self.warmup_num_steps + 1) / decay_steps)
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * ((1 + math.cos(math.pi * progress)) / 2))


class LRRangeTest(_Schedule):
    """A range test: from lr_range_test_min_lr up without end, by lr_range_test_step_rate of it an interval of steps.

    Args:
        optimizer, last_batch_iteration: as in WarmupLR.
        lr_range_test_min_lr: learning rate at the start; a list has one a group.
        lr_range_test_step_size: steps an interval.
        lr_range_test_step_rate: what an interval adds, as a part of lr_range_test_min_lr.
        lr_range_test_staircase: True: once an interval; False: a part of it at each step.

    Raises:
        ConfigError: a value is out of range, or a list does not fit the groups.
    """

    def __init__(
        self,
        optimizer: Any,
        *,
        lr_range_test_min_lr: LrOrList = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        """Sets the learning rates of the first step."""
        config = _checked("LRRangeTest", locals())
        super().__init__(optimizer, config)
        self.min_lr = _one_per_group(config.lr_range_test_min_lr, optimizer.param_groups, "lr_range_test_min_lr")
        self.step_size = config.lr_range_test_step_size
        self.step_rate = config.lr_range_test_step_rate
        self.staircase = config.lr_range_test_staircase
        self._apply()

    def get_lr(self) -> list[float]:
        """The learning rate of each group at this iteration."""
        intervals = float(self.last_batch_iteration + 1) / self.step_size
        increase = 1 + self.step_rate * (math.floor(intervals) if self.staircase else intervals)
        return [lr * increase for lr in self.min_lr]


class OneCycle(_Schedule):
    """One cycle of the learning rate, up and down again, and of the momentum, down and up; then decay.

    The momentum is the first of a group's `betas`; as in DeepSpeed the second becomes 0.99, the first step has
    cycle_min_mom although the cycle begins at cycle_max_mom, and the momentum of an optimizer without betas stays.

    Args:
        optimizer, last_batch_iteration: as in WarmupLR.
        cycle_min_lr, cycle_max_lr: learning rates at the ends and in the middle of the cycle; a list has one a group.
        cycle_first_step_size, cycle_second_step_size: steps of the way up and down; None: as many down as up.
        cycle_first_stair_count, cycle_second_stair_count: stairs in which these go, 0: a straight line; None: as many
            down as up.
        decay_step_size: steps of an interval of decay after the cycle; 0: no decay.
        decay_lr_rate: after n intervals the learning rate is cycle_min_lr / (1 + n decay_lr_rate).
        cycle_momentum: False leaves the momentum alone.
        cycle_min_mom, cycle_max_mom: the momentum in the middle and at the ends; lists have one a group.
        decay_mom_rate: after n intervals the momentum is cycle_max_mom (1 + n decay_mom_rate).

    Raises:
        ConfigError: a value is out of range, or a list does not fit the groups.
    """

    def __init__(
        self,
        optimizer: Any,
        *,
        cycle_min_lr: LrOrList,
        cycle_max_lr: LrOrList,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: LrOrList = 0.8,
        cycle_max_mom: LrOrList = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        """Sets the learning rates, and the momentum, of the first step."""
        config = _checked("OneCycle", locals())
        super().__init__(optimizer, config)
        groups, first, second = optimizer.param_groups, config.cycle_first_step_size, config.cycle_second_step_size
        self.first_size, self.second_size = first, first if second is None else second
        self.total_size = self.first_size + self.second_size
        stairs, stairs_down = config.cycle_first_stair_count, config.cycle_second_stair_count
        self.first_stair_count, self.second_stair_count = stairs, stairs if stairs_down is None else stairs_down
        self.decay_step_size = config.decay_step_size
        self.decay_lr_rate, self.decay_mom_rate = config.decay_lr_rate, config.decay_mom_rate
        assert config.cycle_min_lr is not None and config.cycle_max_lr is not None
        self.min_lrs = _one_per_group(config.cycle_min_lr, groups, "cycle_min_lr")
        self.max_lrs = _one_per_group(config.cycle_max_lr, groups, "cycle_max_lr")
        self.cycle_momentum = config.cycle_momentum and all("betas" in group for group in groups)
        if config.cycle_momentum and not self.cycle_momentum:
            warnings.warn(
                "[scheduler] cycle_momentum: got true, expected an optimizer with betas. The momentum stays as it is; "
                "set cycle_momentum to false.",
                ConfigWarning,
                stacklevel=3,
            )
        self.min_moms = _one_per_group(config.cycle_min_mom, groups, "cycle_min_mom")
        self.max_moms = _one_per_group(config.cycle_max_mom, groups, "cycle_max_mom")
        self._apply()

    def get_lr(self) -> list[float]:
        """The learning rate of each group at this iteration."""
        if self.last_batch_iteration < self.total_size:
            scale = self._scale()
            return [low + (high - low) * scale for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]
        return [lr / (1 + self.decay_lr_rate * self._decay_intervals()) for lr in self.min_lrs]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """The betas of each group at this iteration; None where the momentum is left alone."""
        if not self.cycle_momentum:
            return None
        if self.last_batch_iteration < 0:
            moms = self.min_moms
        elif self.last_batch_iteration < self.total_size:
            scale = self._scale()
            moms = [high - (high - low) * scale for low, high in zip(self.min_moms, self.max_moms, strict=True)]
        else:
            moms = [mom * (1 + self.decay_mom_rate * self._decay_intervals()) for mom in self.max_moms]
        return [(mom, _CYCLE_BETA2) for mom in moms]

    def _apply(self) -> None:
        super()._apply()
        for group, betas in zip(self.optimizer.param_groups, self.get_mom() or (), strict=False):
            group["betas"] = betas

    def _scale(self) -> float:
        """How high the cycle is, from 0 to 1."""
        at = (self.last_batch_iteration + 1) % self.total_size
        up = at <= self.first_size
        stairs = self.first_stair_count if up else self.second_stair_count
        part, size = (at, self.first_size) if up else (self.total_size - at, self.second_size)
        return math.floor(part * stairs / size) / stairs if stairs else part / size

    def _decay_intervals(self) -> float:
        if self.decay_step_size == 0:
            return 0.0
        return (self.last_batch_iteration - self.total_size + 1) / self.decay_step_size


_KINDS: dict[str, Any] = {
    each.__name__: each for each in (WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest, OneCycle)
}
_CYCLE_BETA2 = 0.99


def build_scheduler(config: SchedulerConfig, optimizer: Any) -> Any:
    """The schedule that a configuration asks for, over an optimizer's groups.

    Raises:
        ConfigError: torch does not take the arguments of one of its own.
    """
    if config.type in TORCH_SCHEDULERS:
        try:
            return getattr(torch.optim.lr_scheduler, config.type)(optimizer, **config.torch_params)
        except (TypeError, ValueError, KeyError) as error:
            raise ConfigError(
                f"[scheduler] {config.type}: got {config.torch_params}, expected arguments that "
                f"torch.optim.lr_scheduler.{config.type} takes: {error}. Change them."
            ) from error
    return _KINDS[config.type](optimizer, **{name: getattr(config, name) for name in _arguments(config.type)})


def build(given: Any | Callable[[Any], Any] | None, config: SchedulerConfig | None, optimizer: Any) -> Any | None:
    """What the engine steps: the schedule that the user gave, or else the configuration's, or else None.

    Args:
        given: an object with step(), or a function of the optimizer that returns one.
        config: the configuration's schedule, which `given` overrides.
        optimizer: has `param_groups`.

    Raises:
        ConfigError: what was given is neither, or returned something without step().
    """
    if given is None:
        return None if config is None else build_scheduler(config, optimizer)
    made = given(optimizer) if isinstance(given, type) or (callable(given) and not hasattr(given, "step")) else given
    if not callable(getattr(made, "step", None)):
        raise ConfigError(
            f"[scheduler] lr_scheduler: got {type(made).__name__}, expected an object with step(), or a function of "
            "the optimizer that returns one."
        )
    if type(made).__name__ == "ReduceLROnPlateau":
        raise ConfigError(
            "[scheduler] lr_scheduler: got ReduceLROnPlateau, expected a schedule whose step() needs no metric. Step "
            "it yourself, over engine.optimizer."
        )
    groups = getattr(getattr(made, "optimizer", None), "param_groups", optimizer.param_groups)
    if groups is not optimizer.param_groups:
        raise ConfigError(
            "[scheduler] lr_scheduler: got one over another optimizer than the engine's, so it would change nothing. "
            "Hand that optimizer to the engine too, or give a function of the optimizer that returns the schedule."
        )
    return made


def _arguments(kind: str) -> tuple[str, ...]:
    return (*SCHEDULER_KEYS[kind], "last_batch_iteration")


def _checked(kind: Any, arguments: dict[str, Any]) -> SchedulerConfig:
    """Arguments of a schedule, checked as the configuration checks them."""
    values = {name: arguments[name] for name in _arguments(kind)}
    return SchedulerConfig(**{"type": kind, **{k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}})


def _one_per_group(value: float | tuple[float, ...], groups: list[Any], name: str) -> list[float]:
    if not isinstance(value, tuple):
        return [value] * len(groups)
    if len(value) != len(groups):
        raise ConfigError(
            f"[scheduler] {name}: got {len(value)} values, expected one a parameter group, {len(groups)}. Give "
            "one number for all groups, or a list of that length."
        )
    return list(value)
