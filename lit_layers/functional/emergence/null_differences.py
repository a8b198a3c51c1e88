"""First checkpoint of the lasting difference between a curve and its null, a constant baseline."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from lit_layers.functional.emergence.curve_times import whole_rows

Array = NDArray[np.floating[Any]]


def lasting_difference(
    differences: ArrayLike,
    *,
    stderr: ArrayLike | None = None,
    replicates: ArrayLike | None = None,
    confidence: float = 0.95,
) -> int | None:
    """Return the index of the checkpoint at which the lasting difference between a curve and its null begins.

    From this checkpoint to the last one, every difference is significant, and all have the same sign. At each
    checkpoint, the null hypothesis is "the difference is 0". With replicates, it is tested by Student's t test, with
    `stderr` by a two-sided normal test. As in the verdict of `emergence_times`, a p-value is multiplied by the number
    of checkpoints (union bound). A difference is significant if the product is at most 1 - `confidence`. If the
    difference is exactly the same in all replicates, t is not defined. The sign test then replaces it, with
    p = 2^(1 - replicates).

    Args:
        differences: The curve minus its null, (checkpoints,); NaN for a missing value, which is left out.
        stderr: Standard error of each difference, (checkpoints,).
        replicates: The difference of each prompt, test row or seed, (replicates, checkpoints). A row with NaN where
            the curve has a value is left out.
        confidence: Level of the test.

    Returns:
        The index, or None if the curve does not differ at the last checkpoint.

    Raises:
        ValueError: neither or both of `stderr` and `replicates` are given, or fewer than 2 replicates are complete.
    """
    y = np.asarray(differences, dtype=np.float64)
    if (stderr is None) == (replicates is None):
        raise ValueError("expected either stderr or replicates")
    valid = np.isfinite(y)
    if replicates is not None:
        p_values = _t_tests(whole_rows(replicates, valid)[1])
    else:
        errors = np.asarray(stderr, dtype=np.float64)[valid]
        # With an error of 0, any difference other than 0 is significant, because the ratio is infinite.
        with np.errstate(divide="ignore", invalid="ignore"):
            p_values = 2 * stats.norm.sf(np.abs(y[valid]) / errors)
    signs = np.sign(y[valid])
    differs = (p_values * valid.sum() <= 1 - confidence) & (signs == signs[-1:])
    lasts = np.logical_and.accumulate(differs[::-1])[::-1]
    return int(np.flatnonzero(valid)[lasts][0]) if lasts.any() else None


def _t_tests(rows: Array) -> Array:
    """Return p-values of the hypothesis that the mean is 0, one per column of `rows` (replicates, checkpoints)."""
    count = len(rows)
    means, errors = rows.mean(0), rows.std(0, ddof=1) / np.sqrt(count)
    vary = errors > 1e-12 * np.abs(rows).max(initial=0)
    p_values = np.where(means == 0, 1.0, 2.0 ** (1 - count))
    p_values[vary] = 2 * stats.t.sf(np.abs(means[vary]) / errors[vary], count - 1)
    return p_values
