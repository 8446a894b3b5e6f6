"""Dealing samples to ranks: the same data, in the same order, on any number of them."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from zerocore._data import MicroBatchSampler, epoch_order, make_loader
from zerocore.config import Config, DataConfig
from zerocore.errors import ConfigError, UnsupportedError


class Numbers(Dataset):
    """Sample i is i."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return index


def sampler(num_samples, *, micro_batches, rank=0, size=1, micro_batch_size=2, seed=3, **options):
    return MicroBatchSampler(
        num_samples,
        micro_batch_size=micro_batch_size,
        micro_batches=micro_batches,
        rank=rank,
        world_size=size,
        seed=seed,
        **options,
    )


def loader(num_samples, *, rank=0, size=1, micro_batches=3, collate_fn=list, seed=1234, **data):
    config = Config(train_batch_size=2 * micro_batches, micro_batch_size=2, seed=seed, data=DataConfig(**data))
    return make_loader(
        Numbers(num_samples), config=config.resolve(size), rank=rank, world_size=size, collate_fn=collate_fn
    )


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("micro_batches", range(1, 9))
@pytest.mark.parametrize("size", range(1, 6))
def test_the_ranks_together_see_what_one_rank_sees(size, micro_batches, shuffle):
    alone = list(sampler(37, micro_batches=micro_batches, shuffle=shuffle))
    ranks = [list(sampler(37, micro_batches=micro_batches, rank=r, size=size, shuffle=shuffle)) for r in range(size)]
    gas = -(-micro_batches // size)
    steps = len(alone) // micro_batches
    assert {len(batches) for batches in ranks} == {steps * gas}
    together = []
    for step in range(steps):
        for k in range(gas):
            for rank in range(size):
                batch = ranks[rank][step * gas + k]
                if k * size + rank < micro_batches:
                    together.append(batch)
                else:  # a filler: the step's last micro-batch
                    assert batch == alone[step * micro_batches + micro_batches - 1]
    assert together == alone


def test_an_epoch_has_every_sample_once():
    indices = [i for batch in sampler(24, micro_batches=4) for i in batch]
    assert sorted(indices) == list(range(24))
    assert indices != list(range(24))
    assert [i for batch in sampler(24, micro_batches=4, shuffle=False) for i in batch] == list(range(24))


def test_the_last_step_is_filled_from_the_epochs_start():
    batches = list(sampler(7, micro_batches=2, shuffle=False))
    assert batches == [[0, 1], [2, 3], [4, 5], [6, 0]]
    assert list(sampler(7, micro_batches=2, shuffle=False, drop_last=True)) == [[0, 1], [2, 3]]
    assert list(sampler(3, micro_batches=4, shuffle=False)) == [[0, 1], [2, 0], [1, 2], [0, 1]]


def test_a_shuffled_last_step_is_filled_from_the_shuffled_start():
    indices = [i for batch in sampler(7, micro_batches=2) for i in batch]
    assert sorted(indices[:7]) == list(range(7))
    assert indices[7] == indices[0]


def test_the_order_depends_on_seed_and_epoch_alone():
    orders = [tuple(epoch_order(50, seed=seed, epoch=epoch).tolist()) for seed in range(5) for epoch in range(5)]
    assert len(set(orders)) == 25
    before = torch.get_rng_state()
    assert tuple(epoch_order(50, seed=0, epoch=0).tolist()) == orders[0]
    assert torch.equal(torch.get_rng_state(), before)
    assert epoch_order(5, seed=2**63 - 1, epoch=10**6).sort().values.tolist() == [0, 1, 2, 3, 4]


def test_the_order_is_this_one():
    """Pinned: another order would change every run that is resumed or repeated."""
    assert epoch_order(10, seed=1234, epoch=0).tolist() == [6, 8, 4, 9, 3, 2, 7, 0, 5, 1]
    assert epoch_order(10, seed=1234, epoch=1).tolist() == [4, 2, 0, 1, 7, 8, 3, 5, 9, 6]


@pytest.mark.parametrize(
    ("num_samples", "drop_last", "text"),
    [
        (0, False, "got 0 samples, expected at least 1."),
        (7, True, "got 7 samples, expected at least 8, a train_batch_size, with data.drop_last."),
    ],
)
def test_too_few_samples(num_samples, drop_last, text):
    with pytest.raises(ConfigError) as caught:
        sampler(num_samples, micro_batches=4, drop_last=drop_last)
    assert f"[data] training_data: {text} Give more samples" in str(caught.value)


def test_a_loader_is_a_dataloader_of_this_ranks_micro_batches():
    made = loader(12, rank=1, size=2, shuffle=False)
    assert isinstance(made, DataLoader)
    assert len(made) == 4  # 2 steps of 2 micro-steps
    assert list(made) == [[2, 3], [4, 5], [8, 9], [10, 11]]
    assert [batch.tolist() for batch in loader(4, micro_batches=1, collate_fn=None, shuffle=False)] == [[0, 1], [2, 3]]


def test_each_iteration_goes_through_the_next_epoch():
    made = loader(12)
    first, second = list(made), list(made)
    assert first != second
    assert second == _batches(12, epoch=1)
    made.set_epoch(0)
    assert list(made) == first
    iterator = iter(made)
    assert next(iterator) == second[0]  # left early: its epoch is not repeated
    assert list(made) == _batches(12, epoch=2)


def _batches(num_samples, epoch):
    indices = epoch_order(num_samples, seed=1234, epoch=epoch).tolist()
    return [indices[i : i + 2] for i in range(0, num_samples, 2)]


@pytest.mark.parametrize("workers", [0, 2])
def test_state_resumes_after_the_last_whole_step(workers):
    """12 samples, 2 steps of 3 micro-batches an epoch, over 1 rank; worker processes read ahead, which must not "
    "count."""
    made = loader(12, num_workers=workers)
    whole = list(made) + list(made)
    states = {0: (0, 0), 1: (0, 0), 3: (0, 1), 5: (0, 1), 6: (1, 0), 7: (1, 0), 9: (1, 1), 12: (2, 0)}
    for taken, (epoch, step) in states.items():
        made = loader(12, num_workers=workers)
        iterator = iter(made)
        for i in range(taken):
            if i == 6:
                iterator = iter(made)
            assert next(iterator) == whole[i]
        assert made.state_dict() == {"epoch": epoch, "step": step}
        del iterator
    resumed = loader(12)
    resumed.load_state_dict({"epoch": 0, "step": 1})
    assert resumed.state_dict() == {"epoch": 0, "step": 1}
    assert list(resumed) == whole[3:6]
    assert list(resumed) == whole[6:]


def test_a_state_is_for_any_number_of_ranks():
    made = loader(24, size=1, micro_batches=4)
    iterator = iter(made)
    for _ in range(4):
        next(iterator)
    rest = list(iterator)
    made = loader(24, size=1, micro_batches=4)
    iterator = iter(made)
    for _ in range(4):
        next(iterator)
    ranks = [loader(24, rank=rank, size=3, micro_batches=4) for rank in range(3)]
    for each in ranks:
        each.load_state_dict(made.state_dict())
    batches = [list(each) for each in ranks]
    assert [len(each) for each in batches] == [4, 4, 4]  # 2 steps left, of 2 micro-steps
    assert rest == [batches[0][0], batches[1][0], batches[2][0], batches[0][1], *(b[2] for b in batches), batches[0][3]]


def test_an_iteration_left_behind_does_not_count():
    made = loader(12)
    left, current = iter(made), iter(made)
    next(current)
    for _ in range(4):
        next(left)
    assert made.state_dict() == {"epoch": 1, "step": 0}
    next(current), next(current)
    assert made.state_dict() == {"epoch": 1, "step": 1}


def test_a_state_moves_an_iteration_that_has_not_begun():
    whole = list(loader(12))
    made = loader(12)
    older, iterator = iter(made), iter(made)
    made.load_state_dict({"epoch": 0, "step": 1})
    assert next(older) == whole[0]  # only the newest is moved
    assert list(iterator) == whole[3:]
    assert made.state_dict() == {"epoch": 1, "step": 0}
    iterator = iter(made)
    made.load_state_dict({"epoch": 1, "step": 1})
    made.load_state_dict({"epoch": 0, "step": 1})
    assert list(iterator) == whole[3:]


def test_a_state_that_is_none():
    with pytest.raises(ConfigError, match=r"\[data\] state: got the keys \['x'\], expected epoch and step"):
        loader(12).load_state_dict({"x": 1})


def test_loading_leaves_torchs_generator_alone():
    before = torch.get_rng_state()
    list(loader(12, num_workers=1))
    assert torch.equal(torch.get_rng_state(), before)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize("dataset", [Stream(), DataLoader(Numbers(3)), (i for i in range(3))])
def test_a_data_set_must_be_map_style(dataset):
    config = Config(micro_batch_size=1).resolve(1)
    with pytest.raises(UnsupportedError) as caught:
        make_loader(dataset, config=config, rank=0, world_size=1)
    name = type(dataset).__name__
    assert str(caught.value).startswith(
        f"[data] training_data: got a {name}, expected a map-style data set, with __len__ and __getitem__."
    )
