"""engine.profile(): the trace names all that it promises, and its events nest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import zerocore
from zerocore import _comm, _core, _exchange, _profile
from zerocore.config import OptimizerConfig, ZeroConfig


def make_engine(stage):
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4)))
    zero = ZeroConfig(stage=stage, bucket_numel=2048, unit_numel=1024, persistent_param_numel=0)
    return zerocore.Engine(model, zerocore.Config(micro_batch_size=2, optimizer=OptimizerConfig(), zero=zero))


def train(engine):
    engine.backward(engine(torch.ones(2, 32)).square().mean())
    engine.step()


@pytest.fixture
def traced(tmp_path):
    """A function that profiles one step in a stage, and returns the events and the number of buckets."""
    path = Path(_exchange.broadcast_json(_comm.world(), str(tmp_path / "trace.json"), "path"))

    def run(stage):
        engine = make_engine(stage)
        train(engine)
        with engine.profile(path):
            train(engine)
        engine.comm.barrier("written").wait()
        found = json.loads(path.read_text())
        assert found["otherData"] == {"dropped events": 0}
        return found["traceEvents"], engine._params.core.num_buckets()

    return run


def spans(events, rank):
    return [event for event in events if event["ph"] == "X" and event["pid"] == rank]


def flights(events, rank):
    return [event for event in events if event["ph"] == "b" and event["pid"] == rank]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_bucket_is_reduced_updated_and_gathered(traced, stage, world_size):
    events, num_buckets = traced(stage)
    assert num_buckets > 1
    for rank in range(world_size):
        names = [event["name"] for event in spans(events, rank)]
        in_flight = [event["name"] for event in flights(events, rank)]
        for bucket in range(num_buckets):
            (label,) = {name[len("update ") :] for name in names if name.startswith(f"update bucket {bucket} (")}
            assert (
                names.count(f"copy {label}") == names.count(f"norm of {label}") == names.count(f"update {label}") == 1
            )
            assert in_flight.count(f"reduce {label}") == 1
            assert f"wait reduce {label}" in names
            assert in_flight.count(f"gather {label}") >= 1 and f"wait gather {label}" in names
        assert [n for n in names if n in ("forward", "backward", "step")] == ["forward", "backward", "step"]
        assert {"end of micro-step", "wait used parameters", "wait gradient norm"} <= set(names)
        waited = {name for name in names if name.startswith("wait for unit ")}
        assert {name.replace("wait for", "release") for name in waited} <= set(names)
        assert bool(waited) == (stage == 3)


@pytest.mark.ranks(2)
def test_events_nest_on_each_thread_and_collectives_end(traced, world_size):
    events, _ = traced(3)
    assert {event["pid"] for event in events} == set(range(world_size))
    for rank in range(world_size):
        open_until = []
        for event in sorted(spans(events, rank), key=lambda event: (event["ts"], -event["dur"])):
            begin, end = event["ts"], event["ts"] + event["dur"]
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-3, event  # rounded to a nanosecond
            assert begin >= 0
            open_until.append(end)
        step = max(event["ts"] + event["dur"] for event in spans(events, rank))
        begun = {event["id"]: event["ts"] for event in flights(events, rank)}
        ended = {event["id"]: event["ts"] for event in events if event["ph"] == "e" and event["pid"] == rank}
        assert begun.keys() == ended.keys() and begun
        for flight, begin in begun.items():
            assert 0 <= begin <= ended[flight]
            assert begin <= step


@pytest.mark.ranks(2)
def test_two_profiles_in_turn_hold_a_step_each(traced):
    first, _ = traced(2)
    second, _ = traced(2)
    count = [sum(event["name"] == "forward" for event in events) for events in (first, second)]
    assert count == [2, 2]  # one a rank


@pytest.mark.ranks(2)
def test_a_file_that_cannot_be_written_is_an_error_on_all_ranks():
    engine = make_engine(1)
    with (
        pytest.raises(zerocore.errors.ConfigError, match="cannot write the trace"),
        engine.profile("/no/such/folder/x"),
    ):
        pytest.fail("the block was entered")
    train(engine)


def test_on_one_rank_gradients_are_folded_and_nothing_is_in_flight(tmp_path):
    engine = make_engine(2)
    with engine.profile(tmp_path / "trace.json"):
        train(engine)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["name"] for event in events} >= {"forward", "backward", "step"}
    assert any(event["name"].startswith("fold bucket") for event in events)


def test_a_block_inside_of_another_is_refused_and_one_that_raises_ends(tmp_path):
    engine = make_engine(0)
    nested = pytest.raises(zerocore.errors.ConfigError, match="inside of another")
    with engine.profile(tmp_path / "outer"), nested, engine.profile(tmp_path / "inner"):
        pytest.fail("the block was entered")
    with pytest.raises(KeyError), engine.profile(tmp_path / "failed"):
        raise KeyError
    assert (tmp_path / "failed").read_text() == ""
    with engine.profile(tmp_path / "again"):
        train(engine)
    assert json.loads((tmp_path / "again").read_text())["traceEvents"]


def test_what_finds_no_room_is_counted():
    assert _core.start_trace(1)
    for label in ("first", "second", "third"):
        with _core.TraceScope(label):
            pass
    events, dropped = _core.stop_trace()
    assert [event[5] for event in events] == ["first"] and dropped == 2


def test_ranks_of_one_machine_share_a_clock_and_others_start_at_zero():
    event = [1_500, 2_500, 7, False, "copy", "bucket 0"]
    on = {"main": 7, "dropped": 0, "events": [event]}
    ranks = [on | {"machine": machine, "start": start} for machine, start in (("a", 1_000), ("a", 1_400), ("b", 1_500))]
    times = [event["ts"] for event in _profile.trace(ranks)["traceEvents"] if event["ph"] == "X"]
    assert times == [0.5, 0.5, 0.0]
