"""Compares two files of figures of `make bench`.

    python bench/compare.py BEFORE.json AFTER.json [--least 0.05]

A row is one figure with its samples: a step by that of bare torch beside it, or a time. It has changed above noise when
the 95 % intervals of the two medians do not overlap and the medians differ by more than --least. The intervals hold
what varies within a run. A machine also varies from run to run: measure the two close in time, and a change that
matters twice. Exit code 1: something became slower above noise.
"""

from __future__ import annotations

import argparse
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

BARE = "bare torch"


def rows_of(bench: dict[str, Any]) -> dict[str, tuple[str, list[float]]]:
    """(unit, samples) of each figure, by its name; less is better in all."""
    rows = {}
    for part, found in bench["parts"].items():
        for row in found["rows"]:
            if "engine" in row and row["engine"] != BARE:
                rows[f"{part}: {row['engine']}"] = ("x bare", row["ratios"])
            elif "library" in row:
                size = f" of {row['bytes']} B" if "bytes" in row else ""
                rows[f"{row['operation']}{size}: {row['library']}"] = ("us", [s * 1e6 for s in row["seconds"]])
            elif "benchmark" in row:
                rows[f"{part}: {row['benchmark']}"] = (row["unit"], row["times"])
    return rows


def verdict(before: list[float], after: list[float], least: float) -> str:
    """Whether a figure is "slower" or "faster" above noise; "" when it is not."""
    (low_before, high_before), (low_after, high_after) = map(workload.median_interval, (before, after))
    ratio = statistics.median(after) / statistics.median(before)
    if low_after > high_before and ratio > 1 + least:
        return "slower"
    if high_after < low_before and ratio < 1 / (1 + least):
        return "faster"
    return ""


def main() -> int:
    """Prints a line a figure that is in both files. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--least", type=float, default=0.05, help="smallest change that is told (default 0.05)")
    args = parser.parse_args()
    before, after = (rows_of(json.loads(path.read_text())) for path in (args.before, args.after))
    console = Console(width=None if sys.stdout.isatty() else 140)
    table = Table(box=box.HEAVY_HEAD if console.is_terminal else box.ASCII)
    for column in ("", "unit", "before (95 %)", "after (95 %)", "ratio", ""):
        table.add_column(column, justify="left" if column in ("", "unit") else "right", no_wrap=True)
    verdicts = []
    for name in [name for name in before if name in after]:
        (unit, old), (_, new) = before[name], after[name]
        verdicts.append(verdict(old, new, args.least))
        ratio = statistics.median(new) / statistics.median(old)
        table.add_row(name, unit, workload.summary(old), workload.summary(new), f"{ratio:.3f}", verdicts[-1])
    console.print(table)
    for path, names in ((args.before, before.keys() - after.keys()), (args.after, after.keys() - before.keys())):
        if names:
            print(f"only in {path}: {', '.join(sorted(names))}")
    print(f"{verdicts.count('slower')} slower, {verdicts.count('faster')} faster above noise, of {len(verdicts)}")
    return 1 if "slower" in verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
