"""Simulated noisy curves over steps with known emergence times, for the tests and for docs/emergence_accuracy.md."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

FINE = 4001
EDGE = 0.1
Truth = dict[str, tuple[float, float]]
KINDS = ("ramp", "sigmoid", "rise and fall", "two steps", "drift")
# Curves that are flat, then suddenly steepest, then ever slower. "into a corner" mirrors "exponential". Only these two
# are among the shapes that `emergence_times` simulates. The other two are held out.
CORNERS = ("exponential", "hyperbola", "quarter of a sine", "into a corner")


def shape(
    rng: np.random.Generator, first: float, last: float, kind: str = ""
) -> tuple[str, Callable[[np.ndarray], np.ndarray]]:
    """Return the kind and the function of a random curve from 0 to 1 over an axis from `first` to `last`.

    Some curves fall again. `kind` is one of `KINDS` or `CORNERS`. The default is a random one of `KINDS`.
    """
    span = last - first
    kind = kind or str(rng.choice(KINDS))
    middle = first + span * rng.uniform(0.2, 0.8)
    if kind in CORNERS:
        width = span * (rng.uniform(0.1, 0.4) if kind == "quarter of a sine" else rng.uniform(0.03, 0.15))
        rise = {
            "exponential": lambda t: 1 - np.exp(-t),
            "hyperbola": lambda t: t / (1 + t),
            "quarter of a sine": lambda t: np.sin(np.pi / 2 * np.minimum(t, 1)),
        }
        if kind == "into a corner":
            return kind, lambda x: np.exp(-np.maximum(middle - x, 0) / width)
        return kind, lambda x: rise[kind](np.maximum(x - middle, 0) / width)
    if kind == "ramp":
        width = span * rng.uniform(0.1, 0.4)
        return kind, lambda x: np.clip((x - middle) / width + 0.5, 0, 1)
    if kind == "sigmoid":
        width = span * rng.uniform(0.01, 0.08)
        return kind, lambda x: 1 / (1 + np.exp(-(x - middle) / width))
    if kind == "rise and fall":
        width, depth = span * rng.uniform(0.05, 0.2), rng.uniform(0.3, 1)

        def bump(x: np.ndarray) -> np.ndarray:
            height = np.exp(-(((x - middle) / width) ** 2) / 2)
            return np.where(x < middle, height, 1 - depth * (1 - height))

        return kind, bump
    if kind == "two steps":
        early, late = first + span * rng.uniform(0.15, 0.45), first + span * rng.uniform(0.55, 0.85)
        width, share = span * rng.uniform(0.01, 0.05), rng.uniform(0.3, 0.7)
        return (
            kind,
            lambda x: share / (1 + np.exp(-(x - early) / width)) + (1 - share) / (1 + np.exp(-(x - late) / width)),
        )
    return kind, lambda x: (x - first) / span


def axis(rng: np.random.Generator) -> np.ndarray:
    """Return 8 to 150 checkpoints over 17 octaves, evenly spaced or random, sometimes with a quarter missing."""
    count = int(np.exp(rng.uniform(np.log(8), np.log(150))))
    x = np.linspace(0, 17, count) if rng.random() < 0.5 else np.sort(rng.uniform(0, 17, count))
    kept = np.ones(count, dtype=bool)
    if rng.random() < 0.3:
        kept[1:-1] = rng.random(count - 2) > 0.25
    return x[kept] if kept.sum() >= 8 else x


def landmarks(curve: Callable[[np.ndarray], np.ndarray], first: float, last: float) -> Truth:
    """Return the true times of a curve by their definition on a fine grid, as ranges because the top may be flat."""
    x = np.linspace(first, last, FINE)
    f = curve(x)
    risen = (f - f[0]) / (f - f[0])[np.abs(f - f[0]).argmax()]
    tops = np.flatnonzero(risen > 1 - 1e-9)
    half = np.flatnonzero(risen[: tops[0] + 1] < 0.5)[-1]
    onset = np.flatnonzero(risen[: half + 1] < EDGE)[-1]
    outside = np.flatnonzero(np.abs(risen - risen[-1]) > EDGE)[-1]
    cell = (last - first) / (FINE - 1)
    ranges = {"onset": (onset, onset), "halfway": (half, half), "peak": (tops[0], tops[-1]), "plateau": (outside,) * 2}
    found = {name: (float(x[low]) - cell, float(x[high]) + cell) for name, (low, high) in ranges.items()}
    rises_on = outside > FINE * 0.89 and tops[0] == FINE - 1  # a drift: its peak and its plateau come later
    return found | dict.fromkeys(("peak", "plateau"), (np.inf, np.inf)) if rises_on else found


def drawn(
    count: int, rng: np.random.Generator, errors: str, *, flat: bool = False, kind: str = ""
) -> Iterator[tuple[tuple[np.ndarray, np.ndarray], dict[str, Any], Truth]]:
    """Yield steps and values, the options of `emergence_times` that describe their errors, and the true times.

    Args:
        count: number of curves.
        rng: random generator.
        errors: "stderr" for known errors that differ by checkpoint. "replicates" for 5 or 64 rows, each with its own
            level and with errors that are correlated between neighbouring checkpoints. "neither" for equal errors that
            the options do not contain.
        flat: whether the true curves are constant.
        kind: one of `KINDS` or `CORNERS`, by default random.
    """
    for _ in range(count):
        x = axis(rng)
        _, curve = shape(rng, x[0], x[-1], kind)
        sign = rng.choice([-1, 1])
        mean = sign * curve(x) * (not flat)
        stderr = np.exp(rng.uniform(np.log(0.01), np.log(0.2)) + rng.normal(0, 0.4, len(x)))
        options: dict[str, Any] = {}
        if errors == "replicates":
            rows = int(rng.choice([5, 64]))
            near, share = np.abs(x[:, None] - x) / rng.uniform(0.2, 3), rng.uniform(0.2, 0.8)
            smooth = np.exp(-near) if rng.random() < 0.5 else np.exp(-(near**2) / 2)
            alike = share * smooth + (1 - share) * np.eye(len(x))
            noise = rng.standard_normal((rows, len(x))) @ np.linalg.cholesky(alike).T * stderr * rows**0.5
            each = mean + noise + rng.standard_normal((rows, 1))
            options, values = {"replicates": each}, each.mean(0)
        else:
            stderr = stderr if errors == "stderr" else np.full(len(x), stderr.mean())
            values = mean + rng.normal(0, stderr)
            options = {"stderr": stderr} if errors == "stderr" else {}
        yield (2**x - 1, values), options, landmarks(curve, x[0], x[-1])


def cut(
    count: int, rng: np.random.Generator
) -> Iterator[tuple[tuple[np.ndarray, np.ndarray], dict[str, Any], Truth, tuple[bool, bool]]]:
    """Yield rises of which only a random part is observed, with errors of 1 to 20% of the observed change.

    The true times are those of the whole rise. The last item says whether the curve moves at its first and at its last
    checkpoint. It moves at the first if its onset is earlier, and if it changes by more than a twentieth of the
    observed change within the first eighth of the axis. The last checkpoint is judged in the same way, with the
    plateau.
    """
    while count > 0:
        first, last = rng.choice([0, rng.uniform(1, 8)]), rng.choice([rng.uniform(9, 17), 17])
        _, curve = shape(rng, 0, 17, str(rng.choice(["ramp", "sigmoid", "exponential", "drift"])))
        checkpoints = int(np.exp(rng.uniform(np.log(8), np.log(60))))
        x = np.linspace(first, last, checkpoints)
        seen, eighth = np.ptp(curve(np.linspace(first, last, FINE))), (last - first) / 8
        if seen < 0.05:
            continue
        stderr = np.full(checkpoints, seen * np.exp(rng.uniform(np.log(0.01), np.log(0.2))))
        truth = landmarks(curve, 0, 17)
        moved = [
            float(np.abs(curve(end) - curve(end + way))) > seen / 20 for end, way in ((first, eighth), (last, -eighth))
        ]
        moves = bool(truth["onset"][1] < first and moved[0]), bool(truth["plateau"][0] > last and moved[1])
        yield (2**x - 1, curve(x) + rng.normal(0, stderr)), {"stderr": stderr}, truth, moves
        count -= 1


def instant_steps(
    count: int, checkpoints: int, rng: np.random.Generator
) -> Iterator[tuple[Any, dict[str, Any], Truth]]:
    """Yield noisy jumps from 0 to 1 between the second and the second-last checkpoint of a log-spaced axis."""
    x = np.log2(1 + np.unique(np.round([0, *np.geomspace(1, 143_000, checkpoints - 1)])))
    for _ in range(count):
        jump, stderr = rng.uniform(x[1], x[-2]), np.full(len(x), 0.05)
        truth = dict.fromkeys(("onset", "halfway", "plateau"), (jump, jump)) | {"peak": (jump, x[-1])}
        yield (2**x - 1, (x > jump) + rng.normal(0, stderr)), {"stderr": stderr}, truth


def flat_noise(count: int, checkpoints: int, noise: str, rng: np.random.Generator) -> np.ndarray:
    """Return noise of unit variance (count, checkpoints): "normal", "t3" (3 degrees of freedom), or AR(1) for a number.

    Such a number is the correlation of neighbouring checkpoints.
    """
    if noise == "t3":
        return rng.standard_t(3, (count, checkpoints)) / 3**0.5
    kept = 0.0 if noise == "normal" else float(noise)
    values = rng.standard_normal((count, checkpoints))
    for at in range(1, checkpoints):
        values[:, at] = kept * values[:, at - 1] + (1 - kept**2) ** 0.5 * values[:, at]
    return values


def covered(times: Any, truth: Truth) -> np.ndarray:
    """Return which of the four intervals contain the true time: none if the curve is judged flat."""
    if not times.changes:
        return np.zeros(4)
    inside = []
    for name, (low, high) in truth.items():
        time = getattr(times, name)
        inside.append(np.log2(1 + time.low) <= high and np.log2(1 + time.high) >= low)
    return np.array(inside, dtype=float)
