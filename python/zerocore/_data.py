"""Deals samples to ranks by the global number of their micro-batch: the same training data on any number of ranks.

Note: numbering. A step has M micro-batches. In micro-step k, rank r of N takes micro-batch j = k N + r of the step, and
goes through gas = ceil(M / N) of them. Where N does not divide M, the last ranks have j >= M in the last micro-step:
they get a filler, the samples of micro-batch M - 1 once more, so that every rank runs the same loop; the engine leaves
its gradients and its loss out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from zerocore._random import GOLDEN, mix
from zerocore.config import ResolvedConfig
from zerocore.errors import ConfigError, UnsupportedError

_END = object()  # of an iteration


class MicroBatchSampler(Sampler[list[int]]):
    """Yields the sample indices of one rank's micro-batches, in the order of its micro-steps. Pure arithmetic.

    The samples that do not fill a last step are dropped, or the step is filled up from the epoch's start.

    Args:
        num_samples: size of the data set.
        micro_batch_size: samples a micro-batch.
        micro_batches: M, micro-batches a step over all ranks.
        rank, world_size: r and N.
        seed: with the epoch, it makes the order.
        shuffle: a new order each epoch; else the data set's own.
        drop_last: drop the samples that do not fill a last step.

    Raises:
        ConfigError: there are no samples, or drop_last leaves none.
    """

    def __init__(
        self,
        num_samples: int,
        *,
        micro_batch_size: int,
        micro_batches: int,
        rank: int,
        world_size: int,
        seed: int,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        self.num_samples = num_samples
        self.micro_batch_size = micro_batch_size
        self.micro_batches = micro_batches
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.shuffle = shuffle
        self.micro_steps = -(-micro_batches // world_size)
        samples = micro_batch_size * micro_batches
        self.steps = num_samples // samples if drop_last else -(-num_samples // samples)
        self.epoch = 0
        self.first_step = 0
        if self.steps == 0:
            least = f"{samples}, a train_batch_size, with data.drop_last" if drop_last else "1"
            raise ConfigError(
                f"[data] training_data: got {num_samples} samples, expected at least {least}. Give more samples, or "
                "change these settings."
            )

    def __len__(self) -> int:
        """Micro-batches that a rank gets in a whole epoch."""
        return self.steps * self.micro_steps

    def start_at(self, *, epoch: int, step: int = 0) -> None:
        """Makes the next iteration go through `epoch` from `step` on."""
        self.epoch = epoch
        self.first_step = step

    def __iter__(self) -> Iterator[list[int]]:
        order = epoch_order(self.num_samples, seed=self.seed, epoch=self.epoch) if self.shuffle else None
        steps = range(self.first_step, self.steps)
        return (self._indices(order, step, k) for step in steps for k in range(self.micro_steps))

    def _indices(self, order: torch.Tensor | None, step: int, micro_step: int) -> list[int]:
        number = min(micro_step * self.world_size + self.rank, self.micro_batches - 1)
        start = (step * self.micro_batches + number) * self.micro_batch_size
        places = [place % self.num_samples for place in range(start, start + self.micro_batch_size)]
        return places if order is None else order[places].tolist()


def epoch_order(num_samples: int, *, seed: int, epoch: int) -> torch.Tensor:
    """The order of an epoch: a permutation of range(num_samples), int64, the same on every rank."""
    generator = torch.Generator().manual_seed(mix(seed * GOLDEN + epoch + 1))  # not that of (epoch, seed)
    return torch.randperm(num_samples, generator=generator)


class MicroBatchLoader(DataLoader[Any]):
    """A DataLoader over one rank's micro-batches. Each iteration goes through the next epoch, from epoch 0 on.

    Leaving an iteration early does not repeat its epoch: the next iteration starts the next one, unless set_epoch() or
    load_state_dict() says otherwise. Its length is that of a whole epoch, steps times accumulation.
    """

    batch_sampler: MicroBatchSampler
    post_process: Callable[[Any, dict[str, int]], Any] | None = None  # a batch, with what state_dict() then says

    def __init__(self, dataset: Dataset[Any], *, sampler: MicroBatchSampler, **options: Any) -> None:
        super().__init__(dataset, batch_sampler=sampler, **options)
        self._next = (0, 0)  # epoch and step at which the next iteration starts
        self._epoch: int | None = None  # of the iteration that is going on
        self._iteration = 0  # its number
        self._moved = False  # by load_state_dict(), since it began
        self._handed_out = 0  # micro-batches of this epoch that the training loop has got

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return self._deal(self._begin(), self._iteration)

    def _begin(self) -> Iterator[Any]:
        epoch, step = self._next
        self._next = (epoch + 1, 0)
        self._epoch, self._handed_out = epoch, step * self.batch_sampler.micro_steps
        self._moved = False
        self._iteration += 1
        self.batch_sampler.start_at(epoch=epoch, step=step)
        return super().__iter__()

    def _deal(self, batches: Iterator[Any], iteration: int) -> Iterator[Any]:
        while True:
            if self._moved and iteration == self._iteration:  # by load_checkpoint(), before the loop or in it
                batches = self._begin()
                iteration = self._iteration
            if (batch := next(batches, _END)) is _END:
                return
            if iteration == self._iteration and self._epoch is not None:  # not an older one that runs beside this one
                self._handed_out += 1
            yield batch if self.post_process is None else self.post_process(batch, self.state_dict())

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration go through `epoch`."""
        self._next, self._epoch = (epoch, 0), None

    def state_dict(self) -> dict[str, int]:
        """Where the training loop is: epoch, and step in it. Micro-batches of an unfinished step do not count."""
        if self._epoch is None or self._handed_out == len(self.batch_sampler):
            return {"epoch": self._next[0], "step": self._next[1]}
        return {"epoch": self._epoch, "step": self._handed_out // self.batch_sampler.micro_steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Makes the next iteration go on where state_dict() was called, on any number of ranks.

        So does the newest iteration, also one that was made and not begun: its next batch is the first one after
        state_dict().
        """
        if not {"epoch", "step"} <= state.keys():
            raise ConfigError(
                f"[data] state: got the keys {sorted(state)}, expected epoch and step. Load what state_dict() gave."
            )
        self._next, self._epoch = (state["epoch"], state["step"]), None
        self._moved = True


def make_loader(
    dataset: Dataset[Any],
    *,
    config: ResolvedConfig,
    rank: int,
    world_size: int,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> MicroBatchLoader:
    """A loader of this rank's micro-batches.

    Args:
        dataset: map-style: with __len__ and __getitem__, the same on every rank.
        config: batch sizes, seed and data settings.
        rank: in the data-parallel group.
        world_size: size of that group.
        collate_fn: makes a batch of a list of samples; torch's default_collate unless given.

    Raises:
        UnsupportedError: the data set is not map-style.
        ConfigError: it has too few samples.
    """
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise UnsupportedError(
            f"[data] training_data: got a {type(dataset).__name__}, expected a map-style data set, with __len__ and "
            "__getitem__. Index its samples, or leave training_data out and give each rank batches of your own."
        )
    sampler = MicroBatchSampler(
        len(dataset),
        micro_batch_size=config.micro_batch_size,
        micro_batches=config.micro_batches,
        rank=rank,
        world_size=world_size,
        seed=config.seed,
        shuffle=config.data.shuffle,
        drop_last=config.data.drop_last,
    )
    return MicroBatchLoader(
        dataset,
        sampler=sampler,
        collate_fn=collate_fn,
        num_workers=config.data.num_workers,
        persistent_workers=config.data.num_workers > 0,
        generator=torch.Generator().manual_seed(config.seed),  # workers' seeds; torch's own generator is left alone
    )
