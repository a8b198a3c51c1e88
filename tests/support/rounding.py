"""Equality up to rounding, and tensors at addresses where rounding is another.

A product of MKL can differ in its last bit when its operands lie elsewhere in memory: in float32 on CPUs with AVX-512,
in float64 and for few rows on those with AVX2 too. Weights of a memory-mapped file and of a model built in memory lie
at different offsets from a 64-byte boundary, so equal weights on different ways give numbers that are close. `==` is
for the same tensors on the same way; `close_records` for the others.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from lit_layers.records import Measurement, Record

BOUNDARY = 64  # bytes; where torch puts what it allocates
NUMBERS = ("value", "stderr", "low", "high")
_NO_NUMBERS: dict = {**dict.fromkeys(NUMBERS), "value": 0.0}


def moved(tensor: Tensor, index: int = 0) -> Tensor:
    """A copy at an odd offset, which `index` chooses, of a larger buffer."""
    size = tensor.element_size()
    buffer = torch.empty(tensor.numel() + 2 * BOUNDARY // size, dtype=tensor.dtype)
    first = (-buffer.data_ptr() % BOUNDARY) // size + 2 * (index % (BOUNDARY // size // 2)) + 1
    return buffer[first : first + tensor.numel()].view(tensor.shape).copy_(tensor)


def move_(model: nn.Module) -> nn.Module:
    """The model, whose weights now lie at odd offsets, all of them another."""
    for index, tensor in enumerate([*model.parameters(), *model.buffers()]):
        tensor.data = moved(tensor.data, index)
    return model


def check_records(found: Sequence[Record], expected: Sequence[Record], dtype: torch.dtype = torch.float32) -> None:
    """Asserts that these are the same records, in order, of a tiny model measured in this precision on two ways.

    The least determined number, a gap of singular values, was seen to be 1e-5 off in float32 and 4e-13 in float64;
    another block or batch would be off in the first digit.
    """
    close = {"rel_tol": 1e-4, "abs_tol": 1e-6} if dtype == torch.float32 else {"rel_tol": 1e-11, "abs_tol": 1e-14}
    assert [replace(record, **_NO_NUMBERS) for record in found] == [
        replace(record, **_NO_NUMBERS) for record in expected
    ]
    for one, other in zip(found, expected, strict=True):
        for name in NUMBERS:
            pair = getattr(one, name), getattr(other, name)
            assert (pair[0] is None) == (pair[1] is None), (name, one, other)
            if None not in pair and not (math.isnan(pair[0]) and math.isnan(pair[1])):
                assert math.isclose(*pair, **close), (name, one, other)


def assert_same_numbers(
    found: Sequence[Measurement], expected: Sequence[Measurement], dtype: torch.dtype = torch.float32
) -> None:
    """Asserts it of the records of each of these measurements."""
    assert [m.analysis for m in found] == [m.analysis for m in expected]
    for one, other in zip(found, expected, strict=True):
        check_records(one.records, other.records, dtype)


def assert_rounded(found: Tensor, expected: Tensor) -> None:
    """Asserts that states or logits differ in rounding alone: 500 units in the last place of the largest."""
    largest = expected.abs().max().item()
    torch.testing.assert_close(found, expected, rtol=0, atol=500 * torch.finfo(expected.dtype).eps * largest)
