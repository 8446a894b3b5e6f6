"""The examples: what train_gpt.py prints, that its bits do not depend on the ranks, what it says about bad flags."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import gpt
import jobs
import proof
import pytest
import text
import torch
import train_gpt
import zerocore

EXAMPLES = Path(train_gpt.__file__).parent
TRAIN = train_gpt.__file__
SMALL = ["--layers", 2, "--hidden", 64, "--heads", 2, "--seq", 32]
FIVE_STEPS = [*SMALL, "--steps", 5, "--micro-batch", 1, "--global-batch", 8]


def train(mpirun, ranks, *flags, out):
    job = mpirun(ranks, TRAIN, *map(str, flags), "--out", str(out), timeout=170)
    assert job.returncode == 0, job.stdout
    return job.stdout


def sha256_of(output):
    return re.search(r"^params sha256: ([0-9a-f]{64}) \([\w ]+, 1 torch thread a rank\)$", output, re.M)[1]


# 3 ranks have micro-batches for 2 of them only in the last micro-step.
@pytest.mark.parametrize(
    ("dtype", "runs"),
    [
        ("fp32", [(1, 0, 10**6), (2, 1, 3000), (3, 2, 10**6)]),
        ("bf16", [(1, 1, 10**6), (3, 3, 3000)]),
        ("fp16", [(1, 2, 3000), (2, 0, 10**6)]),
    ],
)
def test_the_same_bits_on_any_number_of_ranks(mpirun, tmp_path, dtype, runs):
    values = {}
    for ranks, stage, bucket_numel in runs:
        flags = ["--dtype", dtype, "--stage", stage, "--bucket-numel", bucket_numel]
        output = train(mpirun, ranks, *FIVE_STEPS, *flags, out=tmp_path)
        assert f"{dtype}, ZeRO-{stage}, {ranks} rank" in output
        values[ranks, stage, bucket_numel] = sha256_of(output)
    assert len(set(values.values())) == 1, values


def test_what_changes_memory_only_changes_no_bit(mpirun, tmp_path):
    flags = ["--dtype", "bf16", "--compute-dtype", "fp32"]
    plain = train(mpirun, 1, *FIVE_STEPS, *flags, "--stage", 1, out=tmp_path)
    assert "bf16 computed in fp32, ZeRO-1, 1 rank" in plain
    sparing = ["--stage", 3, "--persistent", 0, "--prefetch", 0, "--checkpointing"]
    assert sha256_of(train(mpirun, 2, *FIVE_STEPS, *flags, *sparing, out=tmp_path)) == sha256_of(plain)


def test_stage_3_holds_one_block_at_a_time(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", "--stage", "3", "--dtype", "fp32", "--prefetch", "0"])
    config = train_gpt.engine_config(train_gpt.parse_args())
    with zerocore.zero.Init(config=config):
        model = gpt.GPT(layers=8, hidden=64, heads=2, seq=8)
    engine = zerocore.Engine(model, config)
    gathered = [engine.memory_report()["gathered_parameters"]]
    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: gathered.append(engine.memory_report()["gathered_parameters"]))
    with torch.no_grad():
        engine(torch.zeros(1, 8, dtype=torch.long))
    gathered.append(engine.memory_report()["gathered_parameters"])
    engine.close()
    assert gathered[0] == gathered[-1] == 0
    matrices = 4 * (256 * 64 + 12 * 64 * 64)  # bytes of the embedding and a block
    assert all(matrices <= each < 1.1 * matrices for each in gathered[1:-1])


def test_a_run_shows_progress_and_learns(mpirun, tmp_path):
    flags = ["--steps", 60, "--dtype", "fp32", "--micro-batch", 8]
    output = train(mpirun, 2, *SMALL, *flags, out=tmp_path / "new folder")
    assert re.search(
        r"^step 60/60  loss \d\.\d{3}  +[\d,]+ tokens/s  grad norm \d+\.\d{3}  loss scale 1  \d+ MiB a rank  ETA 0:00$",
        output,
        re.M,
    ), output
    loss = float(re.search(r"^validation loss: (\d\.\d{4}) nats a byte", output, re.M)[1])
    assert loss < 3.8  # of ln 256 = 5.5 at the start
    assert "\nsample:\ndef " in output
    assert (tmp_path / "new folder" / "train_gpt_loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_deepspeed_config_replaces_the_flags(mpirun, tmp_path):
    sample = json.loads((EXAMPLES / "ds_config.json").read_text())
    sample["scheduler"]["params"] |= {"total_num_steps": 5, "warmup_num_steps": 2}
    changed = tmp_path / "ds_config.json"
    changed.write_text(json.dumps(sample))
    flags = [*SMALL, "--steps", 5, "--seed", 1234]  # 1234 is the engine's own seed, which the file leaves alone
    from_file = train(mpirun, 1, *flags, "--config", changed, out=tmp_path)
    assert "fp32, ZeRO-2, 1 rank" in from_file
    assert sha256_of(from_file) == sha256_of(train(mpirun, 1, *flags, "--dtype", "fp32", out=tmp_path))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--hidden 100", r"--hidden 100 does not divide over --heads 4: expected a multiple of twice as many, 8"),
        ("--steps 0", r"--steps: got 0, expected a number >= 1"),
        ("--micro-batch -1", r"--micro-batch: got -1, expected"),
        ("--text /nowhere", r"/nowhere: no such file or folder"),
        ("--config /nowhere.json", r"/nowhere.json: no such file or folder"),
        ("--config {config} --stage 1", r"got --stage and --config .*Leave one of them out"),
        ("--config {config} --checkpointing", r"got --checkpointing and --config .*Leave one of them out"),
        ("--text {empty}", r"--text: got 0 bytes to train on and 0 held out, expected more than --seq 128 of each"),
    ],
)
def test_bad_flags(monkeypatch, tmp_path, flags, message):
    filled = flags.format(config=EXAMPLES / "ds_config.json", empty=tmp_path)
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *filled.split()])
    with pytest.raises(SystemExit, match=f"^train_gpt.py: {message}"):
        train_gpt.main()


def test_what_the_engine_refuses_ends_the_example_with_its_message(mpirun):
    job = mpirun(1, TRAIN, "--stage", "4", timeout=60)
    assert job.returncode == 1
    assert re.search(r"^train_gpt.py: \[config\] zero.stage: got 4, expected", job.stdout, re.M)
    assert "Traceback" not in job.stdout


def test_every_20th_file_is_held_out_and_hidden_ones_are_left_out(tmp_path):
    for i in range(25):
        (tmp_path / f"{i:02}.txt").write_text(f"<{i}>")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "x").write_text("hidden")
    train_text, validation_text = text.load_text(tmp_path)
    assert validation_text == b"<19>"
    assert train_text == b"\n".join(b"<%d>" % i for i in range(25) if i != 19)


def test_of_few_files_the_last_is_held_out(tmp_path):
    for name in "abc":
        (tmp_path / name).write_text(name)
    assert text.load_text(tmp_path) == (b"a\nb", b"c")


def test_the_default_text_is_the_standard_librarys_source():
    train_text, validation_text = text.load_text()
    assert len(train_text) > 2e6 and len(validation_text) > 1e5
    assert b"\nimport " in train_text and b"\ndef " in validation_text


def test_windows_are_followed_by_their_next_byte():
    windows = text.Windows(b"abcdefgh", seq=3)
    assert len(windows) == 2
    assert [bytes(each.tolist()) for each in windows[1]] == [b"def", b"efg"]


def tiny_gpt():
    torch.manual_seed(0)
    return gpt.GPT(layers=2, hidden=16, heads=2, seq=12)


def test_the_gpt_sees_no_future_and_knows_positions():
    model = tiny_gpt()
    tokens = torch.full((1, 12), 65)
    tokens[0, 0] = 66
    logits = model(tokens)
    changed = tokens.clone()
    changed[0, 7] = 66
    assert torch.equal(model(changed)[:, :7], logits[:, :7])
    assert not torch.allclose(model(changed)[:, 7:], logits[:, 7:])
    moved = tokens.roll(1)
    assert not torch.allclose(model(moved)[0, -1], logits[0, -1])


def test_the_gpts_loss_is_the_cross_entropy_of_its_logits():
    model = tiny_gpt()
    tokens, targets = torch.randint(0, 256, (2, 3, 12))
    log_probabilities = model(tokens).log_softmax(-1).gather(2, targets[:, :, None])
    assert model(tokens, targets).item() == pytest.approx(-log_probabilities.mean().item(), rel=1e-6)


def test_generate_continues_the_prompt_beyond_the_longest_sequence():
    sample = tiny_gpt().generate(b"def ", count=20, seed=1)
    assert sample.startswith(b"def ") and len(sample) == 24
    assert sample == tiny_gpt().generate(b"def ", count=20, seed=1) != tiny_gpt().generate(b"def ", count=20, seed=2)


def test_a_heads_number_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="got hidden 20, heads 4"):
        gpt.GPT(layers=1, hidden=20, heads=4, seq=8)


@pytest.mark.parametrize(("last", "code"), [("a", 0), ("b", 1)])
def test_the_proof_fails_when_one_value_differs(capsys, last, code):
    found = {ranks: {"zerocore stage 0": "a", "zerocore stage 2": "a", "DDP": str(ranks)} for ranks in proof.RANKS}
    found[4]["zerocore stage 2"] = last
    assert proof.report(found) == code
    output = capsys.readouterr().out
    assert f"zerocore: 6 runs, {'one value' if code == 0 else '2 different values'}" in output
    assert "DDP: 3 runs, 3 different values" in output


def test_the_proof():
    assert (proof.RANKS, proof.STAGES) == ((1, 2, 4), (0, 1, 2, 3))
    runs = [dict(jobs.run_job(ranks, proof.__file__, "--worker", timeout_s=170)) for ranks in (1, 4)]
    for run in runs:
        assert list(run) == [*(f"zerocore stage {stage}" for stage in proof.STAGES), "DDP", "FSDP2"]
    assert len({sha for run in runs for name, sha in run.items() if name.startswith("zerocore")}) == 1


def job_script(tmp_path, code):
    script = tmp_path / "job.py"
    script.write_text(
        f"import sys, time\nsys.path.insert(0, {str(EXAMPLES)!r})\nfrom jobs import send_result\n{code}\n"
    )
    return str(script)


def test_a_jobs_results_come_back(tmp_path):
    script = job_script(tmp_path, "print('noise', end=''); send_result([sys.argv[1], 1.5])")
    assert jobs.run_job(2, script, "x", timeout_s=60) == [["x", 1.5]] * 2


def test_a_job_that_fails_shows_the_end_of_its_output(tmp_path):
    script = job_script(tmp_path, "print('the reason'); sys.exit(3)")
    with pytest.raises(jobs.JobError, match=r"ended with exit code \d+. The end of its output:\n(.*\n)*the reason"):
        jobs.run_job(1, script, timeout_s=60)


def test_a_job_ends_with_the_process_that_started_it(tmp_path):
    script = job_script(
        tmp_path, f"open({str(tmp_path / 'pid')!r}, 'w').write(str(__import__('os').getpid()))\ntime.sleep(600)"
    )
    start = f"import sys; sys.path.insert(0, {str(EXAMPLES)!r}); import jobs; jobs.run_job(1, {script!r}, timeout_s=99)"
    starter = subprocess.Popen([sys.executable, "-c", start])
    try:
        wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "the rank to start")
        rank = Path("/proc") / (tmp_path / "pid").read_text()
        assert rank.exists()
        starter.terminate()
        assert starter.wait(timeout=30) == 128 + signal.SIGTERM
        wait_until(lambda: not rank.exists(), "the rank to end")
    finally:
        starter.kill()


def wait_until(done, what):
    deadline = time.monotonic() + 30
    while not done():
        assert time.monotonic() < deadline, f"waited 30 s for {what}"
        time.sleep(0.05)


def test_a_job_that_hangs_is_ended(tmp_path):
    script = job_script(tmp_path, "print('waiting', flush=True); time.sleep(600)")
    with pytest.raises(jobs.JobError, match=r"did not end within 3 s(.*\n)*waiting"):
        jobs.run_job(2, script, timeout_s=3)
