"""Nothing that was saved is lost, and nothing torn is found: two ranks that are killed, lose power or fill the disk at
every operation of a save; and files that are damaged anywhere."""

import errno
import json
import random
import re
import shutil
from pathlib import Path

import power_cut
import pytest
import small_checkpoint
from zerocore._load import candidates
from zerocore.errors import CheckpointError

JOB = str(Path(small_checkpoint.__file__))

# What is there before, where the new one goes, and how it is saved.
SCENARIOS = {
    "next": {"before": "global_step1", "keep_last": 1},
    "same": {"before": "best", "tag": "best"},
    "first": {"before": None},
}
SCENARIO = pytest.mark.parametrize("scenario", SCENARIOS)
BACKGROUND = pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])


class Place:
    """A folder in which version 1 stands, or nothing, and what a save of version 2 there needs."""

    def __init__(self, tmp_path, scenario, background):
        how = dict(SCENARIOS[scenario])
        before = how.pop("before")
        self.how = {**how, "background": background}
        self.root = tmp_path / "root"
        self.dir = self.root / "runs" / "one"
        self.beginning = tmp_path / "beginning"
        self.root.mkdir()
        if before is not None:
            small_checkpoint.save_alone(self.dir, 1, tag=before)
        shutil.copytree(self.root, self.beginning)
        self.old = None if before is None else 1

    def restore(self):
        shutil.rmtree(self.root)
        shutil.copytree(self.beginning, self.root)

    def save(self, mpirun, faults):
        """Runs the job; faults: a dict a rank."""
        job = {"job": "save", "dir": str(self.dir), "version": 2, "how": self.how, "faults": faults}
        preload = power_cut.faults(self.root)["LD_PRELOAD"]
        return mpirun(2, JOB, json.dumps(job), timeout=60, LD_PRELOAD=preload)

    def count(self, mpirun):
        """How many operations each rank does."""
        done = self.save(mpirun, [{"ZC_FAULTY_ROOT": str(self.root)}] * 2)
        assert done.returncode == 0, done.stdout
        counts = dict(re.findall(r"rank (\d) did (\d+) operations", done.stdout))
        self.restore()
        return [int(counts[str(rank)]) for rank in range(2)]

    def check(self, dir, *, returned=False):
        """Whole and not lost; the version that a loader finds. returned: the save had come to its end."""
        found = small_checkpoint.versions(dir)
        version = found[0] if found else None
        assert version == 2 or (version == self.old and not returned), found
        return version

    def check_next_save(self, dir):
        """What a crash left is in nobody's way, and goes."""
        tag = self.how.get("tag")
        small_checkpoint.save_alone(dir, 3, tag=tag, keep_last=1)
        assert small_checkpoint.versions(dir)[0] == 3
        names = {path.name for path in dir.iterdir()}
        assert {tag or "global_step3", "latest"} <= names <= {tag or "global_step3", "latest"}, names


def spread(points, number):
    """`number` of the points, the same each time, and always the last."""
    if len(points) <= number:
        return points
    return [points[i * (len(points) - 1) // (number - 1)] for i in range(number)]


def kill_sweep(place, mpirun, number):
    points = [(rank, at) for rank, count in enumerate(place.count(mpirun)) for at in range(1, count + 1)]
    found = []
    for rank, at in spread(points, number):
        faults = [{}, {}]
        faults[rank] = power_cut.faults(place.root, at=at, action="tear" if at % 2 else "kill")
        done = place.save(mpirun, faults)
        assert done.returncode != 0, f"rank {rank} was not killed at operation {at}: {done.stdout}"
        found.append(place.check(place.dir))
        if len(found) % 4 == 1:
            place.check_next_save(place.dir)
        place.restore()
    return found


def power_cut_sweep(place, mpirun, tmp_path, *, every):
    disk = power_cut.Disk(place.root)
    journal = tmp_path / "journal"
    done = place.save(mpirun, [power_cut.faults(place.root, journal=journal)] * 2)
    assert done.returncode == 0, done.stdout
    operations = power_cut.read_journal(journal)
    now = power_cut.tree(place.root)
    found = []
    for number, operation in enumerate(operations, 1):
        disk.apply(operation)
        last = number == len(operations)
        if number % every and not last:
            continue
        for name, names, data in power_cut.cases(number):
            root = tmp_path / f"cut_{number}_{name}"
            disk.build(root, names=names, data=data)
            assert not last or name != "all_kept" or power_cut.tree(root) == now
            found.append(place.check(root / "runs" / "one", returned=last))
            if len(found) % 20 == 1:
                place.check_next_save(root / "runs" / "one")
            shutil.rmtree(root)
    return found


def damage_sweep(tmp_path, number):
    """Flips, cuts out or deletes at random; every time it is found, and the checkpoint before is loaded."""
    good = tmp_path / "good"
    for version in (1, 2):
        small_checkpoint.save_alone(good, version)
    toss = random.Random(0)
    for _ in range(number):
        shutil.copytree(good, tmp_path / "dir")
        folder = tmp_path / "dir" / "global_step2"
        path = toss.choice(sorted(folder.iterdir()))
        data = bytearray(path.read_bytes())
        begin = toss.randrange(len(data))
        end = min(len(data), begin + toss.choice([1, 2, 100, CHUNK, len(data)]))
        how = toss.choice(["flip", "cut", "delete", "grow"])
        if how == "flip":
            data[begin:end] = bytes(byte ^ toss.randrange(1, 256) for byte in data[begin:end])
        elif how == "cut":
            del data[begin:end]
        elif how == "grow":
            data[begin:begin] = bytes(end - begin)
        path.unlink()
        if how != "delete":
            path.write_bytes(data)
        with pytest.raises(CheckpointError, match=re.escape(str(folder))):
            small_checkpoint.version_of(folder)
        assert [each.name for each in candidates(tmp_path / "dir")] == ["global_step2", "global_step1"] or not (
            folder / "manifest.json"
        ).exists()
        assert small_checkpoint.version_of(tmp_path / "dir" / "global_step1") == 1
        shutil.rmtree(tmp_path / "dir")


CHUNK = small_checkpoint.CHUNK_BYTES


def fail_everywhere(place, mpirun, *, action, error, every):
    job = {
        "job": "fail_everywhere",
        "dir": str(place.dir),
        "before": str(place.beginning),
        "how": place.how,
        "action": action,
        "error": error,
        "every": every,
    }
    preload = power_cut.faults(place.root)["LD_PRELOAD"]
    done = mpirun(2, JOB, json.dumps(job), timeout=300, LD_PRELOAD=preload)
    assert done.returncode == 0, done.stdout
    points = re.findall(r"saw (\d+) failures", done.stdout)
    assert len(points) == 2, done.stdout
    return int(points[0])


def test_killed_at_some_operations(tmp_path, mpirun):
    assert set(kill_sweep(Place(tmp_path, "same", False), mpirun, 6)) == {1, 2}


def test_power_cut_at_some_operations(tmp_path, mpirun):
    assert set(power_cut_sweep(Place(tmp_path, "next", True), mpirun, tmp_path, every=9)) == {1, 2}


def test_disk_full_at_some_operations(tmp_path, mpirun):
    assert fail_everywhere(Place(tmp_path, "next", False), mpirun, action="fail", error=errno.ENOSPC, every=7) >= 10


def test_some_damage_is_found(tmp_path):
    damage_sweep(tmp_path, 40)


@pytest.mark.soak
@SCENARIO
@BACKGROUND
def test_killed_at_every_operation(tmp_path, mpirun, scenario, background):
    place = Place(tmp_path, scenario, background)
    found = kill_sweep(place, mpirun, 10_000)
    assert len(found) >= 50 and set(found) == {place.old, 2}


@pytest.mark.soak
@SCENARIO
@BACKGROUND
def test_power_cut_at_every_operation(tmp_path, mpirun, scenario, background):
    place = Place(tmp_path, scenario, background)
    found = power_cut_sweep(place, mpirun, tmp_path, every=1)
    assert len(found) >= 300 and set(found) == {place.old, 2}


@pytest.mark.soak
@SCENARIO
@BACKGROUND
@pytest.mark.parametrize(
    ("action", "error"),
    [("fail", errno.ENOSPC), ("fail_on", errno.ENOSPC), ("fail_on", errno.EIO), ("fail_on", errno.EROFS)],
    ids=["full once", "full", "mount lost", "read-only"],
)
def test_disk_fails_at_every_operation(tmp_path, mpirun, scenario, background, action, error):
    place = Place(tmp_path, scenario, background)
    assert fail_everywhere(place, mpirun, action=action, error=error, every=1) >= 50


@pytest.mark.soak
def test_any_damage_is_found(tmp_path):
    damage_sweep(tmp_path, 2000)
