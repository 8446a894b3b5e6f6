"""Checkpoints as users' scripts make them: odd folders, schedulers, modules and calls in odd places."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
import zerocore
from torch.optim import lr_scheduler
from zerocore import _engine_state, schedulers
from zerocore._load import Checkpoint
from zerocore._values import marked, unmarked
from zerocore.config import CheckpointConfig, Config, DataConfig, OptimizerConfig, PrecisionConfig, ZeroConfig
from zerocore.errors import CheckpointError, ConfigError, IoError, UnsupportedError
from zerocore.utils import RepeatingLoader

pytestmark = pytest.mark.usefixtures("one_thread")


def build(model=None, *, optimizer=None, scheduler=None, dtype="fp32", stage=0, samples=2, micro=2, **config):
    if model is None:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3)
    return zerocore.Engine(
        model,
        Config(
            train_batch_size=samples,
            micro_batch_size=micro,
            zero=ZeroConfig(stage=stage),
            precision=PrecisionConfig(dtype=dtype),
            **config,
        ),
        optimizer=optimizer or (lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)),
        lr_scheduler=scheduler,
    )


def train(engine, steps=1):
    for _ in range(steps):
        dtype = next(engine.module.parameters()).dtype
        engine.backward(engine(torch.full((2, 4), 1.0 + engine.global_steps, dtype=dtype)).float().mean())
        engine.step()


def test_a_folder_of_somebody_elses_is_not_replaced(folder):
    """DeepSpeed's checkpoints have the same names."""
    theirs = folder / "global_step1"
    theirs.mkdir()
    (theirs / "mp_rank_00_model_states.pt").write_text("weights")
    engine = build()
    train(engine)
    with pytest.raises(IoError, match=r"global_step1.*no checkpoint of zerocore") as error:
        engine.save_checkpoint(folder)
    assert error.value.errno == 17
    assert (theirs / "mp_rank_00_model_states.pt").read_text() == "weights"
    (folder / "mine").mkdir()  # an empty one is nobody's loss
    engine.save_checkpoint(folder, tag="mine")
    (folder / "mine" / "manifest.json").unlink()  # and one that is damaged may be made again
    engine.save_checkpoint(folder, tag="mine")
    assert engine.load_checkpoint(folder).path == str(folder / "mine")
    engine.close()


SCHEDULERS = {
    "multi_step": lambda o: lr_scheduler.MultiStepLR(o, [3, 5]),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=20),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1), lr_scheduler.CosineAnnealingLR(o, 9), lr_scheduler.MultiStepLR(o, [2])],
        [2, 5],
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.StepLR(o, 3), lr_scheduler.ExponentialLR(o, 0.9)]),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.3, step_size_up=3),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scheduler", SCHEDULERS.values(), ids=SCHEDULERS)
def test_torchs_schedulers_go_on(folder, scheduler):
    def rates(engine, steps):
        seen = []
        for _ in range(steps):
            train(engine)
            seen.append((engine.get_lr(), engine.optimizer.param_groups[0]["momentum"]))
        return seen

    engine = build(scheduler=scheduler)
    rates(engine, 3)
    engine.save_checkpoint(folder)
    expected = rates(engine, 5)
    engine.close()
    engine = build(scheduler=scheduler)
    engine.load_checkpoint(folder)
    assert rates(engine, 5) == expected
    engine.close()


@pytest.mark.parametrize("old", [False, True], ids=["new", "old"])
@pytest.mark.parametrize(
    ("then", "now"),
    [
        (lambda o: schedulers.WarmupLR(o, warmup_num_steps=4), lambda o: lr_scheduler.StepLR(o, 5)),
        (lambda o: lr_scheduler.StepLR(o, 1), lambda o: schedulers.WarmupLR(o, warmup_num_steps=4)),
        (lambda o: lr_scheduler.StepLR(o, 1), lambda o: lr_scheduler.ExponentialLR(o, 0.5)),
    ],
    ids=["warmup-step", "step-warmup", "step-exponential"],
)
def test_another_schedulers_state_is_left_out(folder, caplog, monkeypatch, then, now, old):
    engine = build(scheduler=then)
    if old:
        monkeypatch.setattr(_engine_state, "_scheduler", lambda scheduler: marked(scheduler.state_dict(), ""))
    train(engine, 3)
    engine.save_checkpoint(folder)
    engine.close()
    engine = build(scheduler=now)
    before, weight = engine.lr_scheduler.state_dict(), engine.module.weight.clone()
    with pytest.raises(ConfigError, match="of another scheduler"):
        engine.load_checkpoint(folder, strict=True)
    assert torch.equal(engine.module.weight, weight)
    engine.load_checkpoint(folder)
    assert "of another scheduler, so it begins anew: the state for" in caplog.text
    assert engine.lr_scheduler.state_dict() == before and engine.global_steps == 3
    train(engine)
    engine.close()


class Late(schedulers.WarmupLR):
    """Has a key more in its state once it has moved."""

    def state_dict(self):
        return super().state_dict() | ({"moved": True} if self.last_batch_iteration > 0 else {})


@pytest.mark.parametrize("pair", [(schedulers.WarmupLR, schedulers.WarmupDecayLR), (Late, Late)], ids=["alike", "late"])
def test_a_state_that_fits_another_scheduler_is_taken(folder, pair):
    settings = {schedulers.WarmupDecayLR: {"total_num_steps": 9}}
    makes = [lambda o, kind=kind: kind(o, warmup_num_steps=4, **settings.get(kind, {})) for kind in pair]
    engine = build(scheduler=makes[0])
    train(engine, 3)
    path = engine.save_checkpoint(folder)
    saved = Checkpoint(Path(path)).manifest.state.scheduler
    assert saved.pop("$class").endswith(f".{pair[0].__name__}") and saved == engine.lr_scheduler.state_dict()
    engine.close()
    engine = build(scheduler=makes[1])
    engine.load_checkpoint(folder, strict=True)
    assert engine.lr_scheduler.state_dict() == saved
    engine.close()


def test_numpys_numbers_are_numbers(folder):
    np = pytest.importorskip("numpy")
    engine = build(scheduler=lambda o: lr_scheduler.LambdaLR(o, lambda step: np.float32(0.5)))
    train(engine)
    engine.save_checkpoint(folder)
    rates = engine.get_lr()
    engine.load_checkpoint(folder)
    assert engine.get_lr() == rates
    engine.close()


def test_a_marked_state_comes_back_as_it_was():
    state = {"a": (1, [2.5, (None,)]), "b": {1: "x", "y": {}}, "c": Counter([3, 3, 5]), "d": {"$tuple": 1}, "e": {}}
    back = unmarked(json.loads(json.dumps(marked(state, "state"))))
    assert back == state and type(back["c"]) is Counter
    for bad in ({"$tuple": 1}, {"$items": [1]}, {"$items": [[[], 1]]}):
        with pytest.raises(CheckpointError, match="tuple or dict"):
            unmarked(bad)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("stage", [0, 2])
def test_what_was_written_to_the_model_is_saved(folder, stage, world_size):
    """Without a step in between, also where masters are kept beside the model."""
    engine = build(torch.nn.Linear(4, 3).bfloat16(), dtype="bf16", stage=stage, micro=2 // world_size)
    train(engine)
    with torch.no_grad():
        engine.module.weight.fill_(7)
    assert torch.equal(engine.state_dict()["weight"], torch.full((3, 4), 7.0))
    engine.save_checkpoint(folder)
    with torch.no_grad():
        engine.module.weight.fill_(8)
    engine.load_checkpoint(folder)
    assert torch.equal(engine.module.weight, torch.full((3, 4), 7.0, dtype=torch.bfloat16))
    assert torch.equal(engine.state_dict()["weight"], torch.full((3, 4), 7.0))
    engine.close()


def test_what_was_written_and_is_not_loaded_stays(folder):
    first, both = torch.nn.Linear(4, 3).bfloat16(), torch.nn.Linear(3, 3).bfloat16()
    engine = build(torch.nn.Sequential(first), dtype="bf16")
    engine.save_checkpoint(folder)
    engine.close()
    engine = build(torch.nn.Sequential(first, both), dtype="bf16")
    with torch.no_grad():
        both.weight.fill_(7)
    engine.load_checkpoint(folder, load_module_strict=False)
    assert torch.equal(both.weight, torch.full((3, 3), 7.0, dtype=torch.bfloat16))
    engine.close()


def test_pytorchs_loop_goes_on_with_more_accumulation_steps(folder):
    """With one accumulation step its kind cannot be told from DeepSpeed's; with two it must be found out then."""

    def pytorchs_loop(engine, steps):
        for _ in range(steps):
            for _ in range(engine.gradient_accumulation_steps()):
                engine.backward(engine(torch.full((1, 4), 1.0 + engine.global_steps)).mean() / 2)
            engine.step()

    engine = build(samples=1, micro=1)
    pytorchs_loop(engine, 1)
    engine.save_checkpoint(folder)
    engine.close()
    engine = build(samples=2, micro=1)
    engine.load_checkpoint(folder)
    pytorchs_loop(engine, 2)
    assert engine.global_steps == 3
    engine.close()


def test_a_folder_may_be_a_link(folder):
    """As those to a scratch disk often are."""
    (folder / "disk").mkdir()
    (folder / "run").symlink_to(folder / "disk")
    engine = build()
    engine.save_checkpoint(folder / "run")
    train(engine)
    path = engine.save_checkpoint(folder / "run")
    assert engine.load_checkpoint(folder / "run").path == path == str(folder / "run" / "global_step1")
    engine.close()


class Counting(torch.nn.Module):
    """Keeps `extra` as torch's extra state, and a number that is a tensor in the state dict only."""

    def __init__(self, extra, number):
        super().__init__()
        self.inner = torch.nn.Linear(4, 3)
        self.extra, self.number = extra, number

    def forward(self, x):
        return self.inner(x)

    def get_extra_state(self):
        return self.extra.clone() if isinstance(self.extra, torch.Tensor) else self.extra

    def set_extra_state(self, state):
        self.extra = state

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "number"] = torch.tensor(self.number)

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        self.number = state_dict.pop(prefix + "number").item()
        super()._load_from_state_dict(state_dict, prefix, *rest)


@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: torch.compile(m, backend="eager")], ids=["plain", "compiled"])
@pytest.mark.parametrize("module_only", [False, True])
@pytest.mark.parametrize("extra", [{1: (2, 3)}, torch.arange(3)], ids=["dict", "tensor"])
def test_modules_get_what_they_made(folder, extra, module_only, wrap):
    engine = build(torch.nn.Sequential(wrap(Counting(extra, 5.0))))
    train(engine)
    engine.save_checkpoint(folder)
    engine.close()
    model = Counting(None, 0.0)
    engine = build(torch.nn.Sequential(wrap(model)))
    engine.load_checkpoint(folder, load_module_only=module_only)
    assert model.number == 5.0
    assert torch.equal(model.extra, extra) if isinstance(extra, torch.Tensor) else model.extra == extra
    engine.close()
    engine = build(torch.nn.Sequential(torch.nn.Sequential()).append(torch.nn.Linear(4, 3)))
    with pytest.raises(ConfigError, match=r"not in the model: .*0\.number"):
        engine.load_checkpoint(folder)
    engine.close()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: torch.compile(m, backend="eager")], ids=["plain", "compiled"])
@pytest.mark.parametrize("extra", [{1: (2, 3)}, torch.arange(3)], ids=["dict", "tensor"])
def test_a_state_dict_gives_modules_what_they_made(extra, wrap, world_size):
    model = Counting(extra, 5.0)
    engine = build(torch.nn.Sequential(wrap(model), model.inner), stage=3, micro=2 // world_size)
    saved = engine.state_dict()
    engine.close()
    model = Counting(torch.zeros(2) if isinstance(extra, torch.Tensor) else None, 0.0)
    engine = build(torch.nn.Sequential(wrap(model), model.inner), stage=3, micro=2 // world_size)
    assert engine.load_state_dict(saved) == ([], [])
    assert model.number == 5.0
    assert torch.equal(model.extra, extra) if isinstance(extra, torch.Tensor) else model.extra == extra
    again = engine.state_dict()
    assert all(torch.equal(again[name], value) for name, value in saved.items() if "inner" in name)
    engine.close()


class Gives(torch.nn.Linear):
    def get_extra_state(self):
        return {"given": 1}


class Takes(torch.nn.Linear):
    taken = None

    def set_extra_state(self, state):
        self.taken = state


class Keeps(Gives, Takes):
    pass


@pytest.mark.parametrize("kind", [Gives, Takes, Keeps, torch.nn.Linear])
@pytest.mark.parametrize("there", [True, False])
def test_extra_states_are_missed_as_torch_misses_them(kind, there):
    """Of a module that only gives one, that only takes one, that does both, and neither; and of a shared one."""

    def shared():
        inner = kind(4, 4)
        return torch.nn.ModuleDict({"a": inner, "b": inner})

    state = {name: value for name, value in shared().state_dict().items() if "extra" not in name}
    if there:
        state |= {"a._extra_state": {"given": 2}, "b._extra_state": {"given": 3}}
    plain, model = shared(), shared()
    engine = build(model)
    assert engine.load_state_dict(state, strict=False) == plain.load_state_dict(state, strict=False)
    assert getattr(model["a"], "taken", None) == getattr(plain["a"], "taken", None)
    try:
        plain.load_state_dict(state)
    except RuntimeError:
        with pytest.raises(ConfigError, match=r"a\._extra_state"):
            engine.load_state_dict(state)
    else:
        engine.load_state_dict(state)
    engine.close()


@pytest.mark.parametrize(
    "value", ["\udcff", functools.reduce(lambda inner, _: [inner], range(400), 1)], ids=["half", "deep"]
)
def test_a_client_state_that_could_not_be_read_is_not_saved(folder, value):
    engine = build()
    with pytest.raises(ConfigError, match="could not be loaded again"):
        engine.save_checkpoint(folder, client_state={"x": value})
    assert list(folder.iterdir()) == []
    engine.close()


def test_a_forward_before_a_load_leaves_no_statistics(folder):
    def make_engine():
        torch.manual_seed(0)
        return build(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)), buffers="ordered")

    found = []
    for dummy in (False, True):
        engine = make_engine()
        if dummy:
            engine(torch.randn(2, 4))
        else:
            engine.save_checkpoint(folder)
        engine.load_checkpoint(folder)
        train(engine)
        found.append(engine.module[1].running_mean.clone())
        engine.close()
    assert torch.equal(*found)


def test_hyperparameters_of_other_groups_are_left_out(folder, caplog):
    def decayed(first, second):
        def make(params):
            weight, bias = params
            groups = [{"params": [weight], "weight_decay": first}, {"params": [bias], "weight_decay": second}]
            return torch.optim.AdamW(groups if first else groups[::-1])

        return make

    engine = build(optimizer=decayed(0.1, 0.0))
    engine.save_checkpoint(folder)
    engine.close()
    engine = build(optimizer=decayed(0.0, 0.2))
    engine.load_checkpoint(folder)
    assert [group["weight_decay"] for group in engine.optimizer.param_groups] == [0.2, 0.0]
    assert "hyperparameters: weight stands in another group" in caplog.text
    engine.close()


def named(model, **settings):
    """Over names, as torch takes them since 2.6, with settings of the user's own."""
    groups = [{"params": list(model.named_parameters()), **settings}]
    return build(model, optimizer=lambda _: torch.optim.AdamW(groups, lr=0.1))


SETTINGS = {"tags": ["a", "b"], "nested": [(1, 2.5), (None, "x")], "more": {"a": [1]}, "none": None, "on": True}


@pytest.mark.parametrize("old", [False, True], ids=["new", "old"])
def test_settings_of_any_kind_come_back(folder, monkeypatch, old):
    """Of an older checkpoint too, in which the names are."""
    if old:
        monkeypatch.setattr(_engine_state, "NO_SETTINGS", ("params",))
    torch.manual_seed(0)
    engine = named(torch.nn.Linear(4, 3), **SETTINGS)
    train(engine)
    path = engine.save_checkpoint(folder)
    assert ("param_names" in Checkpoint(Path(path)).manifest.optimizer.groups[0]) == old
    train(engine)
    expected = engine.state_dict()
    engine.close()
    engine = named(torch.nn.Linear(4, 3), **SETTINGS)
    engine.optimizer.param_groups[0]["lr"] = 0.5
    engine.load_checkpoint(folder)
    group = engine.optimizer.param_groups[0]
    assert {key: group[key] for key in SETTINGS} == SETTINGS and group["lr"] == 0.1
    assert group["param_names"] == ["weight", "bias"]
    train(engine)
    assert all(torch.equal(value, expected[name]) for name, value in engine.state_dict().items())
    engine.close()


@pytest.mark.parametrize(
    ("then", "now"),
    [((0.9, 0.999), (0.9, "x")), ([1], [1, 2]), ([[1]], [["x"]]), (1, "x"), (True, 1), (torch.tensor(0.1), "x")],
)
def test_a_misfit_of_the_settings_leaves_the_engine_as_it_was(folder, then, now):
    engine = named(torch.nn.Linear(4, 3), mine=now)
    train(engine)
    engine.save_checkpoint(folder)
    engine.close()
    engine = named(torch.nn.Linear(4, 3), mine=then)
    before = engine.state_dict()
    for how in ({"tag": "global_step1"}, {"strict": True}):
        with pytest.raises(CheckpointError, match=r"the optimizer's mine: got .*, expected a value like .*"):
            engine.load_checkpoint(folder, **how)
    assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
    assert engine.global_steps == 0 and engine.optimizer.param_groups[0]["mine"] is then
    train(engine)  # it can go on
    engine.close()


def test_momentum_is_not_switched_on_without_its_state(folder, caplog):
    engine = build()
    train(engine)
    engine.save_checkpoint(folder)
    engine.close()
    engine = build(optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    engine.load_checkpoint(folder)
    assert "built without momentum" in caplog.text
    train(engine)
    engine.close()


@pytest.mark.parametrize("background", [False, True])
def test_folders_are_those_of_the_call(folder, background, monkeypatch):
    """Wherever the script goes meanwhile."""
    monkeypatch.chdir(folder)
    engine = build(checkpoint=CheckpointConfig(async_save=background))
    engine.resume("run")
    train(engine)
    assert engine.save_checkpoint("run") == "run/global_step1"
    monkeypatch.chdir("/")
    engine.wait_for_checkpoint()
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit):
        train(engine)
    engine.close()
    assert sorted(p.name for p in (folder / "run").iterdir()) == ["global_step1", "global_step2", "latest"]


def test_a_stop_saves_though_the_last_save_failed(folder, monkeypatch):
    engine = build(checkpoint=CheckpointConfig(async_save=True))
    engine.resume(folder)
    train(engine)

    def fail(*args, **options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(zerocore._core, "write_file", fail)
        engine.save_checkpoint(folder)
        engine._checkpoints._saver._thread.join()
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit):
        train(engine)
    assert (folder / "latest").read_text() == "global_step2\n"
    engine.close()


def test_a_checkpoint_is_no_folder_of_checkpoints(folder):
    engine = build()
    path = engine.save_checkpoint(folder)
    for load in (engine.load_checkpoint, engine.resume):
        with pytest.raises(
            ConfigError, match=r"got a checkpoint, expected the folder that holds it.*tag='global_step0'"
        ):
            load(path)
    engine.close()


def test_two_engines_save_into_one_folder_at_once(folder):
    """What looks left over may be another's save that goes on."""
    engines = {tag: build(checkpoint=CheckpointConfig(async_save=True)) for tag in ("generator", "critic")}
    for _ in range(20):
        for tag, engine in engines.items():
            engine.save_checkpoint(folder, tag=tag)
    left = folder / ".dead.saving"
    left.mkdir()
    for tag, engine in engines.items():
        engine.save_checkpoint(folder, tag=tag)
        engine.close()
        Checkpoint(folder / tag).verify()
    assert sorted(p.name for p in folder.iterdir()) == ["critic", "generator", "latest"]


def test_what_latest_names_is_kept(folder):
    engine = build(checkpoint=CheckpointConfig(keep_last=1))
    for save_latest in (True, False, False):
        train(engine)
        engine.save_checkpoint(folder, save_latest=save_latest)
    assert sorted(p.name for p in folder.iterdir()) == ["global_step1", "global_step3", "latest"]
    engine.close()


def test_the_process_ends_after_its_last_save(folder):
    """Without wait_for_checkpoint() or close()."""
    script = f"""
import time, torch, zerocore
from zerocore import _core
write = _core.write_file
_core.write_file = lambda *args, **options: (time.sleep(1), write(*args, **options))[1]
config = zerocore.Config(train_batch_size=1, checkpoint=zerocore.config.CheckpointConfig(async_save=True))
engine = zerocore.Engine(torch.nn.Linear(2, 2), config)
engine.save_checkpoint({str(folder)!r})
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=100)
    Checkpoint(folder / "global_step0").verify()


@pytest.fixture
def own_handler():
    """A user's handler of SIGTERM; what it was called with."""
    seen = []

    def handler(number, frame):
        seen.append(number)

    before = signal.signal(signal.SIGTERM, handler)
    yield handler, seen
    signal.signal(signal.SIGTERM, before)


def test_sigterm_is_the_users_again_after_close(folder, own_handler, caplog):
    handler, seen = own_handler
    first, second = build(), build()
    first.resume(folder / "first")
    assert "instead of calling" in caplog.text
    first.resume(folder / "first")
    second.resume(folder / "second")
    first.close()
    assert signal.getsignal(signal.SIGTERM) is not handler
    second.close()
    assert signal.getsignal(signal.SIGTERM) is handler
    third = build()
    third.resume(folder / "first")
    thread = threading.Thread(target=third.close)
    thread.start()
    thread.join()
    os.kill(os.getpid(), signal.SIGTERM)
    assert seen == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) is handler


def test_resume_in_another_thread_says_that_sigterm_does_not_save(folder, own_handler, caplog):
    engine = build()
    thread = threading.Thread(target=engine.resume, args=(folder,))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is own_handler[0]
    assert "Call it in the main thread" in caplog.text
    engine.close()


@pytest.mark.ranks(1, 2)
def test_sigterm_saves_all_engines(folder, world_size):
    engines = [build(micro=2 // world_size, stage=stage) for stage in (0, 2)]
    for number, engine in enumerate(engines):
        engine.resume(folder / str(number))
    if engines[0].rank == world_size - 1:
        os.kill(os.getpid(), signal.SIGTERM)
    train(engines[0])
    with pytest.raises(SystemExit) as stopped:
        train(engines[1])
    assert stopped.value.code == 0
    for number, engine in enumerate(engines):
        assert engine.load_checkpoint(folder / str(number)).path.endswith("global_step1")
        engine.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_load_in_the_loop_takes_the_loop_back(folder, num_workers):
    """As after a loss that is NaN."""

    def loader_engine():
        data = DataConfig(num_workers=num_workers)
        config = Config(train_batch_size=2, micro_batch_size=2, optimizer=OptimizerConfig(lr=0.01), data=data)
        return zerocore.Engine(
            torch.nn.Linear(1, 1), config, training_data=[torch.tensor([float(i)]) for i in range(20)]
        )

    def loop(engine, seen, *, save_at=None, back_at=None, stop_at):
        while True:
            for batch in engine.training_dataloader:
                seen.append(batch.flatten().tolist())
                engine.backward(engine(batch).mean())
                engine.step()
                if engine.global_steps == save_at:
                    engine.save_checkpoint(folder)
                if len(seen) == back_at:
                    engine.load_checkpoint(folder)
                if len(seen) == stop_at:
                    return engine.training_dataloader.state_dict()

    engine, seen = loader_engine(), []
    at = loop(engine, seen, save_at=13, back_at=16, stop_at=18)
    assert engine.global_steps == 15 and at == {"epoch": 1, "step": 5}
    engine.close()
    engine, expected = loader_engine(), []
    loop(engine, expected, stop_at=15)
    assert seen == expected[:13] + seen[13:16] + expected[13:15]
    engine.close()


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("wrap", [iter, RepeatingLoader], ids=["iter", "repeating"])
def test_an_iteration_made_before_a_load_goes_on_after_it(folder, num_workers, wrap):
    """RepeatingLoader makes one when it is made: before the load, in DeepSpeed's usual order."""

    def loader_engine():
        data = DataConfig(num_workers=num_workers)
        config = Config(train_batch_size=2, micro_batch_size=2, optimizer=OptimizerConfig(lr=0.01), data=data)
        torch.manual_seed(0)
        engine = zerocore.Engine(
            torch.nn.Linear(1, 1), config, training_data=[torch.tensor([float(i)]) for i in range(20)]
        )
        return engine, iter(wrap(engine.training_dataloader))

    def go(engine, batches):
        seen = []
        for _ in range(3):
            seen.append(next(batches))
            engine.backward(engine(seen[-1]).mean())
            engine.step()
        return torch.stack(seen)

    engine, batches = loader_engine()
    go(engine, batches)
    engine.save_checkpoint(folder)
    expected = go(engine, batches), engine.module.weight.clone()
    engine.close()
    engine, batches = loader_engine()
    engine.load_checkpoint(folder)
    assert torch.equal(go(engine, batches), expected[0])
    assert torch.equal(engine.module.weight, expected[1])
    engine.close()


BUFFERS = {
    "complex": torch.ones(3, dtype=torch.complex64),
    "sparse": torch.eye(3).to_sparse(),
    "meta": torch.zeros(3, device="meta"),
}


@pytest.mark.parametrize("buffer", BUFFERS.values(), ids=BUFFERS)
def test_buffers_that_cannot_be_saved_are_named(folder, buffer):
    model = torch.nn.Linear(4, 3)
    model.register_buffer("odd", buffer)
    engine = build(model)
    with pytest.raises(UnsupportedError, match=r"odd: got a tensor of .*persistent=False"):
        engine.save_checkpoint(folder)
    engine.close()


def test_checkpoint_wrappers_leave_names_alone(folder):
    wrapper = pytest.importorskip("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    engine = build(torch.nn.Sequential(wrapper.checkpoint_wrapper(torch.nn.BatchNorm1d(4)), torch.nn.Linear(4, 3)))
    train(engine)
    engine.save_checkpoint(folder)
    mean = engine.module[0].running_mean.clone()
    engine.close()
    engine = build(torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3)))
    engine.load_checkpoint(folder)
    assert torch.equal(engine.module[0].running_mean, mean)
    engine.close()


def test_a_scheduler_without_a_state_is_named(folder, caplog):
    class Halving:
        def __init__(self, optimizer):
            self.optimizer = optimizer

        def step(self):
            self.optimizer.param_groups[0]["lr"] /= 2

    engine = build(scheduler=Halving)
    train(engine)
    engine.save_checkpoint(folder)
    engine.load_checkpoint(folder)
    assert "without load_state_dict(), so it begins anew: the learning-rate scheduler" in caplog.text
    with pytest.raises(ConfigError, match="scheduler"):
        engine.load_checkpoint(folder, strict=True)
    engine.close()


def test_deepspeeds_checkpoints_are_told_apart(folder):
    (folder / "global_step1").mkdir()
    (folder / "global_step1" / "mp_rank_00_model_states.pt").write_text("weights")
    (folder / "latest").write_text("global_step1")
    engine = build()
    with pytest.raises(CheckpointError, match=r"got a checkpoint of DeepSpeed.*import-deepspeed"):
        engine.resume(folder)
    engine.close()


def test_what_is_in_no_group_of_the_optimizer_is_frozen(folder):
    """Adapters: the rest of the model need not have requires_grad=False."""

    def adapter(base):
        torch.manual_seed(0)
        model = torch.nn.Sequential(base, torch.nn.Linear(3, 3))
        return build(model, optimizer=lambda _: torch.optim.SGD(model[1].parameters(), lr=0.1))

    engine = adapter(torch.nn.Linear(4, 3))
    train(engine)
    engine.save_checkpoint(folder, exclude_frozen_parameters=True)
    weight = engine.module[1].weight.clone()
    engine.close()
    engine = adapter(torch.nn.Linear(4, 3))
    engine.load_checkpoint(folder)
    assert torch.equal(engine.module[1].weight, weight)
    engine.close()


class Shared(torch.nn.Module):
    """One buffer under two names; `hook` changes the state dict."""

    def __init__(self, hook=None, shared=True):
        super().__init__()
        self.inner = torch.nn.Linear(4, 3)
        self.register_buffer("first", torch.arange(3.0))
        self.register_buffer("second", self.first if shared else torch.zeros(3))
        if hook is not None:
            self._register_state_dict_hook(hook)

    def forward(self, x):
        return self.inner(x)


def renamed(module, state, prefix, metadata):
    for name in list(state):
        state[f"other.{name}"] = state.pop(name)


def copied(module, state, prefix, metadata):
    for name in list(state):
        state[name] = state[name].clone()


@pytest.mark.parametrize("hook", [None, renamed, copied])
def test_buffers_may_be_shared_and_state_dicts_have_hooks(folder, hook):
    model = Shared(hook)
    engine = build(model)
    train(engine)
    engine.save_checkpoint(folder)
    weight = model.inner.weight.clone()
    with torch.no_grad():
        model.first.zero_()
        model.inner.weight.zero_()
    engine.load_checkpoint(folder)
    assert torch.equal(model.second, torch.arange(3.0)) and torch.equal(model.inner.weight, weight)
    engine.close()
    apart = Shared(shared=False)
    engine = build(apart)
    engine.load_checkpoint(folder, load_module_strict=hook is not renamed)
    assert torch.equal(apart.first, torch.arange(3.0)) and torch.equal(apart.inner.weight, weight)
    assert hook is renamed or torch.equal(apart.second, torch.arange(3.0))
    engine.close()
