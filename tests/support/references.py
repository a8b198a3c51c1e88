"""Random numbers, rotations and reference implementations of formulas, for tests of several functions."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from scipy.linalg import orth
from torch import Tensor


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rotation(dim: int, seed: int = 0) -> Tensor:
    """Return a Haar-distributed rotation or reflection; without the signs of R, QR by Householder would be biased."""
    q, r = torch.linalg.qr(normal(dim, dim, seed=seed))
    return q * r.diagonal().sign()


def jacobian_shape_of(matrix: Any) -> list[Any]:
    """Return the fields of `JacobianShape` without the residual, from full decompositions."""
    left, values, right = np.linalg.svd(matrix)
    eigenvalues, vectors = np.linalg.eig(matrix)
    first = np.abs(eigenvalues).argmax()
    plane = orth(np.stack([np.real(vectors[:, first]), np.imag(vectors[:, first])], 1), rcond=1e-10)
    commutator = matrix.T @ matrix - matrix @ matrix.T
    symmetric = (matrix + matrix.T) / 2
    return [
        np.linalg.norm(commutator) / np.linalg.norm(matrix.T @ matrix) / 2**0.5,
        (symmetric**2).sum() / (matrix**2).sum(),
        (values**2).sum() ** 2 / (values**4).sum(),
        np.abs(eigenvalues[first]) / values[0],
        np.linalg.norm(plane.T @ left[:, 0]),
        np.linalg.norm(plane.T @ right[0]),
    ]


def ranks(values: list[float]) -> list[float]:
    """Return ranks from 1, computed by counting; tied values get their mean rank."""
    return [sum(v < u for v in values) + (sum(v == u for v in values) + 1) / 2 for u in values]


def dcor(x: list[float], y: list[float]) -> float:
    """Return the distance correlation of Szekely et al. (2007).

    The squared distance covariance is E|X-X'||Y-Y'| + E|X-X'| E|Y-Y'| - 2 E|X-X'||Y-Y''|.
    """
    n = len(x)

    def covariance(a: list[float], b: list[float]) -> float:
        da = [[abs(u - v) for v in a] for u in a]
        db = [[abs(u - v) for v in b] for u in b]
        joint = math.fsum(da[i][j] * db[i][j] for i in range(n) for j in range(n)) / n**2
        separate = math.fsum(map(math.fsum, da)) / n**2 * math.fsum(map(math.fsum, db)) / n**2
        mixed = math.fsum(math.fsum(da[i]) * math.fsum(db[i]) for i in range(n)) / n**3
        return joint + separate - 2 * mixed

    return math.sqrt(covariance(x, y) / math.sqrt(covariance(x, x) * covariance(y, y)))


def hsic_1(k: np.ndarray, m: np.ndarray) -> float:
    """Return the unbiased HSIC of Song et al. (2012) from two kernel matrices."""
    n = len(k)
    k, m = k - np.diag(np.diag(k)), m - np.diag(np.diag(m))
    ones = np.ones(n)
    total = np.trace(k @ m) + ones @ k @ ones * (ones @ m @ ones) / ((n - 1) * (n - 2))
    return (total - 2 / (n - 2) * (ones @ k @ m @ ones)) / (n * (n - 3))


def cka(x: np.ndarray, y: np.ndarray, *, debiased: bool) -> float:
    """Return linear CKA by its definition over kernel matrices."""
    centering = np.eye(len(x)) - 1 / len(x)

    def hsic(k: np.ndarray, m: np.ndarray) -> float:
        return hsic_1(k, m) if debiased else float(np.sum((centering @ k @ centering) * m))

    k, m = x @ x.T, y @ y.T
    return hsic(k, m) / math.sqrt(hsic(k, k) * hsic(m, m))


def cosine(a: np.ndarray, b: np.ndarray, metric: np.ndarray | None = None) -> float:
    """Return a'Mb / sqrt(a'Ma b'Mb), with the identity as default M."""
    metric = np.eye(len(a)) if metric is None else metric
    return a @ metric @ b / math.sqrt((a @ metric @ a) * (b @ metric @ b))


def renyi(shares: Iterable[float], alpha: float) -> float:
    """Return the Renyi entropy of shares that sum to 1, in nats."""
    if alpha == 1:
        return -sum(p * math.log(p) for p in shares)
    if alpha == math.inf:
        return -math.log(max(shares))
    return math.log(sum(p**alpha for p in shares)) / (1 - alpha)


def covariance_paths(states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return points (layers, tokens, 2) and the shares of variance of both axes, from the covariance of the last layer.

    The largest entry of each axis is positive.
    """
    values, vectors = np.linalg.eigh(np.cov(states[-1].T, bias=True))
    axes = vectors[:, [-1, -2]]
    axes = axes * np.sign(np.take_along_axis(axes, np.abs(axes).argmax(0)[None], axis=0))
    return (states - states[-1].mean(0)) @ axes, values[[-1, -2]] / values.sum()
