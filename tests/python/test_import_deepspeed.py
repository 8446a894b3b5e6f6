"""DeepSpeed's checkpoints come over bit by bit, and nothing in them is run."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import make_deepspeed_checkpoints as deepspeed
import pytest
import safetensors.torch
import torch
import zerocore
from zerocore import _foreign_pickle
from zerocore._cli import main
from zerocore._import_deepspeed import import_deepspeed
from zerocore._load import open_checkpoint
from zerocore._restore import read_tensor
from zerocore.errors import CheckpointError, ConfigError, UnsupportedError

pytestmark = pytest.mark.usefixtures("one_thread")

CASES = deepspeed.CASES
SOME = ["stage1-bf16-2ranks", "stage2-fp16-2ranks", "stage3-fp32-2ranks", "stage3-bf16-1ranks"]
TIED = "head.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """What DeepSpeed saved: a folder of each case."""
    folder = tmp_path_factory.mktemp("deepspeed")
    with tarfile.open(Path(__file__).parents[1] / "data" / "deepspeed.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    """A function that copies a case, to be damaged. Returns the checkpoint's own folder."""

    def make(case):
        return Path(shutil.copytree(saved / case, tmp_path / case)) / "global_step2"

    return make


def read(folder):
    """Every tensor of a checkpoint: "part/name"."""
    checkpoint = open_checkpoint(folder)
    return {
        f"{part.name}/{entry.name}": read_tensor(checkpoint, entry, part)
        for entry in checkpoint.manifest.entries
        for part in entry.parts
    }


def as_deepspeed_says(case_folder):
    """Its zero_to_fp32 forgets frozen parameters in stage 1; they are what they were."""
    frozen = {
        f"fp32/{name}": p.detach() for name, p in deepspeed.make_model().named_parameters() if not p.requires_grad
    }
    dtype = deepspeed.DTYPES[deepspeed.parse(case_folder.name)[1]]
    frozen = {name: value.to(dtype) for name, value in frozen.items()}
    return frozen | safetensors.torch.load_file(case_folder / "expected.safetensors")


def assert_as_deepspeed_says(got, case_folder):
    expected = as_deepspeed_says(case_folder)
    trained = {name.removeprefix("exp_avg/") for name in expected if name.startswith("exp_avg/")}
    assert len(trained) == 7
    for name, value in expected.items():
        kind, _, param = name.partition("/")
        if param == TIED:
            continue
        key = name if kind != "fp32" else f"{'master' if param in trained else 'value'}/{param}"
        mine = got.pop(key)
        assert torch.equal(mine.to(value.dtype), value), name
        assert mine.dtype == torch.float32 or param not in trained
    assert list(got) == ["value/client/0"]


@pytest.mark.parametrize("case", CASES)
def test_every_bit_comes_over(saved, tmp_path, case):
    stage, dtype, ranks = deepspeed.parse(case)
    imported = import_deepspeed(saved / case, tmp_path / "out")
    assert imported.path == tmp_path / "out" / "global_step2"
    assert (imported.stage, imported.world_size) == (stage, ranks)
    assert_as_deepspeed_says(read(tmp_path / "out"), saved / case)
    entries = open_checkpoint(tmp_path / "out").entries()
    assert entries["table.weight"].ties == [TIED]
    assert [entries[name].role for name in ("frozen.weight", "mask", "count")] == ["frozen", "buffer", "buffer"]
    assert {entries[name].step for name in ("table.weight", "scale")} == {2}
    assert [entries[name].group for name in ("table.weight", "scale", "inner.bias")] == [0, 1, 1]
    assert entries["frozen.weight"].dtype == {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}[dtype]
    open_checkpoint(tmp_path / "out").verify()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("case", SOME)
def test_training_goes_on(saved, folder, case, world_size):
    _, dtype, _ = deepspeed.parse(case)
    comm = zerocore._comm.world()
    if comm.rank == 0:
        import_deepspeed(saved / case, folder)
    comm.barrier("imported").wait()
    model = deepspeed.make_model()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    engine = zerocore.Engine(model, deepspeed.config(case), model_parameters=deepspeed.groups(model))
    path, client_state = engine.load_checkpoint(folder, strict=True)
    assert path == str(folder / "global_step2")
    assert torch.equal(client_state.pop("table"), torch.arange(3))
    assert client_state == {
        "epoch": 3,
        "best": float("inf"),
        "seen": {"tokens": [1, 2, None], "pair": [4, "five"]},
        "nested": {"kept": True},
    }
    expected = as_deepspeed_says(saved / case)
    utils = zerocore.utils
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            assert torch.equal(utils.safe_get_full_fp32_param(param), expected[f"fp32/{name}"])
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(utils.safe_get_full_optimizer_state(param, key), expected[f"{key}/{name}"])
    state = engine.state_dict()
    for name, value in state.items():
        source = expected[f"fp32/{name}"]
        assert torch.equal(value, source.to(value.dtype)) and value.dtype in (source.dtype, deepspeed.DTYPES[dtype])
    assert (engine.global_steps, engine.skipped_steps) == (2, 0)
    optim = sorted((saved / case / "global_step2").glob("*_optim_states.pt"))[0]
    optim = _foreign_pickle.load(optim)["optimizer_state_dict"]
    base = optim["base_optimizer_state" if "base_optimizer_state" in optim else "optimizer_state_dict"]
    for mine, theirs in zip(engine.optimizer.param_groups, base["param_groups"], strict=True):
        assert (mine["weight_decay"], tuple(mine["betas"])) == (theirs["weight_decay"], theirs["betas"])
        assert mine["lr"] == pytest.approx(theirs["lr"], rel=1e-15)
    assert engine.lr_scheduler.state_dict() == {"last_batch_iteration": 1}
    if dtype == "fp16":
        assert engine._params.loss_scale_state == (32.0, 2, -1, 2)
    engine.backward(engine(torch.arange(4 // world_size)))
    engine.step()
    assert engine.was_step_applied()
    engine.close()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("case", deepspeed.OTHER_OPTIMIZERS)
def test_lion_and_adagrad_go_on(saved, folder, case, world_size):
    comm = zerocore._comm.world()
    if comm.rank == 0:
        import_deepspeed(saved / case, folder)
    comm.barrier("imported").wait()
    model = deepspeed.make_model()
    engine = zerocore.Engine(model, deepspeed.config(case), model_parameters=deepspeed.groups(model, case))
    engine.load_checkpoint(folder, strict=True)
    expected = as_deepspeed_says(saved / case)
    utils = zerocore.utils
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            assert torch.equal(utils.safe_get_full_fp32_param(param), expected[f"fp32/{name}"])
            for key in deepspeed.states(case):
                state = utils.safe_get_full_optimizer_state(param, key)
                assert torch.equal(state, expected[f"{key}/{name}"]) and state.any()
    steps = {entry.step for entry in open_checkpoint(folder).manifest.of_role("trained")}
    assert steps == {deepspeed.STEPS} and engine.optimizer.type == case.rpartition("-")[2]
    engine.backward(engine(torch.arange(4 // world_size)))
    engine.step()
    assert engine.was_step_applied()
    engine.close()


@pytest.mark.parametrize("case", deepspeed.OTHER_OPTIMIZERS)
def test_lion_and_adagrad_are_known_by_their_states(copy, tmp_path, case):
    """Of one that the script handed in, the configuration says nothing; names are those of DeepSpeed's CPU variants."""
    folder = copy(case)
    kind = case.rpartition("-")[2]

    def of_state(state):
        if kind == "lion":
            state.pop("exp_avg_sq")
        else:
            state["exp_avg_sq"] = state.pop("sum")

    def change(states):
        optim = states["optimizer_state_dict"]
        base = optim["optimizer_state_dict"] if "stage3" in case else optim["base_optimizer_state"]
        optim["zero_stage"] = deepspeed.parse(case)[0]
        for state in base["state"].values():
            of_state(state)

    for rank in range(2):
        rewrite(folder, f"*_rank_{rank}_*_optim_states.pt", change)
    for file in list(folder.glob("*model_states.pt")):
        rewrite(folder, file.name, lambda states: states["ds_config"].pop("optimizer"))
    import_deepspeed(folder, tmp_path / "out")
    assert open_checkpoint(tmp_path / "out").manifest.optimizer.type == kind
    got, expected = read(tmp_path / "out"), as_deepspeed_says(folder.parent)
    for name in ("table.weight", "scale"):
        (key,) = deepspeed.states(case)
        assert torch.equal(got[f"{key}/{name}"], expected[f"{key}/{name}"])
        assert f"exp_avg_sq/{name}" not in got


def test_what_is_left_out_is_listed(saved, tmp_path, capsys):
    assert main(["import-deepspeed", str(saved / SOME[0] / "global_step2"), str(tmp_path)]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if "left out" in line]
    assert lines == [
        "left out: client_state['arguments']: a argparse.Namespace",
        "left out: client_state['nested']['counter']: a collections.Counter",
        "left out: client_state['nested']['names']: a __builtin__.set",
    ]


def test_it_can_be_exported(saved, tmp_path):
    import_deepspeed(saved / SOME[2], tmp_path / "run")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    model = deepspeed.make_model()
    safetensors.torch.load_model(model, tmp_path / "out" / "model.safetensors")
    expected = as_deepspeed_says(saved / SOME[2])
    assert all(torch.equal(value, expected[f"fp32/{name}"]) for name, value in model.state_dict().items())


def test_a_tag_that_is_there(saved, tmp_path):
    import_deepspeed(saved / SOME[0], tmp_path)
    with pytest.raises(ConfigError, match="there already"):
        import_deepspeed(saved / SOME[2], tmp_path)
    import_deepspeed(saved / SOME[2], tmp_path, force=True)
    assert open_checkpoint(tmp_path).manifest.job.stage == 3


def test_deepspeed_is_not_imported(saved, tmp_path):
    code = "import sys; sys.modules['deepspeed'] = None; from zerocore._cli import main; "
    code += f"sys.exit(main(['import-deepspeed', {str(saved / SOME[0])!r}, {str(tmp_path)!r}]))"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


# Nothing is run


class Runs:
    """A pickle of it runs a command when it is loaded."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def plain(value):
    """The value with None for what is not known here, which cannot be saved."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [plain(each) for each in value]
    return None if isinstance(value, _foreign_pickle.StandIn) else value


def rewrite(folder, pattern, change):
    """Changes what is in a file of a checkpoint. Returns the file."""
    file = sorted(folder.glob(pattern))[0]
    states = plain(_foreign_pickle.load(file))
    change(states)
    torch.save(states, folder.parent / "new.pt")
    os.replace(folder.parent / "new.pt", file)
    return file


@pytest.mark.parametrize("kind", ["model", "optim"])
def test_a_pickle_is_not_run(copy, tmp_path, kind):
    folder, mark = copy(SOME[1]), tmp_path / "ran"
    evil = [
        Runs(os.system, f"touch {mark}"),
        Runs(eval, f"open({str(mark)!r}, 'w')"),
        Runs(getattr, Path(mark), "touch"),
    ]

    def change(states):
        states["evil"] = evil
        if kind == "optim":
            states["optimizer_state_dict"]["zero_stage"] = 2

    file = rewrite(folder, f"*{kind}*", change)
    imported = import_deepspeed(folder, tmp_path / "out")
    assert not mark.exists()
    if kind == "model":
        assert "client_state['evil'][0]: a posix.system" in imported.left_out
    torch.load(file, weights_only=False)
    assert mark.exists()  # it is a pickle that runs


# What is refused


def cut(folder):
    file = folder / "mp_rank_00_model_states.pt"
    file.write_bytes(file.read_bytes()[:-100])


def other_shape(folder):
    rewrite(folder, "mp_rank*", lambda s: s["param_shapes"][0].update({"inner.weight": torch.Size([70, 6])}))


def shorter(folder):
    rewrite(folder, "mp_rank*", lambda s: s["param_shapes"][0].pop("outer.weight"))


def not_in_the_model(folder):
    rewrite(folder, "mp_rank*", lambda s: s["module"].pop("outer.weight"))


def endless_scale(folder):
    rewrite(folder, "*rank_0_*", lambda s: s["optimizer_state_dict"].update(zero_stage=2, loss_scaler=Scaler()))


class Scaler:
    def __init__(self):
        self.dynamic, self.cur_scale = True, float("inf")
        self.cur_iter = self.last_overflow_iter = self.cur_hysteresis = 1


def not_a_dict(folder):
    torch.save([1, 2], folder / "mp_rank_00_model_states.pt")


@pytest.mark.parametrize(
    ("damage", "error", "text"),
    [
        (cut, CheckpointError, "no zip file"),
        (other_shape, CheckpointError, "is not whole|elements"),
        (shorter, CheckpointError, "layout is not known"),
        (not_in_the_model, CheckpointError, r"the model has no outer\.weight"),
        (not_a_dict, CheckpointError, "got a list"),
        (endless_scale, CheckpointError, "loss scale"),
        (lambda f: sorted(f.glob("*rank_1_*"))[0].unlink(), CheckpointError, "of 1 ranks, expected 2"),
        (lambda f: sorted(f.glob("*rank_0_*"))[0].unlink(), CheckpointError, r"ranks \[1\]"),
        (lambda f: (f / "layer_01-model_states.pt").touch(), UnsupportedError, "pipeline"),
        (lambda f: (f / "mp_rank_01_model_states.pt").touch(), UnsupportedError, "tensor"),
        (lambda f: (f / "mp_rank_00_model_states.pt").unlink(), CheckpointError, "model_states"),
        (lambda f: (f.parent / "latest").write_text("../x"), CheckpointError, "latest is damaged"),
        (lambda f: (f.parent / "latest").unlink(), CheckpointError, "got no"),
    ],
)
def test_what_is_no_checkpoint(copy, tmp_path, damage, error, text):
    folder = copy(SOME[1])
    damage(folder)
    with pytest.raises(error, match=text):
        import_deepspeed(folder.parent, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_rewriting_alone_damages_nothing(copy, tmp_path):
    """The damage above is what is found, not the way in which it was made."""
    folder = copy(SOME[1])
    rewrite(folder, "mp_rank*", lambda states: None)
    import_deepspeed(folder.parent, tmp_path / "out")
    assert_as_deepspeed_says(read(tmp_path / "out"), folder.parent)


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed: pip install deepspeed")
def test_of_the_deepspeed_that_is_installed(tmp_path):
    deepspeed.run(SOME, str(tmp_path / "saved"))
    for case in SOME:
        import_deepspeed(tmp_path / "saved" / case, tmp_path / case)
        assert_as_deepspeed_says(read(tmp_path / case), tmp_path / "saved" / case)
