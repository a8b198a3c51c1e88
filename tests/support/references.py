"""What tests of several formulas share: drawn numbers and rotations, and definitions written out once."""

import math

import numpy as np
import torch
from torch import Tensor


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rotation(dim: int, seed: int = 0) -> Tensor:
    """Haar: without the signs of R, the Householder reflections of QR leave a bias."""
    q, r = torch.linalg.qr(normal(dim, dim, seed=seed))
    return q * r.diagonal().sign()


def ranks(values: list[float]) -> list[float]:
    """Average ranks, by counting."""
    return [sum(v < u for v in values) + (sum(v == u for v in values) + 1) / 2 for u in values]


def dcor(x: list[float], y: list[float]) -> float:
    """Szekely's distance correlation from its expectation form: E|dX||dY| + E|dX| E|dY| - 2 E|dX||dY'|."""
    n = len(x)

    def covariance(a: list[float], b: list[float]) -> float:
        da = [[abs(u - v) for v in a] for u in a]
        db = [[abs(u - v) for v in b] for u in b]
        together = math.fsum(da[i][j] * db[i][j] for i in range(n) for j in range(n)) / n**2
        apart = math.fsum(map(math.fsum, da)) / n**2 * math.fsum(map(math.fsum, db)) / n**2
        mixed = math.fsum(math.fsum(da[i]) * math.fsum(db[i]) for i in range(n)) / n**3
        return together + apart - 2 * mixed

    return math.sqrt(covariance(x, y) / math.sqrt(covariance(x, x) * covariance(y, y)))


def hsic_1(k: np.ndarray, m: np.ndarray) -> float:
    """Song et al. 2012, written out over matrices."""
    n = len(k)
    k, m = k - np.diag(np.diag(k)), m - np.diag(np.diag(m))
    ones = np.ones(n)
    total = np.trace(k @ m) + ones @ k @ ones * (ones @ m @ ones) / ((n - 1) * (n - 2))
    return (total - 2 / (n - 2) * (ones @ k @ m @ ones)) / (n * (n - 3))


def cka(x: np.ndarray, y: np.ndarray, *, debiased: bool) -> float:
    """The definition by kernels."""
    centering = np.eye(len(x)) - 1 / len(x)

    def hsic(k: np.ndarray, m: np.ndarray) -> float:
        return hsic_1(k, m) if debiased else float(np.sum((centering @ k @ centering) * m))

    k, m = x @ x.T, y @ y.T
    return hsic(k, m) / math.sqrt(hsic(k, k) * hsic(m, m))
