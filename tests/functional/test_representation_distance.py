"""Distances of representations against scipy and closed forms, with their invariances."""

from operator import itemgetter
from pathlib import Path
from runpy import run_path

import numpy as np
import pytest
import torch
from scipy.linalg import subspace_angles
from scipy.spatial import procrustes

from tests.support.references import normal, rotation

FILE = Path(__file__).parents[2] / "docs" / "studies" / "state_distances.py"
procrustes_distance, subspace_overlap = itemgetter("procrustes_distance", "subspace_overlap")(run_path(str(FILE)))


def test_procrustes_equals_scipys_and_is_invariant_to_rotation_scale_and_translation():
    x, y = normal(40, 6), normal(40, 6, seed=1) + 0.7 * normal(40, 6)
    found = procrustes_distance(x, y).item()
    assert 1 - (1 - found / 2) ** 2 == pytest.approx(procrustes(x.numpy(), y.numpy())[2], rel=1e-9)  # scipy also scales
    assert procrustes_distance(x, 3 * y @ rotation(6) - 5).item() == pytest.approx(found, rel=1e-9)
    assert procrustes_distance(x, 2 * x @ rotation(6) + 1).item() == pytest.approx(0, abs=1e-12)
    assert procrustes_distance(torch.stack([x, y]), torch.stack([y, y]))[1].item() == pytest.approx(0, abs=1e-12)


def test_the_overlap_is_the_mean_squared_cosine_of_the_principal_angles():
    x, y = normal(60, 9) * torch.arange(9, 0, -1), normal(60, 9, seed=1) * torch.arange(9, 0, -1)
    bases = [np.linalg.svd(side.numpy() - side.numpy().mean(0))[2][:3].T for side in (x, y)]
    expected = (np.cos(subspace_angles(*bases)) ** 2).mean()
    assert subspace_overlap(x, y, k=3).item() == pytest.approx(expected, rel=1e-9)
    turn = rotation(9)
    assert subspace_overlap(5 * x @ turn + 2, y @ turn - 1, k=3).item() == pytest.approx(expected, rel=1e-9)
    assert subspace_overlap(x, x, k=3).item() == pytest.approx(1, rel=1e-12)
    disjoint = torch.cat([x[:, :4], torch.zeros_like(x[:, :4])], 1)
    assert subspace_overlap(disjoint, disjoint.flip(1), k=4).item() == pytest.approx(0, abs=1e-12)
    drawn = [subspace_overlap(normal(60, 9, seed=n), normal(60, 9, seed=n + 500), k=3).item() for n in range(100)]
    assert np.mean(drawn) == pytest.approx(3 / 9, abs=0.03)  # chance
