"""Learning-rate schedules: DeepSpeed's sequences, in closed form."""

import functools
import math

import pytest
import torch
from zerocore.config import Config, ConfigWarning, SchedulerConfig
from zerocore.errors import ConfigError
from zerocore.schedulers import (
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    build,
    build_scheduler,
)


class Optimizer:
    """Parameter groups, and nothing else."""

    def __init__(self, *lrs, **others):
        self.param_groups = [{"lr": lr, **others} for lr in lrs]

    def lrs(self):
        return [group["lr"] for group in self.param_groups]


def sequence(make, steps, lr=1.0):
    """The learning rates of the first `steps` optimizer steps: the schedule is stepped after each."""
    optimizer = Optimizer(lr)
    schedule = make(optimizer)
    lrs = []
    for _ in range(steps):
        assert schedule.get_last_lr() == optimizer.lrs()
        lrs += optimizer.lrs()
        schedule.step()
    return lrs


def test_linear_warmup():
    make = functools.partial(WarmupLR, warmup_min_lr=0.25, warmup_max_lr=1.25, warmup_num_steps=4, warmup_type="linear")
    assert sequence(make, 8) == [0.25, 0.25, 0.5, 0.75, 1.0, 1.25, 1.25, 1.25]


def test_log_warmup():
    make = functools.partial(WarmupLR, warmup_max_lr=2.0, warmup_num_steps=8)
    expected = [0, 0, *(2 * math.log(i) / math.log(8) for i in range(2, 9)), 2, 2]
    assert sequence(make, 11) == pytest.approx(expected, rel=1e-15)
    assert sequence(make, 11)[8:] == [2.0, 2.0, 2.0]  # log 8 / log 8 at iteration 7, then constant


def test_the_first_two_steps_are_at_the_lowest_rate():
    """Iteration -1, before the first step(), and iteration 0, where log(1) is 0."""
    make = functools.partial(WarmupLR, warmup_min_lr=0.5, warmup_max_lr=1.0, warmup_num_steps=3)
    assert sequence(make, 3)[:2] == [0.5, 0.5]
    assert sequence(make, 3)[2] > 0.5


def test_linear_decay():
    make = functools.partial(
        WarmupDecayLR, total_num_steps=8, warmup_max_lr=1.0, warmup_num_steps=4, warmup_type="linear"
    )
    assert sequence(make, 12) == [0, 0, 0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0, 0, 0]


def test_decay_ends_at_the_lowest_rate():
    make = functools.partial(WarmupDecayLR, total_num_steps=4, warmup_min_lr=0.25, warmup_num_steps=2)
    assert sequence(make, 8)[-2:] == [0.25, 0.25]


def test_cosine():
    make = functools.partial(
        WarmupCosineLR, total_num_steps=8, warmup_num_steps=4, cos_min_ratio=0.5, warmup_type="linear"
    )
    cosine = [0.5 + 0.5 * (1 + math.cos(math.pi * i / 4)) / 2 for i in (1, 2, 3, 4)]
    expected = [0, 0, 0.25, 0.5, 0.75, *cosine, 0.5, 0.5]
    assert sequence(make, 11, lr=2.0) == pytest.approx([2 * ratio for ratio in expected], rel=1e-15)


def test_cosine_starts_at_zero_and_warms_up_from_its_ratio():
    make = functools.partial(
        WarmupCosineLR, total_num_steps=9, warmup_min_ratio=0.5, warmup_num_steps=4, warmup_type="linear"
    )
    assert sequence(make, 4) == [0.0, 0.5, 0.625, 0.75]


def test_rates_of_single_groups():
    optimizer = Optimizer(0.3, 0.02)
    WarmupLR(optimizer, warmup_min_lr=[0.1, 0.01], warmup_max_lr=[1.0, 2.0], warmup_num_steps=2).step(5)
    assert optimizer.lrs() == [1.0, 2.0]
    schedule = WarmupLR(optimizer, warmup_num_steps=2)
    assert optimizer.lrs() == schedule.get_last_lr() == [0.0, 0.0]
    schedule.step(7)
    assert optimizer.lrs() == [1.0, 2.0]  # each group's own
    optimizer = Optimizer(0.3, 0.02)
    WarmupCosineLR(optimizer, total_num_steps=5, warmup_num_steps=2, cos_min_ratio=0.5).step(9)
    assert optimizer.lrs() == [0.15, 0.01]


def test_range():
    make = functools.partial(LRRangeTest, lr_range_test_min_lr=0.5, lr_range_test_step_size=4)
    assert sequence(make, 6) == [0.5 * (1 + i / 4) for i in range(6)]
    make = functools.partial(
        LRRangeTest,
        lr_range_test_min_lr=[0.5],
        lr_range_test_step_size=2,
        lr_range_test_step_rate=3.0,
        lr_range_test_staircase=True,
    )
    assert sequence(make, 7) == [0.5, 0.5, 2.0, 2.0, 3.5, 3.5, 5.0]


def test_one_cycle_and_its_decay():
    cycle = functools.partial(OneCycle, cycle_min_lr=0.25, cycle_max_lr=1.25, cycle_momentum=False)
    make = functools.partial(cycle, cycle_first_step_size=4, cycle_second_step_size=2)
    up_and_down = [0.25, 0.5, 0.75, 1.0, 1.25, 0.75, 0.25]
    assert sequence(make, 10) == [*up_and_down, 0.25, 0.25, 0.25]
    decayed = [0.25 / (1 + 0.5 * i / 2) for i in range(1, 5)]
    assert sequence(functools.partial(make, decay_step_size=2, decay_lr_rate=0.5), 11) == [*up_and_down, *decayed]
    assert sequence(functools.partial(make, decay_lr_rate=0.5), 9)[6:] == [0.25] * 3  # no interval, no decay
    stairs = functools.partial(cycle, cycle_first_step_size=4, cycle_first_stair_count=2)
    assert sequence(stairs, 9) == [0.25, 0.25, 0.75, 0.75, 1.25, 0.75, 0.75, 0.25, 0.25]
    assert sequence(functools.partial(stairs, cycle_second_stair_count=0), 9)[4:] == [1.25, 1.0, 0.75, 0.5, 0.25]
    assert sequence(functools.partial(cycle, cycle_first_step_size=2, cycle_second_step_size=0), 4)[:3] == [
        0.25,
        0.75,
        0.25,
    ]


def betas_of(steps, **arguments):
    optimizer = Optimizer(1.0, 2.0, betas=(0.5, 0.5))
    schedule = OneCycle(optimizer, cycle_min_lr=0.1, cycle_max_lr=0.2, cycle_first_step_size=4, **arguments)
    out = []
    for _ in range(steps):
        assert schedule.get_mom() == [group["betas"] for group in optimizer.param_groups]
        out.append([group["betas"][0] for group in optimizer.param_groups])
        assert all(group["betas"][1] == 0.99 for group in optimizer.param_groups)
        schedule.step()
    return out


def test_the_momentum_of_one_cycle_goes_the_other_way():
    assert betas_of(10, cycle_min_mom=0.5, cycle_max_mom=[0.75, 1.0]) == [
        [0.5, 0.5],  # of the first step, as in DeepSpeed
        *([0.75 - 0.25 * i / 4, 1.0 - 0.5 * i / 4] for i in (1, 2, 3, 4, 3, 2, 1, 0)),
        [0.75, 1.0],
    ]
    decayed = betas_of(11, cycle_min_mom=0.5, cycle_max_mom=0.75, decay_step_size=4, decay_mom_rate=0.25)[9:]
    assert decayed == [[0.75 * (1 + 0.25 * i / 4)] * 2 for i in (1, 2)]


def test_the_momentum_of_an_optimizer_without_betas_stays():
    optimizer = Optimizer(1.0, momentum=0.5)
    with pytest.warns(ConfigWarning, match="cycle_momentum: got true, expected an optimizer with betas"):
        schedule = OneCycle(optimizer, cycle_min_lr=0.1, cycle_max_lr=0.2)
    assert schedule.get_mom() is None
    schedule.step()
    assert optimizer.param_groups[0].keys() == {"lr", "momentum"}


def test_a_resumed_cycle_has_its_momentum_at_once():
    def make(optimizer):
        return OneCycle(optimizer, cycle_min_lr=0.1, cycle_max_lr=0.2, cycle_first_step_size=4)

    optimizer, resumed = Optimizer(1.0, betas=(0.5, 0.5)), Optimizer(1.0, betas=(0.5, 0.5))
    schedule = make(optimizer)
    for _ in range(3):
        schedule.step()
    make(resumed).load_state_dict(schedule.state_dict())
    assert resumed.param_groups == optimizer.param_groups


def test_a_warmup_of_one_step_counts_as_two():
    one, two = (sequence(functools.partial(WarmupLR, warmup_num_steps=n), 6) for n in (1, 2))
    assert one == two


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(WarmupLR, warmup_num_steps=5),
        functools.partial(WarmupDecayLR, total_num_steps=9, warmup_num_steps=5),
        functools.partial(WarmupCosineLR, total_num_steps=9, warmup_num_steps=5),
        functools.partial(LRRangeTest, lr_range_test_step_size=3),
        functools.partial(
            OneCycle,
            cycle_min_lr=0.1,
            cycle_max_lr=0.2,
            cycle_first_step_size=4,
            decay_step_size=3,
            decay_lr_rate=0.5,
            cycle_momentum=False,
        ),
    ],
)
def test_a_resumed_schedule_goes_on_as_if_never_stopped(make):
    whole = sequence(make, 12)
    optimizer = Optimizer(1.0)
    schedule = make(optimizer)
    for _ in range(4):
        schedule.step()
    assert schedule.state_dict() == {"last_batch_iteration": 3}
    resumed_optimizer = Optimizer(1.0)
    resumed = make(resumed_optimizer)
    resumed.load_state_dict(schedule.state_dict())
    started_later = make(Optimizer(1.0), last_batch_iteration=3)
    assert resumed.get_last_lr() == started_later.get_last_lr() == resumed_optimizer.lrs() == [whole[4]]
    for expected in whole[5:]:
        resumed.step()
        assert resumed_optimizer.lrs() == [expected]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda o: WarmupLR(o, warmup_num_steps=-1), "scheduler.warmup_num_steps: got -1, expected an integer >= 0."),
        (
            lambda o: WarmupLR(o, warmup_type="cosine"),
            'scheduler.warmup_type: got \'cosine\', expected "log" or "linear".',
        ),
        (lambda o: WarmupLR(o, warmup_max_lr=-1), "scheduler.warmup_max_lr: got -1, expected a number >= 0"),
        (
            lambda o: WarmupLR(o, warmup_max_lr=[1.0]),
            "warmup_max_lr: got 1 values, expected one a parameter group, 2.",
        ),
        (
            lambda o: OneCycle(o, cycle_min_lr=0.1, cycle_max_lr=0.2, cycle_first_step_size=0),
            "scheduler.cycle_first_step_size: got 0, expected an integer >= 1.",
        ),
        (
            lambda o: OneCycle(o, cycle_min_lr=[0.1, 0.1, 0.1], cycle_max_lr=0.2, cycle_momentum=False),
            "cycle_min_lr: got 3 values, expected one a parameter group, 2.",
        ),
        (
            lambda o: LRRangeTest(o, lr_range_test_step_size=0),
            "scheduler.lr_range_test_step_size: got 0, expected an integer >= 1.",
        ),
        (lambda o: WarmupDecayLR(o, total_num_steps=-1), "scheduler.total_num_steps: got -1, expected an integer >= 1"),
        (lambda o: WarmupLR(3), "optimizer: got a int, expected an object with param_groups."),
        (lambda o: WarmupLR(o).load_state_dict({"x": 1}), "state: got the keys ['x'], expected last_batch_iteration."),
    ],
)
def test_wrong_arguments(make, text):
    with pytest.raises(ConfigError) as caught:
        make(Optimizer(1.0, 1.0))
    assert text in str(caught.value)


def test_a_run_that_ends_in_the_warmup_is_warned_of():
    with pytest.warns(ConfigWarning, match="total_num_steps: got 3, expected at least warmup_num_steps, 10"):
        WarmupDecayLR(Optimizer(1.0), total_num_steps=3, warmup_num_steps=10)


@pytest.mark.parametrize(
    ("config", "make"),
    [
        (SchedulerConfig(type="WarmupLR", warmup_num_steps=3), functools.partial(WarmupLR, warmup_num_steps=3)),
        (
            SchedulerConfig(type="WarmupDecayLR", total_num_steps=7, warmup_max_lr=0.5, warmup_num_steps=3),
            functools.partial(WarmupDecayLR, total_num_steps=7, warmup_max_lr=0.5, warmup_num_steps=3),
        ),
        (
            SchedulerConfig(type="WarmupCosineLR", total_num_steps=7, cos_min_ratio=0.1, warmup_num_steps=3),
            functools.partial(WarmupCosineLR, total_num_steps=7, cos_min_ratio=0.1, warmup_num_steps=3),
        ),
        (
            SchedulerConfig(type="LRRangeTest", lr_range_test_step_size=5),
            functools.partial(LRRangeTest, lr_range_test_step_size=5),
        ),
        (
            SchedulerConfig(
                type="OneCycle", cycle_min_lr=0.1, cycle_max_lr=0.2, cycle_first_step_size=3, cycle_momentum=False
            ),
            functools.partial(
                OneCycle, cycle_min_lr=0.1, cycle_max_lr=0.2, cycle_first_step_size=3, cycle_momentum=False
            ),
        ),
    ],
)
def test_a_schedule_is_built_from_the_configuration(config, make):
    assert sequence(functools.partial(build_scheduler, config), 9) == sequence(make, 9)


def test_a_schedule_of_torch_is_built_from_the_configuration():
    def lrs(schedule, optimizer):
        out = []
        for _ in range(5):
            out.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        return out

    ours, theirs = (torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5) for _ in range(2))
    config = SchedulerConfig(type="MultiStepLR", torch_params={"milestones": [2, 3], "gamma": 0.5})
    made = lrs(build_scheduler(config, ours), ours)
    assert (
        made == lrs(torch.optim.lr_scheduler.MultiStepLR(theirs, [2, 3], 0.5), theirs) == [0.5, 0.5, 0.25, 0.125, 0.125]
    )
    for type, params in (("StepLR", {}), ("StepLR", {"step_size": 1, "x": 1}), ("OneCycleLR", {"max_lr": 1.0})):
        with pytest.raises(ConfigError, match=rf"\[scheduler\] {type}: got .*, expected arguments that torch"):
            build_scheduler(SchedulerConfig(type=type, torch_params=params), ours)
    with pytest.raises(ConfigError, match=r"torch_params: got .* expected no value"):
        SchedulerConfig(type="WarmupLR", torch_params={"x": 1})
    with pytest.raises(ConfigError, match="last_batch_iteration: got 3, expected no value"):
        SchedulerConfig(type="StepLR", torch_params={"step_size": 1}, last_batch_iteration=3)


def test_what_the_engine_steps():
    optimizer = Optimizer(1.0)
    config = SchedulerConfig(type="WarmupLR")
    assert build(None, None, optimizer) is None
    assert isinstance(build(None, config, optimizer), WarmupLR)
    given = WarmupCosineLR(optimizer, total_num_steps=2000)
    assert build(given, config, optimizer) is given
    assert build(WarmupLR, None, optimizer).optimizer is optimizer
    assert build(lambda o: WarmupLR(o), config, optimizer).optimizer is optimizer
    for wrong in (3, lambda o: None):
        with pytest.raises(
            ConfigError, match=r"\[scheduler\] lr_scheduler: got (int|NoneType), expected an object with"
        ):
            build(wrong, None, optimizer)


def test_no_warm_up_counts_as_two_steps():
    """Trainer fills "auto" with 0 where no warm-up was asked for; DeepSpeed takes 2 then."""
    sequences = [sequence(functools.partial(WarmupLR, warmup_max_lr=1.0, warmup_num_steps=n), 4) for n in (0, 1, 2)]
    assert sequences[0] == sequences[1] == sequences[2]
    config = Config.from_deepspeed(
        {"train_batch_size": 1, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}}
    )
    assert config.scheduler.warmup_num_steps == 0
