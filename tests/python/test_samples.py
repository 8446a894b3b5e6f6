"""Loops as a course on DeepSpeed teaches them, in samples/: only the import, the data and the device are other ones."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", "5", reason="needs Hugging Face: pip install 'transformers>=5'")

SAMPLES = sorted(path.name for path in (Path(__file__).parent / "samples").glob("bert_*.py"))
# Of 64 samples 5 times: steps on 1 and on 2 ranks, which all go through the same data.
STEPS = {"bert_accumulation.py": (40, 80), "bert_checkpointing.py": (20, 40), "bert_fp16.py": (20, 40)}


def path(sample):
    return str(Path(__file__).parent / "samples" / sample)


def check(output, ranks, steps):
    """All ranks end, learn, and hold the same parameters."""
    losses = re.findall(r"epoch (\d) loss ([\d.]+)", output)
    assert len(losses) == 5 * ranks, output
    first, last = (float(next(loss for epoch, loss in losses if epoch == which)) for which in "04")
    assert last < 0.995 * first
    assert re.findall(r"steps (\d+)", output) == [str(steps)] * ranks
    hashes = re.findall(r"params ([0-9a-f]{64})", output)
    assert len(hashes) == ranks and len(set(hashes)) == 1


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("sample", SAMPLES)
def test_under_mpirun(mpirun, sample, ranks):
    done = mpirun(ranks, path(sample), HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout
    check(done.stdout, ranks, STEPS.get(sample, (40, 80))[ranks - 1])
    told = "taken as PyTorch's accumulation" in done.stdout
    assert told == (sample == "bert_accumulation.py")
    assert ("no optimizer was given" in done.stdout) == (sample in ("bert_accumulation.py", "bert_checkpointing.py"))


def test_under_the_launcher_on_four_ranks():
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PMI_", "ZC_"))}
    done = subprocess.run(
        [sys.executable, "-m", "zerocore", "--num_gpus=4", path("bert_zero2.py")],
        capture_output=True,
        text=True,
        timeout=170,
        env={**env, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    check(done.stdout, 4, 160)
