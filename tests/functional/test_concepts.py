"""Concept alignment against loops over pairs and hand-solved cases, with invariances and refusals."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.stats import ortho_group

from lit_layers.functional.geometry import _derangements, concept_alignment
from tests.support.references import cosine, normal


def alignment_from_loops(first, second, metric=None):
    """Return the Gram matrix, the mean over i < j and the leave-one-out mean of arrays (pairs, dim)."""
    deltas = second - first
    size = len(deltas)
    gram = np.array([[cosine(a, b, metric) for b in deltas] for a in deltas])
    mean = np.mean([gram[i, j] for i, j in itertools.combinations(range(size), 2)])
    others = [np.mean([deltas[j] for j in range(size) if j != i], axis=0) for i in range(size)]
    return gram, mean, np.mean([cosine(deltas[i], others[i], metric) for i in range(size)])


def test_every_value_agrees_with_loops_over_pairs():
    first, second = normal(2, 3, 9, 6), normal(2, 3, 9, 6, seed=1) + 2  # the two kinds of words differ in the mean
    found = concept_alignment(first, second, shuffles=4, seed=3)
    assert found.gram.shape == (2, 3, 9, 9)
    for index in itertools.product(range(2), range(3)):
        a, b = first[index].numpy(), second[index].numpy()
        gram, mean, leave_one_out = alignment_from_loops(a, b)
        np.testing.assert_allclose(found.gram[index], gram, atol=1e-10)
        assert found.mean[index].item() == pytest.approx(mean, abs=1e-10)
        np.testing.assert_allclose(found.by_pair[index], (gram.sum(1) - 1) / 8, atol=1e-10)
        assert found.leave_one_out[index].item() == pytest.approx(leave_one_out, abs=1e-10)
        shuffled = np.mean([alignment_from_loops(a, b[order.numpy()])[1] for order in _derangements(9, 4, 3)])
        assert found.shuffled[index].item() == pytest.approx(shuffled, abs=1e-10)
        assert found.excess[index].item() == pytest.approx(mean - shuffled, abs=1e-10)


def test_four_pairs_solved_by_hand():
    first = torch.tensor([[0.0, 0], [5, 5], [1, 0], [0, 0]])
    second = torch.tensor([[2.0, 0], [5, 8], [2, 1], [-4, 0]])  # deltas (2, 0), (0, 3), (1, 1), (-4, 0)
    half = math.sqrt(0.5)
    found = concept_alignment(first, second)
    assert found.mean.item() == pytest.approx((0 + half - 1 + half + 0 - half) / 6)
    # sums of the other deltas: (-3, 4), (-1, 1), (-2, 3), (3, 4)
    expected = (-3 / 5 + half + 1 / math.sqrt(26) - 3 / 5) / 4
    assert found.leave_one_out.item() == pytest.approx(expected)


def test_rotation_translation_scale_order_and_swapped_sides_change_nothing():
    first, second = normal(8, 6), normal(8, 6, seed=1) + 1
    turn = torch.from_numpy(ortho_group.rvs(6, random_state=0))
    shift, order = normal(6, seed=9), torch.tensor([3, 1, 7, 0, 2, 6, 5, 4])
    found = concept_alignment(first, second)
    moved = concept_alignment(3 * first @ turn + shift, 3 * second @ turn + shift)
    for name in ("mean", "leave_one_out", "shuffled", "excess", "gram", "by_pair"):
        np.testing.assert_allclose(getattr(moved, name), getattr(found, name), atol=1e-12)
    for other in (concept_alignment(first[order], second[order]), concept_alignment(second, first)):
        np.testing.assert_allclose(other.mean, found.mean, atol=1e-12)
        np.testing.assert_allclose(other.leave_one_out, found.leave_one_out, atol=1e-12)


def test_a_derangement_moves_every_word_and_all_are_equally_probable():
    drawn = [tuple(order.tolist()) for order in _derangements(4, 4500, seed=0)]
    assert all(index != word for order in drawn for index, word in enumerate(order))
    counts = {order: drawn.count(order) for order in set(drawn)}
    assert len(counts) == 9  # all derangements of 4 words
    assert sum((count - 500) ** 2 / 500 for count in counts.values()) < 26.1  # chi-square, 8 degrees, p = 0.001


def test_shuffles_depend_only_on_the_seed_and_keep_the_global_random_state():
    first, second = normal(8, 6), normal(8, 6, seed=1)
    before = torch.get_rng_state()
    found = concept_alignment(first, second)
    torch.manual_seed(123)
    assert concept_alignment(first, second).shuffled == found.shuffled
    assert concept_alignment(first, second, seed=1).shuffled != found.shuffled
    torch.set_rng_state(before)
    concept_alignment(first, second)
    assert torch.equal(torch.get_rng_state(), before)


def test_shuffled_pairs_with_a_zero_delta_are_left_out():
    first = normal(5, 4)
    second = normal(5, 4, seed=1)
    second[1] = first[0]  # antonyms come in both orders: before - after, after - before
    second[0] = first[1]
    found = concept_alignment(first, second, shuffles=40)
    values = []
    for order in _derangements(5, 40, 0):
        deltas = (second[order] - first).numpy()
        kept = [row for row in deltas if row.any()]
        values.append(np.mean([cosine(a, b) for a, b in itertools.combinations(kept, 2)]))
        assert len(kept) in (3, 4, 5)
    assert found.shuffled.item() == pytest.approx(np.mean(values))
    first, second = torch.eye(3).double(), torch.tensor([[2.0, 3, 4], [1, 0, 0], [1, 0, 0]]).double()
    (order,) = _derangements(3, 1, 0)
    deltas = (second[order] - first)[1:].numpy()  # the first delta is zero in both derangements
    assert concept_alignment(first, second, shuffles=1).shuffled.item() == pytest.approx(cosine(*deltas))


def test_only_the_layer_with_a_zero_delta_is_nan_and_a_refusal_names_it():
    first, second = normal(2, 5, 3), normal(2, 5, 3, seed=1)
    expected = concept_alignment(first[1], second[1])
    second[0, 2] = first[0, 2]
    found = concept_alignment(first, second, undefined="nan")
    for name in ("mean", "leave_one_out", "shuffled", "excess", "gram", "by_pair"):
        assert getattr(found, name)[0].isnan().all()
        np.testing.assert_allclose(getattr(found, name)[1], getattr(expected, name), atol=1e-14)
    with pytest.raises(ValueError, match=r"undefined at element \(0,.*: a pair's two words are the same point"):
        concept_alignment(first, second)
    first[0, 0, 0] = math.inf
    assert concept_alignment(first, second, undefined="nan").mean.isnan().tolist() == [True, False]
    with pytest.raises(ValueError, match="a point is not finite"):
        concept_alignment(first, second)


def test_only_leave_one_out_is_undefined_if_the_other_deltas_cancel():
    deltas = torch.tensor([[0.1, 0.2], [-0.1, -0.2], [3.0, 1.0]])
    found = concept_alignment(torch.zeros(3, 2), deltas, undefined="nan")
    assert found.leave_one_out.isnan()
    assert found.mean.item() == pytest.approx(-1 / 3)
    with pytest.raises(ValueError, match="leave_one_out is undefined: the deltas of the other pairs cancel"):
        concept_alignment(torch.zeros(3, 2), deltas)


def test_too_few_pairs_and_unequal_shapes_are_refused():
    for first, second, shapes in (
        (torch.ones(2, 4), torch.zeros(2, 4), r"\(2, 4\) and \(2, 4\)"),
        (torch.ones(3, 4), torch.zeros(3, 5), r"\(3, 4\) and \(3, 5\)"),
    ):
        with pytest.raises(ValueError, match=f"of one shape .*, 3 pairs or more, got {shapes}"):
            concept_alignment(first, second)
