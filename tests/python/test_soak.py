"""Long runs: nothing grows. Deselected by default; `make soak` runs them."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import os
import threading
import time
from pathlib import Path

import pytest
import torch
import zerocore
from test_zero import TOKENS, Blocks, config, train
from zerocore import _comm, zero
from zerocore.config import CheckpointConfig

pytestmark = pytest.mark.soak


def resident_mib():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # holes in the heap are not what this is after
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Rss:")) / 1024


def left_behind():
    own_segments = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/" in line]
    return threading.active_count(), len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), own_segments


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_hundred_engines_leave_nothing(stage, world_size):
    def once():
        with zero.Init(enabled=stage == 3):
            model = Blocks(num_blocks=4, width=256)
        engine = zerocore.Engine(model, config(stage=stage))
        train(engine, 2)
        engine.close()

    for _ in range(10):
        once()
    memory, things = resident_mib(), left_behind()
    for _ in range(100):
        once()
    assert left_behind() == things
    assert resident_mib() - memory < 8


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("stage", [2, 3])
def test_two_thousand_steps_take_no_more_memory(stage, world_size):
    torch.manual_seed(0)
    engine = zerocore.Engine(Blocks(num_blocks=4, width=512), config(stage=stage, prefetch_numel=1 << 20))
    train(engine, 200)
    memory, things = resident_mib(), left_behind()
    for i in range(1800):
        train(engine)
        if i % 50 == 0:
            with torch.no_grad():
                engine(TOKENS)
    assert left_behind() == things
    assert resident_mib() - memory < 8


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("background", [False, True])
def test_fifty_saves_leave_nothing(background, world_size, tmp_path):
    folder = _comm.world().gather_bytes(str(tmp_path).ljust(512).encode(), "folder")[0].decode().strip()
    saving = CheckpointConfig(async_save=background, keep_last=2)
    settings = dataclasses.replace(config(stage=2), checkpoint=saving)
    engine = zerocore.Engine(Blocks(num_blocks=4, width=512), settings)

    def save():
        train(engine, 1)
        engine.save_checkpoint(folder)

    for _ in range(3):
        save()
    engine.wait_for_checkpoint()
    before, others = resident_mib(), left_behind()
    for _ in range(50):
        save()
    engine.wait_for_checkpoint()
    deadline = time.monotonic() + 5
    while left_behind() != others and time.monotonic() < deadline:
        time.sleep(0.01)  # the kernel takes a moment to end a thread that was joined
    assert left_behind() == others
    assert resident_mib() - before < 8
    engine.close()
