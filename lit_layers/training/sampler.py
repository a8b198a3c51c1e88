"""Which samples a step trains on: a pure function of (seed, step)."""

import itertools
from collections.abc import Callable, Iterator

import torch
from torch.utils.data import Sampler


class StepSampler(Sampler[list[int]]):
    """Yields micro-batches of one rank, without end, from the current step on.

    The global batch of a step is a slice of one endless sequence of seeded permutations of the data. It depends on
    neither the world size nor the accumulation: those only cut it into micro-batches. There is no `__len__` on
    purpose: Lightning would end an epoch by it, and a resumed run would differ from an uninterrupted one.
    """

    def __init__(
        self,
        num_samples: int,
        *,
        global_batch_size: int,
        num_micro_batches: int = 1,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        first_step: Callable[[], int] = lambda: 0,
    ) -> None:
        if num_samples < 1:
            raise ValueError(f"expected at least one sample, got {num_samples}")
        if global_batch_size % (world_size * num_micro_batches):
            raise ValueError(
                f"a global batch of {global_batch_size} does not split over {world_size} ranks x "
                f"{num_micro_batches} micro-batches: choose a multiple of {world_size * num_micro_batches}"
            )
        self.num_samples, self.global_batch_size, self.seed = num_samples, global_batch_size, seed
        self.num_micro_batches, self.rank, self.world_size = num_micro_batches, rank, world_size
        self.first_step = first_step
        self._epoch, self._permutation = -1, torch.empty(0, dtype=torch.long)

    def global_batch(self, step: int) -> list[int]:
        """Returns the indices that step number `step` (from 0) trains on, on all ranks together."""
        start = step * self.global_batch_size
        return [self._sample(number) for number in range(start, start + self.global_batch_size)]

    def __iter__(self) -> Iterator[list[int]]:
        size = self.global_batch_size // (self.world_size * self.num_micro_batches)
        for step in itertools.count(self.first_step()):
            batch = self.global_batch(step)
            for micro in range(self.num_micro_batches):
                start = (micro * self.world_size + self.rank) * size
                yield batch[start : start + size]

    def _sample(self, number: int) -> int:
        epoch, place = divmod(number, self.num_samples)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._epoch, self._permutation = epoch, torch.randperm(self.num_samples, generator=generator)
        return int(self._permutation[place])
