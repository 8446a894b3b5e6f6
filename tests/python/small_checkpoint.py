"""Checkpoints of a few numbers, without torch, and jobs that save them while the disk fails or they are killed.

Their content is a function of the version, so whoever reads one can tell which it is and whether it is whole.

    python small_checkpoint.py JOB     JSON: the arguments of one of the functions in JOBS, and its name under "job"
"""

import array
import functools
import json
import shutil
import sys
from pathlib import Path

import power_cut
from zerocore import _comm, _core, _save
from zerocore._load import Checkpoint, candidates
from zerocore._manifest import Entry, Job, Manifest, Part, State
from zerocore.errors import CheckpointError, IoError

CHUNK_BYTES = 8192  # small, so that a save makes many writes
NUMELS = {"large": 35_000, "odd": 333, "none": 0}  # of each rank


@functools.cache
def values(name, version, numel):
    return array.array("f", [(version * 1009 + len(name) + i) % 4096 for i in range(numel)])


class Small:
    """What one rank saves as a version; keeps the memory alive."""

    def __init__(self, version, rank, size):
        self.version, self.size = version, size
        self.sources = []
        self.memory = []
        for name, numel in NUMELS.items():
            mine = values(name, version, numel * size)[numel * rank : numel * (rank + 1)]
            self.memory.append(mine)
            address, _ = mine.buffer_info()
            begin = numel * rank
            if numel:
                place = (begin, begin + numel, address, 4 * numel)
                self.sources.append(_save.Source(name, "master", "F32", [numel], *place))

    def manifest(self, files, pieces):
        def entry(name):
            parts = [Part(name="master", dtype="F32", pieces=pieces.get((name, "master"), []))]
            return Entry(name=name, shape=[NUMELS[name] * self.size], dtype="F32", role="trained", parts=parts)

        job = Job(world_size=self.size, stage=0, precision={}, threads=1, zerocore="test", torch="none")
        return Manifest(
            format="zerocore-checkpoint",
            version=1,
            job=job,
            global_steps=self.version,
            chunk_bytes=CHUNK_BYTES,
            files=files,
            entries=[entry(name) for name in NUMELS],
            state=State(train_batch_size=1),
        )


def save(saver, comm, dir, version, *, tag=None, background=False, keep_last=None):
    """Saves, and waits for it."""
    small = Small(version, comm.rank, comm.size)
    target = _save.Target(dir=Path(dir), tag=tag or f"global_step{version}", keep_last=keep_last)
    saver.save(target, small.sources, small.manifest, background=background)
    saver.wait()


def save_alone(dir, version, **how):
    """By one rank, this process."""
    comm = _core.self_communicator(timeout_ms=60_000)
    save(_save.Saver(comm, chunk_bytes=CHUNK_BYTES), comm, dir, version, **how)


def version_of(path):
    """Reads all of a checkpoint.

    Raises:
        CheckpointError: it is damaged, or its content is not that of one version.
    """
    checkpoint = Checkpoint(path)
    checkpoint.verify()
    version = checkpoint.manifest.global_steps
    for entry in checkpoint.manifest.entries:
        data = checkpoint.read_part(entry, entry.part("master"))
        if data != values(entry.name, version, entry.numel).tobytes():
            raise CheckpointError(f"{path}: {entry.name} is not that of version {version}")
    return version


def versions(dir):
    """Of every checkpoint that a loader would try, in its order. Raises CheckpointError when one is not whole."""
    return [version_of(path) for path in candidates(Path(dir))]


def job_save(*, dir, version, how, faults):
    """One save. faults: the variables of each rank."""
    comm = _comm.world(timeout_ms=30_000)
    saver = _save.Saver(comm.split(0, comm.rank), chunk_bytes=CHUNK_BYTES)
    comm.barrier("start").wait()
    power_cut.begin(**faults[comm.rank])
    save(saver, comm, dir, version, **how)
    print(f"rank {comm.rank} did {power_cut.count()} operations")


def job_fail_everywhere(*, dir, before, how, action, error, every):
    """Saves again and again, from the same beginning, while one operation of one rank fails: each one in turn."""
    comm = _comm.world(timeout_ms=30_000)
    saver = _save.Saver(comm.split(0, comm.rank), chunk_bytes=CHUNK_BYTES)
    there_before = versions(dir)[:1]
    comm.barrier("looked").wait()
    root = Path(dir).parents[1]  # what the copy `before` is of

    def attempt(**faults):
        """(what save raised or None, the versions found after it)"""
        if comm.rank == 0:
            shutil.rmtree(root)
            shutil.copytree(before, root)
        comm.barrier("ready").wait()
        power_cut.begin(**faults)
        raised = None
        try:
            save(saver, comm, dir, 2, **how)
        except IoError as caught:
            raised = caught
        done = power_cut.count()
        power_cut.begin()
        comm.barrier("done").wait()
        return raised, versions(dir), done

    _, found, number_of_operations = attempt(ZC_FAULTY_ROOT=str(root))
    assert found[0] == 2
    totals = comm.all_reduce(
        [number_of_operations if comm.rank == r else 0 for r in range(comm.size)], _core.ReduceOp.sum, "operations"
    )
    points = 0
    for rank, total in enumerate(totals):
        for at in range(1, total + 1, every):
            mine = power_cut.faults(root, at=at, action=action, error=error) if rank == comm.rank else {}
            mine.pop("LD_PRELOAD", None)
            raised, found, _ = attempt(**mine)
            where = f"rank {comm.rank}, {action} {error} at operation {at} of rank {rank}: {raised!r}, {found}"
            raised_by = comm.all_reduce([int(raised is not None)], _core.ReduceOp.sum, "raised")[0]
            assert raised_by in (0, comm.size), where
            assert raised is None or raised.errno == error, where
            assert found[:1] == [2] or (found[:1] == there_before and raised is not None), where
            points += 1
            save(saver, comm, dir, 3, **how)  # nothing that failed is in the way
            assert versions(dir)[0] == 3, where
            comm.barrier("looked").wait()
    print(f"rank {comm.rank} saw {points} failures")


JOBS = {"save": job_save, "fail_everywhere": job_fail_everywhere}

if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    JOBS[arguments.pop("job")](**arguments)
    assert not ({"torch", "numpy"} & sys.modules.keys()), "these ranks need no torch"
