"""The matrices behind coupling against their definition on Jacobians of the running model."""

import copy

import numpy as np
import pytest
import torch

from lit_layers.analyses.depth_coupling import Coupling, CouplingMatrices
from lit_layers.errors import InputError
from lit_layers.models.view import LayeredModel
from tests.support.listed_batches import Listed
from tests.support.measured import records_of
from tests.support.tiny_models import DIM, tiny, tiny_batch
from tests.support.whole_jacobians import whole_jacobians


def found(model, *batches, **options):
    """(layer, other_layer, prompt) -> matrix."""
    matrices = {}
    for record in records_of(CouplingMatrices(batches=Listed(*batches), **options), LayeredModel(model)):
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


@pytest.fixture(scope="module")
def model():
    return tiny("gpt2", torch.float64)


def test_each_matrix_is_the_first_jacobian_in_the_bases_of_the_second(model):
    batch = tiny_batch("gpt2", batch=2, tokens=6, padding="right")  # 6 and 4 real tokens
    matrices = found(model, batch, pairs=[(1, 3), (3, 1), (2, 2)], k=5, num_prompts=2)
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


def test_padding_on_either_side_changes_nothing(model):
    sides = [tiny_batch("gpt2", batch=2, tokens=6, padding=side) for side in ("left", "right")]
    sides[0]["input_ids"][1, 2:] = sides[1]["input_ids"][1, :4]
    left, right = (found(model, side, pairs=[(1, 2)], k=4, num_prompts=2) for side in sides)
    for key, matrix in left.items():
        np.testing.assert_allclose(matrix, right[key], atol=1e-6)


def test_the_coupling_of_a_pair_follows_from_its_matrix(model):
    batch = tiny_batch("gpt2", batch=1, tokens=6)
    (matrix,) = found(model, batch, pairs=[(1, 2)], k=0.25).values()
    (own,) = found(model, batch, pairs=[(1, 1)], k=0.25).values()
    values = own.diagonal()
    expected = 1 - np.linalg.norm(matrix - np.diag(values)) / np.linalg.norm(values)
    for record in records_of(Coupling(batches=Listed(batch), k=(0.25,)), LayeredModel(model)):
        if (record.metric, record.layer, record.other_layer) == ("coupling_pair", 1, 2):
            assert record.value == pytest.approx(expected, abs=1e-9)
            return
    raise AssertionError("no coupling of this pair")


def test_a_dead_block_has_no_matrix(model):
    model = copy.deepcopy(model)
    for part in (model.transformer.h[1].attn.c_proj, model.transformer.h[1].mlp.c_proj):
        torch.nn.init.zeros_(part.weight)
    batch = tiny_batch("gpt2", batch=1, tokens=6)
    assert found(model, batch, pairs=[(1, 2), (2, 3), (1, 3)], k=3).keys() == {(1, 3, 1)}
    with pytest.raises(ValueError, match="coupling_matrices is undefined for every prompt"):
        found(model, batch, pairs=[(1, 2)], k=3)


def test_a_model_in_half_precision_is_measured_in_float32():
    batch = tiny_batch("gpt2", batch=1, tokens=6)
    model = tiny("gpt2", torch.bfloat16)
    half, whole = (
        found(model, batch, pairs=[(1, 2)], k=3),
        found(copy.deepcopy(model).float(), batch, pairs=[(1, 2)], k=3),
    )
    assert half.keys() == whole.keys()
    for key, matrix in whole.items():
        np.testing.assert_array_equal(half[key], matrix)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 33}, "expected k between 1 and the dimension 32, got 33; the model is 32 wide: choose another k"),
        ({"k": 0.01}, "expected k between 1 and the dimension 32, got 0.32"),
        ({"pairs": [(1, 4)]}, r"expected pairs of blocks 1..3, got \[\[1, 4\]\]"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_anything_runs(model, options, message):
    analysis = CouplingMatrices(batches=Listed(), **{"pairs": [(1, 2)], "k": 3, **options})
    with pytest.raises(InputError, match=f"^coupling_matrices: .*{message}"):
        analysis.check(LayeredModel(model))
    with pytest.raises(InputError, match=message):
        list(records_of(analysis, LayeredModel(model)))


def test_data_without_prompts_is_refused(model):
    with pytest.raises(InputError, match="the data holds no prompts"):
        found(model, pairs=[(1, 2)], k=3)
