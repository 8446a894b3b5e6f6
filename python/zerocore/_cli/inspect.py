"""`zerocore inspect CHECKPOINT`: what is in a checkpoint, or in each of a folder, and whether it is whole."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zerocore._load import MANIFEST, Checkpoint, latest_name, newest_first, some_candidates
from zerocore._manifest import Entry, Manifest
from zerocore.errors import CheckpointError, UnsupportedError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("checkpoint", type=Path, help="a checkpoint, or a folder of checkpoints, which are listed")
    parser.add_argument("--verify", action="store_true", help="read and check everything; exit code 1 for damage")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Prints it. Returns 1 when something is damaged."""
    path: Path = arguments.checkpoint
    if (path / MANIFEST).exists():
        found = _inspected(path, verify=arguments.verify)
        print(json.dumps(found, indent=2) if arguments.json else "\n".join(_details(found)))
        return _complain([found])
    some_candidates(path)
    latest = latest_name(path)
    every = [_inspected(each, verify=arguments.verify) for each in newest_first(path)]
    if latest is not None and latest not in [found["name"] for found in every]:
        every.append(
            {"name": latest, "problems": [f"[ckpt] {path / 'latest'} names {latest}: got no such checkpoint."]}
        )
    if arguments.json:
        print(json.dumps({"latest": latest, "checkpoints": every}, indent=2))
    else:
        for found in every:
            print(_line(found) + ("  <- latest" if found["name"] == latest else ""))
    return _complain(every)


def _inspected(path: Path, *, verify: bool) -> dict[str, Any]:
    """All that is printed, as JSON types."""
    try:
        checkpoint = Checkpoint(path)
    except (CheckpointError, UnsupportedError, OSError) as error:
        return {"name": path.name, "path": str(path), "problems": [str(error)]}
    manifest = checkpoint.manifest
    found: dict[str, Any] = {
        "name": path.name,
        "path": str(path),
        "problems": [str(problem) for problem in checkpoint.problems()] if verify else [],
        "verified": verify,
        "version": manifest.version,
        "global_steps": manifest.global_steps,
        "job": manifest.job.model_dump(),
        "frozen_excluded": manifest.frozen_excluded,
        "bytes": sum(file.bytes for file in manifest.files),
        "files": [{"name": file.name, "bytes": file.bytes, "chunks": len(file.chunks)} for file in manifest.files],
        "optimizer": None if manifest.optimizer is None else manifest.optimizer.model_dump(),
        "state": manifest.state.model_dump(exclude_defaults=True),
        "client_state": sorted(manifest.client_state) if isinstance(manifest.client_state, dict) else [],
        "entries": [_entry(entry) for entry in manifest.entries],
        "elements": _elements(manifest),
    }
    return found


def _entry(entry: Entry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "role": entry.role,
        "shape": entry.shape,
        "dtype": entry.dtype,
        "ties": entry.ties,
        "step": entry.step,
        "group": entry.group,
        "parts": {part.name: {"dtype": part.dtype, "pieces": len(part.pieces)} for part in entry.parts},
    }


def _elements(manifest: Manifest) -> dict[str, int]:
    found: dict[str, int] = {}
    for entry in manifest.entries:
        found[entry.role] = found.get(entry.role, 0) + entry.numel
    return found


# As text


def _line(found: dict[str, Any]) -> str:
    if "bytes" not in found:
        return f"{found['name']:<24}damaged"
    verified = "" if not found["verified"] else "  damaged" if found["problems"] else "  whole"
    job = found["job"]
    return (
        f"{found['name']:<24}step {found['global_steps']:<10}{found['bytes']:>18,} bytes  "
        f"{job['world_size']} ranks, stage {job['stage']}{verified}"
    )


def _details(found: dict[str, Any]) -> Iterator[str]:
    if "bytes" not in found:
        yield f"{found['path']}: damaged"
        return
    job, state = found["job"], found["state"]
    yield f"{found['path']}: step {found['global_steps']}, {found['bytes']:,} bytes"
    yield (
        f"  saved by      zerocore {job['zerocore']}, torch {job['torch']}, {job['world_size']} ranks, stage "
        f"{job['stage']}, {job['precision'].get('dtype', '?')}, {job['threads'] or '?'} threads"
    )
    yield f"  elements      {', '.join(f'{count:,} {role}' for role, count in found['elements'].items())}"
    if found["frozen_excluded"]:
        yield "  left out      frozen parameters"
    if found["optimizer"] is not None:
        for number, group in enumerate(found["optimizer"]["groups"]):
            settings = ", ".join(f"{key} {value}" for key, value in group.items() if value is not None)
            yield f"  {found['optimizer']['type'] if number == 0 else '':<14}group {number}: {settings}"
    yield f"  state         {', '.join(f'{key} {value}' for key, value in state.items() if key != 'extra_state')}"
    yield f"  client state  {', '.join(found['client_state']) or 'none'}"
    for file in found["files"]:
        yield f"  {file['name']}  {file['bytes']:,} bytes in {file['chunks']} chunks"
    width = max((len(entry["name"]) for entry in found["entries"]), default=0)
    for entry in found["entries"]:
        shape = "x".join(map(str, entry["shape"])) or "scalar"
        parts = ", ".join(entry["parts"])
        pieces = max((part["pieces"] for part in entry["parts"].values()), default=0)
        parts += f" in {pieces} pieces" if pieces != 1 else ""
        trained = f"  step {entry['step']}, group {entry['group']}" if entry["role"] == "trained" else ""
        ties = f"  = {', '.join(entry['ties'])}" if entry["ties"] else ""
        yield f"  {entry['name']:<{width}}  {entry['role']:<8}{entry['dtype']:<5}{shape:<16}{parts}{trained}{ties}"
    if found["verified"] and not found["problems"]:
        yield f"  whole: {found['bytes']:,} bytes read and checked"


def _complain(every: list[dict[str, Any]]) -> int:
    problems = [problem for found in every for problem in found["problems"]]
    for problem in problems:
        print(f"zerocore: {problem}", file=sys.stderr)
    return 1 if problems else 0
