"""`make bench`: its file of figures, the page made of it, and the comparison of two such files."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import compare
import page
import pytest
import report

ROOT = Path(__file__).resolve().parents[2]
STORED = ROOT / "docs" / "benchmarks.json"


def test_the_page_in_docs_is_that_of_the_figures_beside_it():
    assert (ROOT / "docs" / "benchmarks.md").read_text() == page.text(json.loads(STORED.read_text()))


def test_the_page_has_all_that_make_bench_measures(tmp_path):
    bench = json.loads(STORED.read_text())
    assert list(bench["parts"]) == list(report.PARTS)
    path = page.write(STORED, tmp_path)
    text = path.read_text()
    assert bench["commit"] in text and bench["machine"]["cpu"] in text
    for part in bench["parts"].values():
        assert part["command"] in text.replace("\n", " ")
        for each in part["rows"]:
            assert each.get("engine", each.get("library", each.get("benchmark"))) in text
    for name in ("steps", "collectives"):
        assert f"(benchmarks_{name}.svg)" in text
        assert (tmp_path / f"benchmarks_{name}.svg").stat().st_size > 10_000
        assert (ROOT / "docs" / f"benchmarks_{name}.svg").exists()
    assert max(len(line) for line in text.splitlines() if not line.startswith("|")) <= 120


def test_a_part_is_run_and_its_figures_are_kept_with_the_command(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(report.PARTS, "collectives", "bench_collectives.py --sizes 96 --rounds 2")
    monkeypatch.setattr(sys, "argv", ["report.py", "--out", str(tmp_path), "--parts", "collectives"])
    report.main()
    bench = json.loads((tmp_path / "bench.json").read_text())
    assert bench["machine"]["versions"]["torch"]
    part = bench["parts"]["collectives"]
    assert part["command"] == "python bench/python/bench_collectives.py --sizes 96 --rounds 2"
    assert len(part["rows"]) == 15 and all(len(each["seconds"]) == 2 for each in part["rows"])
    assert "## Collectives" in (tmp_path / "benchmarks.md").read_text()


def test_a_part_that_fails_ends_it(monkeypatch, tmp_path):
    monkeypatch.setitem(report.PARTS, "collectives", "bench_collectives.py --ranks 1")
    with pytest.raises(SystemExit, match="expected 2 or more"):
        report.run("collectives", tmp_path, tmp_path)


GOOGLE = {"name": "a/1", "run_name": "a/1", "run_type": "iteration", "of_ceiling": 0.5, "GB/s": 9, "ceiling_GB/s": 18}


def test_repetitions_of_a_program_become_samples_and_a_wrong_result_ends_it():
    mean = {**GOOGLE, "run_type": "aggregate", "of_ceiling": 0.75}
    rows = report.rows_of_google([GOOGLE, {**GOOGLE, "of_ceiling": 1.0, "GB/s": 18}, mean])
    assert rows == [{"benchmark": "a/1", "by_ceiling": [2.0, 1.0], "GB/s": [9, 18], "ceiling GB/s": [18, 18]}]
    with pytest.raises(SystemExit, match="wrong result"):
        report.rows_of_google([{**GOOGLE, "error_occurred": True, "error_message": "wrong result"}])


def row(samples, by="zerocore", group="group"):
    return compare.Row(group, by, "us", list(samples))


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (range(100, 120), ""),
        (range(108, 128), ""),  # the intervals overlap
        (range(120, 140), "slower"),
        (range(80, 100), "faster"),
    ],
)
def test_a_change_is_told_when_it_is_above_noise(after, expected):
    assert compare.verdict(row(range(100, 120)), row(after), least=0.05) == expected


def test_a_change_below_the_least_is_not_told():
    assert compare.verdict(row([100.0] * 20), row([104.0] * 20), least=0.05) == ""
    assert compare.verdict(row([100.0] * 20), row([104.0] * 20), least=0.03) == "slower"


@pytest.mark.parametrize(("control", "other_group", "expected"), [(2.0, 1.0, ""), (1.1, 2.0, "slower"), (0.5, 1.0, "")])
def test_what_the_machine_changed_too_is_not_told(control, other_group, expected):
    before = {by: row([1.0] * 20, by=by) for by in ("zerocore stage 2", "DDP", "gloo")}
    before["other"] = row([1.0] * 20, by="DDP", group="another size")
    factors = {"zerocore stage 2": 1.5, "DDP": control, "gloo": 9.0, "other": other_group}
    after = {name: row([factors[name]] * 20, by=each.by, group=each.group) for name, each in before.items()}
    found = compare.verdicts(before, after, 0.05)
    assert found == {"zerocore stage 2": expected, "DDP": "control", "gloo": "", "other": "control"}


@pytest.mark.parametrize(("factor", "code"), [(1.0, 0), (0.5, 0), (3.0, 1)])
def test_a_slower_figure_fails_the_comparison(monkeypatch, tmp_path, capsys, factor, code):
    before = json.loads(STORED.read_text())
    after = copy.deepcopy(before)
    changed = next(each for each in after["parts"]["step tiny"]["rows"] if each["engine"] == "zerocore stage 2")
    changed["ratios"] = [factor * ratio for ratio in changed["ratios"]]
    after["parts"]["collectives"]["rows"].pop()
    paths = [tmp_path / "before.json", tmp_path / "after.json"]
    for path, bench in zip(paths, (before, after), strict=True):
        path.write_text(json.dumps(bench))
    monkeypatch.setattr(sys, "argv", ["compare.py", *map(str, paths)])
    assert compare.main() == code
    out = capsys.readouterr().out
    assert f"only in {paths[0]}: barrier: MPI" in out
    assert f"{int(factor > 1)} slower, {int(factor < 1)} faster above noise" in out
