"""The check of the CUDA backend, on the CPU: its scripts run, fail when they must, and say what they leave out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gpu_check
import pytest
import step_report
import train_bits

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = {"facts", "build", "cpp_tests", "sanitizers"}  # in part or whole


def dry_run(file, steps):
    command = [ROOT / "bench/gpu_check.sh", "--dry", file, "--only", *steps]
    job = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=300, check=False)
    assert job.returncode == 0, job.stdout
    written = json.loads(file.read_text())
    assert written["good"] and written["dry"] and list(written["steps"]) == list(steps)
    for name, step in written["steps"].items():
        assert bool(step["left_out"]) == (name in LEFT_OUT) and not step["failed"]
        assert step["result"] == ("good" if step["rows"] else "left out")
        assert f"\n{name:<14} {step['result']:<9} " in job.stdout
        for row, text in step["rows"]:
            assert f"    {row:<40} {text}\n" in job.stdout
    figures = {name: step["figures"] for name, step in written["steps"].items()}
    assert all(kernel["different"] == 0 and kernel["cases"] > 5 for kernel in figures["kernel_bits"].values())
    return figures


def test_a_dry_run_checks_bits(tmp_path):
    dry_run(tmp_path / "gpu_check.json", ["facts", "kernel_bits", "copies", "sanitizers"])


@pytest.mark.soak
def test_a_dry_run_does_every_step(tmp_path):
    figures = dry_run(tmp_path / "gpu_check.json", gpu_check.STEPS)
    assert figures["bandwidth"]["adam, fp32 gradients"]["of_copy"] > 0
    assert figures["gpt_steps"]["zerocore stage 3"]["memory"]["zerocore"] > 0
    assert figures["two_ranks"] == figures["train_bits"]


def test_a_step_that_fails_is_named_and_the_rest_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "STEPS", {"missing": 60, "cpp_tests": 60})
    monkeypatch.setattr(gpu_check, "LOGS", tmp_path)
    file = tmp_path / "gpu_check.json"
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", str(file), "--dry"])
    assert gpu_check.main() == 1
    steps = json.loads(file.read_text())["steps"]
    assert [step["result"] for step in steps.values()] == ["failed", "left out"]
    out = capsys.readouterr().out
    assert "missing        FAILED" in out and "failed: missing;" in out and "No such file" in out


def test_no_step_begins_when_the_time_is_over():
    assert gpu_check.run_one("facts", 0.0, ["--dry"])["failed"] == ["not run: the 480 s of all steps are over"]


def test_a_command_that_takes_too_long_is_killed_with_what_it_started():
    command = ["sh", "-c", "sleep 60 & echo begun; wait"]
    assert step_report.run_command(command, timeout_s=0.5) == (None, "begun\n\nkilled after 0 s")


def test_a_step_that_raises_has_failed(capsys):
    def step(report, args):
        report.row("a", "b", figure=1)
        raise ValueError("no")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as exit:
        patch.setattr(sys, "argv", ["step.py"])
        step_report.run_step(step)
    assert exit.value.code == 1
    line = capsys.readouterr().out.strip().splitlines()[-1]
    assert json.loads(line.removeprefix(step_report.RESULT)) == {
        "rows": [["a", "b"]],
        "failed": ["ValueError: no"],
        "left_out": [],
        "figures": {"a": {"figure": 1}},
    }


def test_hashes_that_differ_fail():
    wanted = {"stage 0 fp32 adamw": "a", "stage 1 fp32 adamw": "a"}
    for got, failures in ((wanted, 0), (wanted | {"stage 1 fp32 adamw": "b"}, 1), ({}, 2)):
        report = step_report.Report()
        train_bits.report_equal(report, got, wanted)
        assert len(report.failed) == failures
    report = step_report.Report()
    stages_differ = {"stage 0 fp32 adamw": "a", "stage 1 fp32 adamw": "b"}
    train_bits.report_equal(report, stages_differ, stages_differ)
    assert report.failed == ["stages differ in fp32 adamw"]
