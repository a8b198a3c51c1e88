"""Random numbers that are a function of (seed, sample number): whoever draws them, in whatever batch, gets the same."""

import math

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def uniforms(seed: int, stream: str, numbers: Tensor, count: int) -> Tensor:
    """`count` numbers in [0, 1) for each sample number, float64: (samples, count). Each stream has its own."""
    return _shifted(_cells(seed, stream, numbers, count), 11).double() * 2.0**-53


def normals(seed: int, stream: str, numbers: Tensor, count: int) -> Tensor:
    """`count` standard normal numbers for each sample number, float32: (samples, count)."""
    bits = _cells(seed, stream, numbers, -(-count // 2))
    radius = (-2 * torch.log((_shifted(bits, 40).float() + 0.5) * 2.0**-24)).sqrt()
    angle = (bits & 0xFFFFFF).float() * (2 * math.pi * 2.0**-24)
    return torch.cat([radius * angle.cos(), radius * angle.sin()], dim=1)[:, :count]


def _cells(seed: int, stream: str, numbers: Tensor, count: int) -> Tensor:
    """64 random bits a cell, by SplitMix64 (Steele et al. 2014), in integers that wrap around."""
    key = _mixed(torch.tensor([_wrapped(seed), _wrapped(int.from_bytes(stream.encode()[:8], "big"))]))
    start = _mixed(numbers.long() ^ int(_mixed(key[:1] * 3 + key[1:])))
    steps = torch.arange(1, count + 1, device=numbers.device) * _wrapped(_GOLDEN)
    return _mixed(start[:, None] + steps)  # (samples, count)


def _mixed(bits: Tensor) -> Tensor:
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        bits = (bits ^ _shifted(bits, shift)) * _wrapped(multiplier)
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Shift to the right that fills with zeros, where torch fills with the sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _wrapped(number: int) -> int:
    """The int64 of the same bits."""
    return (number + 2**63) % 2**64 - 2**63
