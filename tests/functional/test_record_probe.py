"""The probe for the record against float64 optima of scipy, and its c against refits over the whole grid."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from lit_layers.functional.probes import record_probe
from lit_layers.functional.probes.record_probe import C_GRID, fit_record_probes, held_out_rows
from tests.functional.test_watching_probe import CLASSES, problem


def optimum(rows, labels, c, num_classes=CLASSES, start=None):
    """Weights and biases (dim + 1, classes) of the least c sum CE + |W|^2 / 2, by scipy in float64.

    It is convex: from the optimum at the c beside it, where that is given, it takes fewer steps to the same place.
    """
    rows = np.hstack([rows, np.ones((len(rows), 1))])

    def objective(flat):
        weight = flat.reshape(-1, num_classes)
        logits = rows @ weight
        logits -= logits.max(1, keepdims=True)
        share = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        value = -c * np.log(share[np.arange(len(labels)), labels]).sum() + (weight[:-1] ** 2).sum() / 2
        share[np.arange(len(labels)), labels] -= 1
        slope = c * rows.T @ share
        slope[:-1] += weight[:-1]
        return value / c / len(labels), slope.ravel() / c / len(labels)

    options = {"maxiter": 5000, "ftol": 1e-14, "gtol": 1e-7}
    start = np.zeros(rows.shape[1] * num_classes) if start is None else start.ravel()
    return minimize(objective, start, jac=True, method="L-BFGS-B", options=options).x.reshape(-1, num_classes)


def losses(rows, labels, weight):
    logits = rows @ weight[:-1] + weight[-1]
    logits -= logits.max(1, keepdims=True)
    return np.log(np.exp(logits).sum(1)) - logits[np.arange(len(labels)), labels]


def spied(monkeypatch, owner, name, note):
    of = getattr(owner, name)

    def spy(*given):
        note(*given)
        return of(*given)

    monkeypatch.setattr(owner, name, spy)


def place_of(c):
    return int(np.argmin(np.abs(np.log(C_GRID) - c.log().item())))


def scaled(features):
    return (features - features.mean(0)) / features.std(0)


@pytest.fixture(scope="module")
def data():
    features, labels = problem(rows=400, layers=3, apart=0.4)
    features[0] = torch.randn(features[0].shape, generator=torch.Generator().manual_seed(5))  # says nothing
    return features, labels


@pytest.fixture(scope="module")
def probes(data):
    return fit_record_probes(*data)


def test_the_c_is_the_best_of_refits_over_the_whole_grid_and_the_probe_the_optimum_there(data, probes):
    features, labels = data
    truth, folds = labels.numpy(), held_out_rows(labels)
    assert len(folds) == 5
    for layer, rows in enumerate(map(scaled, features.numpy())):
        by_c = [[] for _ in C_GRID]
        for held in (fold.numpy() for fold in folds):
            weight = None
            for parts, c in zip(by_c, C_GRID, strict=True):
                weight = optimum(rows[~held], truth[~held], c, start=weight)
                parts.append(losses(rows[held], truth[held], weight))
        best = int(np.argmin([np.concatenate(parts).mean() for parts in by_c]))
        assert probes.c[layer].item() == pytest.approx(C_GRID[best])
        assert probes.converged[layer]
        expected = losses(rows, truth, optimum(rows, truth, C_GRID[best]))
        found = -probes.log_proba(features)[layer].gather(1, labels[:, None])[:, 0].numpy()
        # Fits end at a tenth of the standard error of the mean.
        assert abs(found.mean() - expected.mean()) < 0.1 * expected.std() / len(truth) ** 0.5
    assert probes.c[0] < probes.c[2]
    assert len(set(probes.c.tolist())) > 1


def test_the_path_ends_behind_the_valley_and_no_sooner(data, probes, monkeypatch):
    features, labels = data
    places = []
    spied(monkeypatch, record_probe._Path, "_softmax", lambda path, held, place: places.append(place.item()))
    fit_record_probes(features[:1], labels)
    visited = sorted(set(places))
    best = place_of(probes.c[0])
    assert visited == list(range(len(visited)))  # from the strongest on
    assert best < visited[-1] < len(C_GRID) - 4


def test_one_fold_is_enough_where_it_holds_a_thousand_rows():
    labels = torch.arange(6000) % 3
    (held,) = held_out_rows(labels)
    assert held.sum() == 1200
    fewer = held_out_rows(labels[:4000])
    assert len(fewer) == 5
    assert torch.stack(fewer).sum(0).eq(1).all()  # each row once


def test_rows_of_a_group_are_held_out_together_and_every_class_keeps_a_row():
    groups, labels = torch.arange(600) // 3, torch.arange(600) % 7
    labels[0], labels[300:303] = 7, 8  # classes of one row, and of one group
    folds = held_out_rows(labels, groups)
    assert torch.stack(folds).sum(0)[[0, 300, 301, 302]].eq(0).all()
    for held in folds:
        assert set(labels[~held].tolist()) == set(range(9))
        usual = held[3:300].view(-1, 3)
        assert usual.any(1).equal(usual.all(1))
    with pytest.raises(ValueError, match=r"a group for each of 600 rows, got shape \(5,\)"):
        held_out_rows(labels, groups[:5])


@pytest.mark.soak
def test_the_order_of_rows_the_numbers_of_classes_and_affine_features_change_nothing(data, probes):
    features, labels = data
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(3))
    found = fit_record_probes(features[:, order], labels[order], groups=order)
    assert torch.equal(found.c, probes.c)
    torch.testing.assert_close(found.log_proba(features), probes.log_proba(features), rtol=0, atol=1e-7)
    names = torch.tensor([4, 9, 2, 0, 7, 5])
    found = fit_record_probes(features * 3 - 1, names[labels], num_classes=10)  # standardised, so that scales are gone
    assert torch.equal(found.c, probes.c)
    torch.testing.assert_close(
        found.log_proba(features * 3 - 1)[..., names], probes.log_proba(features), rtol=0, atol=1e-6
    )


@pytest.mark.soak
def test_a_warm_start_gives_the_same_c_and_as_near_a_probe_and_tries_one_c_on_each_side(data, probes, monkeypatch):
    features, labels = data
    generator = torch.Generator().manual_seed(4)
    moved = features + 0.1 * features.std(1, keepdim=True) * torch.randn(features.shape, generator=generator).double()
    cold = fit_record_probes(moved, labels)
    places, evaluations = [], []
    spied(monkeypatch, record_probe._Path, "_softmax", lambda path, held, place: places.append(place.item()))
    spied(monkeypatch, record_probe.Softmax, "evaluate", lambda *given: evaluations.append(1))
    for start in (probes, replace(probes, c=probes.c * 100), replace(probes, without=-probes.without)):
        places.clear()
        evaluations.clear()
        warm = fit_record_probes(moved, labels, start=start)
        if start is probes:
            assert set(places) == {place_of(c) + way for c in probes.c for way in (-1, 0, 1)}
            assert len(evaluations) < 400  # 1,011 without a start
        assert torch.equal(warm.c, cold.c)
        for layer in range(3):
            each = [-one.log_proba(moved)[layer].gather(1, labels[:, None])[:, 0] for one in (warm, cold)]
            # Each of the two ends within about a tenth of the standard error.
            assert abs(each[0].mean() - each[1].mean()) < 0.3 * each[1].std() / len(labels) ** 0.5
    with pytest.raises(ValueError, match="start to be probes of 2 layers"):
        fit_record_probes(features[:2], labels, start=probes)


def test_what_the_next_start_takes_for_the_rows_held_out_has_not_seen_them(data, monkeypatch):
    monkeypatch.setattr(record_probe, "ENOUGH", 60)  # of 400 rows one fifth is enough
    features, labels = data
    probes = fit_record_probes(features[1:2], labels)
    (held,) = (fold.numpy() for fold in held_out_rows(labels))
    rows, truth, place = scaled(features[1].numpy()), labels.numpy(), place_of(probes.c[0])
    # A fit ends at about a tenth of the standard error.
    for weight, c in zip(probes.without[0].numpy(), C_GRID[place - 1 : place + 2], strict=True):
        expected = optimum(rows[~held], truth[~held], c)
        values = [losses(rows[held], truth[held], each) for each in (weight, expected)]
        assert abs(values[0].mean() - values[1].mean()) < 0.3 * values[1].std() / held.sum() ** 0.5


def test_layers_side_by_side_are_each_one_s_own(data, probes, monkeypatch):
    features, labels = data
    monkeypatch.setattr(record_probe, "layers_at_once", lambda *given: [slice(0, 3)])  # as on a GPU
    found = fit_record_probes(features, labels)
    torch.testing.assert_close(found.c, probes.c)
    torch.testing.assert_close(found.log_proba(features), probes.log_proba(features), rtol=0, atol=1e-7)


def test_few_rows_have_a_probe_and_what_cannot_be_fitted_is_refused(data):
    features, labels = data
    alone = fit_record_probes(features[:, :5], torch.arange(5))  # no row can be spared: near the class shares
    assert alone.c.tolist() == pytest.approx([1e-5] * 3)
    torch.testing.assert_close(
        alone.log_proba(features[:, :9]).exp(), torch.full((3, 9, 5), 0.2).double(), atol=1e-2, rtol=0
    )
    assert fit_record_probes(features[:, :4], torch.tensor([0, 0, 1, 1])).log_proba(features).isfinite().all()
    assert not fit_record_probes(features[:1], labels, max_iterations=1).converged
    for given, message in (
        ((features, labels.clamp(max=0)), "at least 2 classes, got only class 0"),
        ((features.index_fill(0, torch.tensor([1]), torch.nan), labels), "others at layer 1"),
    ):
        with pytest.raises(ValueError, match=message):
            fit_record_probes(*given)
