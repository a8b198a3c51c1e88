"""Pairs of curves over steps that are unrelated, or of which one follows the other: for tests and a table of docs."""

import numpy as np

from lit_layers.functional.emergence.lead_lag import LeadLag, lead_lags, octave_increments, octave_range

# As a run saves them: 20 checkpoints, powers of two and then every 192 steps.
STEPS = np.array([0, *2 ** np.arange(8), *range(192, 385, 192), *range(576, 1921, 192), 2048])
AXIS = np.log2(1.0 + STEPS)
FINE = np.arange(-4, 12, 0.25)
UNRELATED = {
    "walk": "random walks",
    "noise": "noise about a level",
    "waves": "walks in long waves",
    "late": "walks that move in the last third alone",
    "sigmoid": "single sigmoids",
}


def walks(kind: str, rng: np.random.Generator, runs: int) -> np.ndarray:
    """Random walks, (runs, points of `FINE`), their steps alike over octaves ("waves") or small at first ("late")."""
    shocks = rng.standard_normal((runs, len(FINE)))
    if kind == "waves":
        for point in range(1, len(FINE)):
            shocks[:, point] += 0.8**0.5 * shocks[:, point - 1]  # 0.8 over half an octave, which is two points
    if kind == "late":
        shocks *= np.where(FINE > 7, 1, 0.1)
    return shocks.cumsum(1)


def at_checkpoints(walk: np.ndarray, octaves: float = 0.0) -> np.ndarray:
    """So many octaves later, (runs, checkpoints)."""
    return np.stack([np.interp(AXIS - octaves, FINE, each) for each in walk])


def unrelated(kind: str, rng: np.random.Generator, runs: int) -> np.ndarray:
    """A curve, (runs, checkpoints): of several runs the recipe makes one part of it, and each run another."""
    if kind == "sigmoid":
        place = rng.uniform(2, 9) + rng.normal(0, 0.3, (runs, 1))
        rise = 1 / (1 + np.exp(-(AXIS - place) / rng.uniform(0.3, 2)))
        return rng.choice([-1, 1]) * rise + 0.02 * rng.standard_normal((runs, len(STEPS)))
    parts = (runs, 1) if runs > 1 else (runs,)
    drawn = [
        rng.standard_normal((count, len(STEPS))) if kind == "noise" else at_checkpoints(walks(kind, rng, count))
        for count in parts
    ]
    return drawn[0] + (3 * drawn[1] if runs > 1 else 0)


def following(rng: np.random.Generator, error: float, runs: int, octaves: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Random walks, and their copies so many octaves later, each with errors, (runs, checkpoints)."""
    smooth = np.apply_along_axis(np.convolve, 1, walks("walk", rng, runs), np.full(3, 1 / 3), mode="same") / 2
    first, second = (at_checkpoints(smooth, late) for late in (0, octaves))
    return first + error * rng.standard_normal(first.shape), second + error * rng.standard_normal(first.shape)


def driven(rng: np.random.Generator, runs: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A loss, and two curves that follow it at once and wander a little beside, (runs, checkpoints)."""
    fall = 4 - 3 / (1 + np.exp(-(AXIS - 6)))
    loss = fall - 0.3 * at_checkpoints(walks("walk", rng, runs))
    own = [0.15 * at_checkpoints(walks("walk", rng, runs)) for _ in "ab"]
    return loss, 1 - loss / 4 + own[0] / 2, 3 + 2 * loss + own[1]


def found(first: np.ndarray, second: np.ndarray, given: np.ndarray | None = None, *, seed: int = 0) -> LeadLag:
    """Of curves (runs, checkpoints)."""
    ends = octave_range(STEPS, first[0])
    a, b, rest = (None if each is None else octave_increments(STEPS, each, *ends) for each in (first, second, given))
    return lead_lags(a[None], b, rest, seed=seed)[0]
