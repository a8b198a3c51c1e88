import itertools

import pytest
import torch

from lit_layers.training.trainer import StepSampler


def test_an_epoch_holds_every_sample_once_and_epochs_differ():
    sampler = StepSampler(12, global_batch_size=4, seed=3)
    epochs = [[i for step in range(3 * e, 3 * e + 3) for i in sampler.global_batch(step)] for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(12))
    assert epochs[0] != epochs[1]


def test_a_sample_is_that_of_the_permutation_drawn_for_its_epoch():
    def permutation(epoch):
        return torch.randperm(13, generator=torch.Generator().manual_seed(5 * 1_000_003 + epoch)).tolist()

    sampler = StepSampler(13, global_batch_size=30, seed=5)
    assert sampler.global_batch(2) == [permutation(place // 13)[place % 13] for place in range(60, 90)]


def test_a_batch_may_span_two_epochs():
    sampler = StepSampler(5, global_batch_size=4, seed=0)
    seen = [i for step in range(5) for i in sampler.global_batch(step)]
    assert [sorted(seen[e * 5 : e * 5 + 5]) for e in range(4)] == [list(range(5))] * 4


def test_a_step_is_the_same_from_wherever_the_walk_begins():
    def walk(first):
        return itertools.islice(StepSampler(50, global_batch_size=8, seed=1, first_step=lambda: first), 9 - first)

    assert list(walk(0))[6:] == list(walk(6))


@pytest.mark.parametrize(("world_size", "num_micro_batches"), [(1, 4), (2, 1), (2, 2), (4, 2)])
def test_ranks_and_micro_batches_only_cut_the_global_batch(world_size, num_micro_batches):
    split = {"world_size": world_size, "num_micro_batches": num_micro_batches}
    whole = StepSampler(40, global_batch_size=8, seed=7)
    walks = [iter(StepSampler(40, global_batch_size=8, seed=7, rank=r, **split)) for r in range(world_size)]
    for step in range(12):
        pieces = [next(walk) for _ in range(num_micro_batches) for walk in walks]
        assert [i for piece in pieces for i in piece] == whole.global_batch(step)


def test_seeds_differ():
    first, second = (StepSampler(99, global_batch_size=9, seed=seed).global_batch(0) for seed in (0, 1))
    assert first != second


def test_there_is_no_length_for_lightning_to_stop_at():
    assert not hasattr(StepSampler(5, global_batch_size=1), "__len__")


def test_a_batch_that_does_not_split_is_refused():
    with pytest.raises(ValueError, match="global batch of 10 does not split over 2 ranks x 2 micro-batches"):
        StepSampler(40, global_batch_size=10, world_size=2, num_micro_batches=2)
