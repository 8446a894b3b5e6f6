"""Where events of the training go: TensorBoard, CSV files, Weights & Biases."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, TextIO

from zerocore._files import named_errors
from zerocore.config import Config, CsvMonitorConfig, TensorBoardConfig, WandbConfig
from zerocore.errors import ConfigError

Event = tuple[str, float, int]  # name, value, samples so far


class Monitor(Protocol):
    """Takes events."""

    def write(self, events: list[Event]) -> None: ...

    def close(self) -> None: ...


def check_libraries(config: Config) -> None:
    """On every rank, so that all fail alike.

    Raises:
        ConfigError: a monitor's library is not installed.
    """
    for block, module in (("tensorboard", "tensorboard"), ("wandb", "wandb")):
        if getattr(config, block) is not None and importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"[engine] {block}: got a configuration for it, expected the package {module}, which is not installed. "
                f"pip install {module}, or remove {block} from the configuration."
            )


def open_monitors(config: Config) -> Iterator[Monitor]:
    """Those of the configuration, for rank 0.

    Raises:
        IoError: a file cannot be made.
    """
    if config.tensorboard is not None:
        yield _TensorBoard(config.tensorboard)
    if config.csv_monitor is not None:
        yield _Csv(config.csv_monitor)
    if config.wandb is not None:
        yield _Wandb(config.wandb)


def _folder(config: TensorBoardConfig | CsvMonitorConfig) -> Path:
    folder = Path(config.output_path, config.job_name)
    with named_errors(folder, area="engine"):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


class _TensorBoard:
    def __init__(self, config: TensorBoardConfig) -> None:
        library = importlib.import_module("torch.utils.tensorboard")  # only where it is asked for: slow to load
        self._writer: Any = library.SummaryWriter(log_dir=str(_folder(config)))

    def write(self, events: list[Event]) -> None:
        for name, value, samples in events:
            self._writer.add_scalar(name, value, samples)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Csv:
    """A file a quantity, named as DeepSpeed names them; a run that goes on appends to them."""

    def __init__(self, config: CsvMonitorConfig) -> None:
        self._folder = _folder(config)
        self._files: dict[str, TextIO] = {}

    def write(self, events: list[Event]) -> None:
        for name, value, samples in events:
            csv.writer(self._file(name)).writerow([samples, value])

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _file(self, name: str) -> TextIO:
        if name not in self._files:
            path = self._folder / f"{name.replace('/', '_')}.csv"
            with named_errors(path, area="engine"):
                file = path.open("a", buffering=1, newline="")
            if file.tell() == 0:
                csv.writer(file).writerow(["step", name.rpartition("/")[2]])
            self._files[name] = file
        return self._files[name]


class _Wandb:
    def __init__(self, config: WandbConfig) -> None:
        library = importlib.import_module("wandb")
        mode = os.environ.get("WANDB_MODE", "offline")
        self._run: Any = library.init(project=config.project, group=config.group, entity=config.team, mode=mode)

    def write(self, events: list[Event]) -> None:
        for samples in dict.fromkeys(event[2] for event in events):
            self._run.log({name: value for name, value, at in events if at == samples}, step=samples)

    def close(self) -> None:
        self._run.finish()
