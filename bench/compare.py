"""Compares two files of figures of `make bench`.

    python bench/compare.py BEFORE.json AFTER.json [--least 0.05]

A row is one figure with its samples: a step by that of bare torch beside it, a time, or a kernel's time by its
ceiling's. zerocore's has changed above noise when the 95 % intervals of the two medians do not overlap, and the medians
differ by more than --least and by more than those of each control of its group; of less than 6 samples, by 15 % at
least. Controls are what is measured beside it and is not zerocore's: other engines, MPI, the floors; their changes are
the machine's. (gloo is none: its times vary more than all others.) Exit code 1: something became slower above noise.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "python"))

import workload
from rich import box
from rich.console import Console
from rich.table import Table

OWN = "zerocore"
NO_ROWS = ("bare torch",)  # what others are measured by
NO_CONTROLS = ("gloo",)
FEW_SAMPLES = 6
LEAST_OF_FEW = 0.15


@dataclasses.dataclass
class Row:
    """One figure; less is better. group: what is measured beside each other; by: whose it is."""

    group: str
    by: str
    unit: str
    samples: list[float]

    @property
    def median(self) -> float:
        """Of the samples."""
        return statistics.median(self.samples)


def rows_of(bench: dict[str, Any]) -> dict[str, Row]:
    """The figures by name."""
    found = []
    for part, measured in bench["parts"].items():
        for row in measured["rows"]:
            if "engine" in row:
                found.append(Row(part, row["engine"], "x bare", row["ratios"]))
            elif "library" in row:
                group = row["operation"] + (f" of {row['bytes']} B" if "bytes" in row else "")
                found.append(Row(group, row["library"], "us", [s * 1e6 for s in row["seconds"]]))
            else:
                found.append(Row(part, row["benchmark"], "x ceiling", row["by_ceiling"]))
    return {f"{row.group}: {row.by}": row for row in found if row.by not in NO_ROWS}


def is_control(row: Row) -> bool:
    """Whether a change of it says something of the machine only."""
    return row.group != "kernels" and not row.by.startswith((OWN, *NO_CONTROLS))


def verdict(before: Row, after: Row, least: float) -> str:
    """Whether a figure is "slower" or "faster" by more than a part of `least`, above noise; "" when it is not."""
    (low_before, high_before), (low_after, high_after) = (workload.median_interval(r.samples) for r in (before, after))
    ratio = after.median / before.median
    if low_after > high_before and ratio > 1 + least:
        return "slower"
    if high_after < low_before and ratio < 1 / (1 + least):
        return "faster"
    return ""


def verdicts(before: dict[str, Row], after: dict[str, Row], least: float) -> dict[str, str]:
    """Of each figure that is in both: verdict(), or "control"."""
    drift: dict[str, float] = {}  # the largest change of a control, by group
    found = {}
    both = [name for name in before if name in after]
    for name in both:
        if is_control(before[name]):
            ratio = after[name].median / before[name].median
            group = before[name].group
            drift[group] = max(drift.get(group, 0.0), ratio - 1, 1 / ratio - 1)
    for name in both:
        old, new = before[name], after[name]
        if is_control(old):
            found[name] = "control"
        elif old.by in NO_CONTROLS:
            found[name] = ""
        else:
            few = LEAST_OF_FEW if min(len(old.samples), len(new.samples)) < FEW_SAMPLES else 0.0
            found[name] = verdict(old, new, max(least, few, drift.get(old.group, 0.0)))
    return found


def main() -> int:
    """Prints a line a figure that is in both files. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--least", type=float, default=0.05, help="smallest change that is told (default 0.05)")
    args = parser.parse_args()
    before, after = (rows_of(json.loads(path.read_text())) for path in (args.before, args.after))
    console = Console(width=None if sys.stdout.isatty() else 150)
    table = Table(box=box.HEAVY_HEAD if console.is_terminal else box.ASCII)
    for column in ("", "unit", "before (95 %)", "after (95 %)", "ratio", ""):
        table.add_column(column, justify="left" if column in ("", "unit") else "right", no_wrap=True)
    found = verdicts(before, after, args.least)
    for name, said in found.items():
        old, new = before[name], after[name]
        cells = (workload.summary(old.samples), workload.summary(new.samples), f"{new.median / old.median:.3f}")
        table.add_row(name, old.unit, *cells, said)
    console.print(table)
    for path, names in ((args.before, before.keys() - after.keys()), (args.after, after.keys() - before.keys())):
        if names:
            print(f"only in {path}: {', '.join(sorted(names))}")
    slower, faster, controls = (list(found.values()).count(word) for word in ("slower", "faster", "control"))
    print(f"{slower} slower, {faster} faster above noise, of {len(found) - controls} beside {controls} controls")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
