"""Assert equality up to rounding, and move tensors to addresses where rounding differs.

A matrix product of MKL can differ in its last bit if its operands are at other addresses: in float32 on CPUs with
AVX-512, and in float64 and for few rows also on CPUs with AVX2. Weights in a memory-mapped file and in a model built in
memory have different offsets from a 64-byte boundary, so equal weights give close but unequal numbers. Use `==` for
the same tensors on the same code path, and `check_records` otherwise.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from lit_layers.records import Measurement, Record

BOUNDARY = 64  # bytes; the alignment of memory that torch allocates
NUMBERS = ("value", "stderr", "low", "high")
_NO_NUMBERS: dict = {**dict.fromkeys(NUMBERS), "value": 0.0}


def moved(tensor: Tensor, index: int = 0) -> Tensor:
    """Return a copy at an odd offset in a larger buffer; `index` chooses the offset."""
    size = tensor.element_size()
    buffer = torch.empty(tensor.numel() + 2 * BOUNDARY // size, dtype=tensor.dtype)
    first = (-buffer.data_ptr() % BOUNDARY) // size + 2 * (index % (BOUNDARY // size // 2)) + 1
    return buffer[first : first + tensor.numel()].view(tensor.shape).copy_(tensor)


def move_(model: nn.Module) -> nn.Module:
    """Move the weights of a model to odd offsets, each to a different one, and return the model."""
    for index, tensor in enumerate([*model.parameters(), *model.buffers()]):
        tensor.data = moved(tensor.data, index)
    return model


def check_records(found: Sequence[Record], expected: Sequence[Record], dtype: torch.dtype = torch.float32) -> None:
    """Assert that two code paths gave the same records of a tiny model, in order, up to rounding in this precision.

    The most sensitive number, a gap between singular values, differed by up to 1e-5 in float32 and 4e-13 in float64.
    A wrong block or batch would change the first digit.
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
    """Assert that two lists of measurements have the same analyses and the same records up to rounding."""
    assert [m.analysis for m in found] == [m.analysis for m in expected]
    for one, other in zip(found, expected, strict=True):
        check_records(one.records, other.records, dtype)


def assert_rounded(found: Tensor, expected: Tensor) -> None:
    """Assert that states or logits differ only by rounding: up to 500 units in the last place of the largest value."""
    largest = expected.abs().max().item()
    torch.testing.assert_close(found, expected, rtol=0, atol=500 * torch.finfo(expected.dtype).eps * largest)
