"""Makes the page of a file of figures of `make bench`.

    python bench/page.py FIGURES.json FOLDER

It writes FOLDER/benchmarks.md and the plots that it shows. docs/benchmarks.md is that of docs/benchmarks.json.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib

sys.path.insert(0, str(Path(__file__).resolve().parent / "python"))

import workload
from matplotlib.figure import Figure

Rows = list[dict[str, Any]]
FLOOR = "floor"
COLUMNS = 120


def table(header: list[str], lines: list[list[str]]) -> list[str]:
    """Markdown; all columns but the first are numbers."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return [f"| {' | '.join(line)} |" for line in (header, rule, *lines)] + [""]


def engine_lines(rows: Rows) -> list[str]:
    """Steps, engine by engine."""
    lines = [
        [row["engine"], f"{row['step_ms']:.1f}", f"{row['tokens_per_s']:.0f}", workload.summary(row["ratios"])]
        for row in rows
    ]
    return table(["engine", "step, ms", "tokens/s", "by bare torch's (95 %)"], lines)


def size_name(num_bytes: int) -> str:
    """1 KiB, 1 MiB, ..."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes % unit == 0:
            return f"{num_bytes // unit} {name}"
    return f"{num_bytes} B"


def collective_lines(rows: Rows) -> list[str]:
    """A table an operation: a line a library, a column a size."""
    out = []
    for operation in dict.fromkeys(row["operation"] for row in rows):
        of = [row for row in rows if row["operation"] == operation]
        libraries = dict.fromkeys(row["library"] for row in of)
        if "bytes" not in of[0]:
            lines = [[row["library"], workload.summary([s * 1e6 for s in row["seconds"]], 1)] for row in of]
            out += table([operation, "us (95 %)"], lines)
            continue
        sizes = dict.fromkeys(row["bytes"] for row in of)
        at = {(row["library"], row["bytes"]): row for row in of}
        lines = [[name, *(cell(at[name, size]) for size in sizes)] for name in libraries]
        out += table([f"{operation}: us, busbw in GB/s", *map(size_name, sizes)], lines)
    return out


def cell(row: dict[str, Any]) -> str:
    """A collective's time and the bandwidth of its links."""
    return f"{row['time_us']:.{0 if row['time_us'] >= 100 else 1}f}, {row['busbw_GBps']:.2f}"


def kernel_lines(rows: Rows) -> list[str]:
    """What the kernels make of the memory's bandwidth."""
    lines = []
    for row in rows:
        rates = [f"{statistics.median(row[name]):.1f}" for name in ("GB/s", "ceiling GB/s")]
        lines.append([f"`{row['benchmark']}`", *rates, f"{1 / statistics.median(row['by_ceiling']):.2f}"])
    return table(["", "GB/s", "ceiling, GB/s", "of the ceiling"], lines)


def steps_of(bench: dict[str, Any]) -> dict[str, Any]:
    """The parts that time steps, one a size."""
    return {name: part for name, part in bench["parts"].items() if name.startswith("step ")}


def text(bench: dict[str, Any]) -> str:
    """The page."""
    machine, parts = bench["machine"], bench["parts"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    out = [
        "# Benchmarks",
        "",
        "Made by `make bench` and `make bench-page`; not to be edited.",
        "",
        f"{bench['date']}, commit {bench['commit']}. {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['memory_GiB']} GiB; {machine['system']}; {versions}. Load before the start: "
        f"{machine['load_before']} runnable processes. All took "
        f"{sum(part['took_s'] for part in parts.values()):.0f} s.",
        "",
        "A time is a median. In brackets stands where that lies with a confidence of 95 %, as far as what varies "
        "within a run goes. `python bench/compare.py BEFORE.json AFTER.json` tells which figures of zerocore's have "
        "changed by more than that, and by more than those of its peers have.",
        "",
    ]
    steps = steps_of(bench)
    if steps:
        out += [
            "## Steps",
            "",
            "Whole training steps, all engines in one job in alternating blocks. The last column is what counts: the "
            "median of the ratios to a block of bare torch right beside each block of the engine. Bare torch trains "
            "the same model on the same ranks, side by side, without any communication but MPI's barrier a step.",
            "",
            "![steps](benchmarks_steps.svg)",
            "",
        ]
    for name, part in steps.items():
        settings = part["settings"]
        out += [
            f"### {name.removeprefix('step ').capitalize()}",
            "",
            f"{workload.describe(settings)}; {settings['blocks']} rounds of {settings['steps']} steps. "
            f"`{part['command']}`",
            "",
            *engine_lines(part["rows"]),
        ]
    if "collectives" in parts:
        part = parts["collectives"]
        out += [
            "## Collectives",
            "",
            f"{part['settings']['ranks']} ranks, fp32; all results verified. Sizes are of the whole buffer, busbw is "
            "nccl-tests'. zerocore's all_reduce is its reduce_scatter and all_gather. The floor is the additions and "
            "copies alone, between buffers that all ranks have mapped, without synchronisation. "
            f"`{part['command']}`",
            "",
            "![collectives](benchmarks_collectives.svg)",
            "",
            *collective_lines(part["rows"]),
        ]
    if "processes" in parts:
        part = parts["processes"]
        out += [
            "### Without Python",
            "",
            "The same between processes of C++. The floor is measured in turns with them, to the end of the slowest "
            f"rank. `{part['command']}`",
            "",
            *collective_lines(part["rows"]),
        ]
    if "kernels" in parts:
        part = parts["kernels"]
        out += [
            "## Kernels",
            "",
            "50 million elements, AdamW 200 million. The ceiling is a loop that reads and writes the same arrays and "
            f"computes next to nothing, measured in turns with the kernel. `{part['command']}`",
            "",
            *kernel_lines(part["rows"]),
        ]
    out += [PROFILE]
    return "\n".join(map(wrapped, out))


PROFILE = """## Where a step's time goes

`engine.profile(file)` records the steps of a block on all ranks, and

    make bench-step ARGS='--size short --engines "zerocore stage 3" --no-memory --profile build/step.json'

one step of the benchmark. https://ui.perfetto.dev shows the file: a process a rank; in it what each thread did
(forward, backward, step, and inside of them copies of gradients, waits, the norm and updates by bucket, in stage 3
gathers and releases by unit), and a row for each collective, by bucket, from its call to its end. What a rank waits for
is the collective that the wait is named after, or the rank that comes to it last.
"""


def wrapped(line: str) -> str:
    """A paragraph in lines as long as those of other docs; all else as it is."""
    if "\n" in line or line.startswith(("#", "!", "|")):
        return line
    out, rest = [], line
    while len(rest) > COLUMNS and (cut := rest.rfind(" ", 0, COLUMNS + 1)) > 0:
        out.append(rest[:cut])
        rest = rest[cut + 1 :]
    return "\n".join([*out, rest])


def plot_steps(parts: dict[str, Any]) -> Figure:
    """Ratios to bare torch, a panel a size."""
    figure = Figure(figsize=(9, 0.6 + 0.3 * max(len(part["rows"]) for part in parts.values())), layout="constrained")
    panels = figure.subplots(1, len(parts), squeeze=False)[0]
    for axes, (name, part) in zip(panels, parts.items(), strict=True):
        rows = [row for row in part["rows"] if row["ratio_lowest"] != row["ratio_highest"]][::-1]
        medians = [row["ratio_to_bare"] for row in rows]
        ends = [workload.median_interval(row["ratios"]) for row in rows]
        errors = [[m - low for m, (low, _) in zip(medians, ends, strict=True)]]
        errors += [[high - m for m, (_, high) in zip(medians, ends, strict=True)]]
        colors = ["tab:blue" if row["engine"].startswith("zerocore") else "tab:gray" for row in rows]
        axes.barh([row["engine"] for row in rows], medians, xerr=errors, color=colors, ecolor="black")
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set(title=name, xlabel="step by bare torch's")
        axes.tick_params(labelleft=axes is panels[0])
    return figure


def plot_collectives(rows: Rows) -> Figure:
    """Times by size, a panel an operation."""
    operations = list(dict.fromkeys(row["operation"] for row in rows if "bytes" in row))
    figure = Figure(figsize=(9, 3), layout="constrained")
    panels = figure.subplots(1, len(operations), sharey=True, squeeze=False)[0]
    for axes, operation in zip(panels, operations, strict=True):
        for library in dict.fromkeys(row["library"] for row in rows):
            of = [row for row in rows if (row["operation"], row["library"]) == (operation, library)]
            points = [(row["bytes"], row["time_us"]) for row in of]
            axes.loglog(*zip(*points, strict=True), "k--" if library == FLOOR else "o-", label=library)
        axes.set(title=operation, xlabel="bytes")
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("us")
    panels[-1].legend()
    return figure


def write(file: Path, folder: Path) -> Path:
    """Writes the page of a file of figures and its plots. Returns the page's path."""
    bench = json.loads(file.read_text())
    steps = steps_of(bench)
    plots = {"steps": plot_steps(steps)} if steps else {}
    if "collectives" in bench["parts"]:
        plots["collectives"] = plot_collectives(bench["parts"]["collectives"]["rows"])
    for name, figure in plots.items():
        with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
            figure.savefig(folder / f"benchmarks_{name}.svg", metadata={"Date": None})
    path = folder / "benchmarks.md"
    path.write_text(text(bench))
    return path


if __name__ == "__main__":
    print(write(*map(Path, sys.argv[1:])))
