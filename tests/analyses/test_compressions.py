"""The matrices behind coupling against their definition on Jacobians of the running model."""

import numpy as np
import pytest

from lit_layers.analyses.depth_coupling import CouplingMatrices
from tests.analyses.whole_jacobians import copy_without_block_2, whole_jacobians
from tests.support.listed_batches import Listed
from tests.support.measured import records_of
from tests.support.tiny_models import DIM, tiny_batch


def run(model, *batches, **options):
    """Return the matrices by (layer, other_layer, prompt)."""
    matrices = {}
    for record in records_of(CouplingMatrices(batches=Listed(*batches), **options), model):
        tags = dict(record.tags)
        row, column, k = tags.pop("row"), tags.pop("column"), tags.pop("k")
        key = record.layer, record.other_layer, tags.pop("prompt")
        assert record.metric == "compression"
        assert not tags
        matrix = matrices.setdefault(key, np.full((k, k), np.nan))
        assert np.isnan(matrix[row - 1, column - 1])
        matrix[row - 1, column - 1] = record.value
    assert not any(np.isnan(matrix).any() for matrix in matrices.values())
    return matrices


def test_each_matrix_is_the_first_jacobian_in_the_bases_of_the_second(model):
    batch = tiny_batch("gpt2", batch=2, tokens=6, padding="right")  # 6 and 4 real tokens
    matrices = run(model, batch, pairs=[(1, 3), (3, 1), (2, 2)], k=5, num_prompts=2)
    assert len(matrices) == 6
    for prompt, tokens in ((1, 6), (2, 4)):
        ids = batch["input_ids"][prompt - 1, :tokens][None]
        jacobians = whole_jacobians(model, model.transformer.h, {"input_ids": ids})[0][:, -1, -1]
        for layer, other in ((1, 3), (3, 1), (2, 2)):
            u, values, vt = np.linalg.svd(jacobians[other - 1])
            signs = np.sign(u[np.abs(u).argmax(0), range(DIM)])
            u, v = u * signs, vt.T * signs
            expected = u[:, :5].T @ jacobians[layer - 1] @ v[:, :5]
            np.testing.assert_allclose(matrices[layer, other, prompt], expected, atol=1e-8)
            if layer == other:
                np.testing.assert_allclose(matrices[layer, other, prompt], np.diag(values[:5]), atol=1e-8)
        assert np.abs(matrices[1, 3, prompt] - matrices[1, 3, prompt].T).max() > 1e-3  # rows are not columns


def test_a_dead_block_has_no_matrix(model):
    model = copy_without_block_2(model)
    batch = tiny_batch("gpt2", batch=1, tokens=6)
    assert run(model, batch, pairs=[(1, 2), (2, 3), (1, 3)], k=3).keys() == {(1, 3, 1)}
    with pytest.raises(ValueError, match="coupling_matrices is undefined for every prompt"):
        run(model, batch, pairs=[(1, 2)], k=3)
