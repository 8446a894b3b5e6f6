"""Saved at each number of ranks and stage, resumed at each other: the bits of a run that never stopped (soak).

The test starts this file as a job of its own, once a number of ranks to save, then once a number to load.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
import time
from pathlib import Path

import pytest

RANKS = (1, 2, 3, 4)
STAGES = (0, 1, 2, 3)
DTYPES = ("fp32", "bf16", "fp16")
STEPS = 2  # before the save, and again after it


@pytest.mark.soak
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_whole_matrix(mpirun, tmp_path, dtype):
    for what, ranks in itertools.product(("save", "load"), RANKS):
        done = mpirun(ranks, __file__, what, str(tmp_path), dtype, timeout=1200)
        assert done.returncode == 0, done.stdout
    hashes = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    found: dict[str, set[str]] = {}
    count = 0
    for by_run in hashes:
        for run, sha256 in by_run.items():
            found.setdefault(run.split()[0], set()).add(sha256)
            count += 1
    assert count == len(found) * (len(RANKS) * len(STAGES)) * (1 + len(RANKS) * len(STAGES))
    assert found.keys() == {"adamw", "momentum", "lion", "adagrad", "muon"}
    assert all(len(each) == 1 for each in found.values()), found
    assert len(set.union(*found.values())) == len(found)


def work(what, folder, dtype):
    """One rank: writes the sha256 of each run's last state to a file."""
    import test_checkpoint as common
    import torch
    import zerocore

    torch.set_num_threads(1)
    optimizers = {
        "adamw": common.ADAMW,
        "momentum": common.MOMENTUM,
        "lion": common.LION,
        "adagrad": common.ADAGRAD,
        "muon": common.MUON,
    }
    found = {}

    def engine_of(name, stage):
        return common.build(stage=stage, dtype=dtype, optimizer=optimizers[name], groups=True, scheduler=True)

    def sha256(engine):
        digest = hashlib.sha256()
        for name, value in sorted(common.state(engine).items()):
            digest.update(name.encode())
            digest.update(bytes(value.contiguous().view(-1).view(torch.uint8).tolist()) if value.numel() else b"")
        return digest.hexdigest()

    for name, stage in itertools.product(optimizers, STAGES):
        if what == "save":
            engine = engine_of(name, stage)
            common.train(engine, "odd", STEPS, dtype=dtype)
            engine.save_checkpoint(folder / f"{name}-{engine.world_size}-{stage}")
            common.train(engine, "odd", STEPS, dtype=dtype)
            found[f"{name} never stopped, {engine.world_size} ranks, stage {stage}"] = sha256(engine)
            engine.close()
            continue
        for saved in sorted(folder.glob(f"{name}-*")):
            engine = engine_of(name, stage)
            path, _ = engine.load_checkpoint(saved, strict=True)
            assert path == str(saved / f"global_step{STEPS}")
            common.train(engine, "odd", STEPS, dtype=dtype)
            found[f"{name} from {saved.name}, {engine.world_size} ranks, stage {stage}"] = sha256(engine)
            engine.close()
    comm = zerocore._comm.world()
    assert len(set(comm.gather_bytes(json.dumps(found).encode(), "compare"))) == 1
    if comm.rank == 0:
        (folder / f"{what}-{comm.size}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    start = time.monotonic()
    work(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
    print(f"{time.monotonic() - start:.0f} s")
