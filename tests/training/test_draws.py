"""Random numbers as a function of (seed, stream, sample number)."""

import numpy as np
import torch
from scipy import stats

from lit_layers.training.augmentation import normals, uniforms

MASK = 2**64 - 1


def mixed(bits: int) -> int:
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & MASK
    return bits ^ (bits >> 31)


def expected(seed: int, stream: str, number: int, count: int) -> list[float]:
    """SplitMix64 in Python's whole numbers: a start for (seed, stream, number), then steps of the golden ratio."""
    keys = [mixed(seed & MASK), mixed(int.from_bytes(stream.encode()[:8], "big"))]
    start = mixed(number ^ mixed((3 * keys[0] + keys[1]) & MASK))
    return [(mixed((start + step * 0x9E3779B97F4A7C15) & MASK) >> 11) / 2**53 for step in range(1, count + 1)]


def test_uniforms_are_those_of_splitmix64():
    for seed, stream in ((0, "crop"), (12345, "randaugment")):
        found = uniforms(seed, stream, torch.tensor([0, 1, 10**9]), 4)
        assert found.tolist() == [expected(seed, stream, number, 4) for number in (0, 1, 10**9)]


def test_a_sample_has_its_numbers_whatever_batch_it_is_in():
    whole = uniforms(3, "crop", torch.arange(50), 6)
    assert torch.equal(uniforms(3, "crop", torch.tensor([41, 7]), 6), whole[[41, 7]])
    assert torch.equal(normals(3, "noise", torch.tensor([41, 7]), 6), normals(3, "noise", torch.arange(50), 6)[[41, 7]])


def test_numbers_have_their_distributions_and_neither_columns_nor_streams_nor_seeds_go_together():
    numbers = torch.arange(20_000)
    flat, bell = uniforms(0, "a", numbers, 3), normals(0, "a", numbers, 4)
    assert stats.kstest(flat.flatten().numpy(), "uniform").pvalue > 0.001
    assert stats.kstest(bell.flatten().numpy(), "norm").pvalue > 0.001
    others = [uniforms(0, "b", numbers, 1), uniforms(1, "a", numbers, 1), flat.roll(1, 0)[:, :1]]
    together = np.corrcoef(torch.cat([flat, *others], dim=1).T.numpy())
    assert np.abs(together - np.eye(6)).max() < 0.03  # four standard errors
