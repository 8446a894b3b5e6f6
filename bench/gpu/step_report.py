"""What a step of gpu_check tells. Importing it lets the step import what lies in examples and bench/python."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
for _folder in ("examples", "bench/python"):
    sys.path.insert(0, str(ROOT / _folder))

RESULT = "gpu_check-result "  # begins the line of output that holds a step's report


@dataclasses.dataclass
class Report:
    """Rows of the table, what failed, and what was left out; figures: for the JSON file."""

    rows: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    failed: list[str] = dataclasses.field(default_factory=list)
    left_out: list[str] = dataclasses.field(default_factory=list)
    figures: dict[str, Any] = dataclasses.field(default_factory=dict)

    def row(self, name: str, text: str, **figures: Any) -> None:
        """A row of the table; the figures go under its name."""
        self.rows.append((name, text))
        if figures:
            self.figures[name] = figures

    def check(self, good: bool, text: str) -> None:
        """Something that must hold; text: what is wrong where it does not."""
        if not good:
            self.failed.append(text)


def run_step(step: Callable[[Report, argparse.Namespace], None], *flags: str) -> None:
    """The main program of a step; flags: options without values beside --dry. Exits with 1 when something failed."""
    parser = argparse.ArgumentParser()
    for flag in ("--dry", *flags):
        parser.add_argument(flag, action="store_true")
    args = parser.parse_args()
    report = Report()
    try:
        step(report, args)
    except Exception as error:
        traceback.print_exc()
        report.failed.append(f"{type(error).__name__}: {error}")
    print(f"\n{RESULT}{json.dumps(dataclasses.asdict(report))}", flush=True)
    sys.exit(1 if report.failed else 0)


def run_command(command: list[str], *, timeout_s: float, **env: str) -> tuple[int | None, str]:
    """Runs a command in the repository's root; it is killed, with all it started, when it takes too long.

    Returns:
        Its exit code, None where it was killed, and what it printed.
    """
    job = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = job.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        output, _ = job.communicate()
        return None, f"{output}\nkilled after {timeout_s:.0f} s"
    return job.returncode, output


def tail(output: str, lines: int = 8) -> str:
    """The end of an output."""
    return "\n".join(output.strip().splitlines()[-lines:])
