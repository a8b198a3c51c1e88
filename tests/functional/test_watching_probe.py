"""The watching probe against scikit-learn at the best c, separate refits and invariances."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from sklearn.datasets import load_wine
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch.nn.functional import cross_entropy

from lit_layers.functional.probes.logistic import (
    LogisticProbes,
    best_factor,
    fit_watching_probes,
    fold_ids,
    held_out_rows,
)

CLASSES = 6


def problem(rows=120, dim=8, layers=2, seed=0, spread=1.0, dtype=torch.float64):
    """Return rows of classes of different sizes, whose distance grows with the layer."""
    generator = torch.Generator().manual_seed(seed)
    labels = (CLASSES * torch.rand(rows, generator=generator) ** 2).long()
    labels[:CLASSES] = torch.arange(CLASSES)
    centers = torch.randn(layers, CLASSES, dim, generator=generator, dtype=dtype)
    centers *= spread * torch.arange(1, layers + 1)[:, None, None]
    features = centers[:, labels] + torch.randn(layers, rows, dim, generator=generator, dtype=dtype)
    return features * torch.logspace(-1, 1, dim, dtype=dtype) + 3, labels


@pytest.mark.parametrize("grouped", [False, True])
def test_a_fifth_is_held_out_in_whole_groups_and_each_class_keeps_a_row(grouped):
    targets = torch.arange(80) % 3
    targets[7] = 3  # the only row of its class
    folds = fold_ids(80, torch.arange(80) // 4 if grouped else None)
    assert folds.bincount().tolist() == [16] * 5
    if grouped:
        assert (folds.view(-1, 4) == folds.view(-1, 4)[:, :1]).all()
    masks = held_out_rows(targets, folds)
    assert torch.equal(torch.stack(masks).sum(0), (targets < 3).long())
    assert [held[folds != number].any().item() for number, held in enumerate(masks)] == [False] * 5
    assert len(held_out_rows(torch.arange(3000) % 3, fold_ids(3000))) == 1  # 600 held-out rows are enough
    assert held_out_rows(torch.arange(5), fold_ids(5)) == []


def test_nearly_equal_rows_of_one_text_mislead_only_a_choice_by_single_rows():
    """The 8 rows of a text have one label and nearly equal features, so copies in training identify a held-out row."""
    generator = torch.Generator().manual_seed(0)
    texts, dim = 300, 100
    labels = torch.randint(4, (texts,), generator=generator)
    centers = 0.25 * torch.randn(4, dim, generator=generator)
    vectors = centers[labels] + torch.randn(texts, dim, generator=generator)
    copies, groups = labels[:100].repeat_interleave(8), torch.arange(100).repeat_interleave(8)
    features = vectors[:100].repeat_interleave(8, 0) + 0.1 * torch.randn(800, dim, generator=generator)
    losses = {}
    for name, given in (("rows", None), ("texts", groups)):
        (probes,) = fit_watching_probes(features[None], [copies], groups=given)
        losses[name] = float(cross_entropy(probes.log_proba(vectors[None, 100:])[0], labels[100:])), float(probes.c)
    assert losses["texts"][0] < np.log(4)
    assert losses["rows"][0] > losses["texts"][0] + 0.3
    assert losses["rows"][1] > losses["texts"][1]


def test_the_factor_has_the_lowest_log_loss_and_is_0_if_scores_mislead():
    generator = torch.Generator().manual_seed(1)
    prior, scores = torch.randn(2, 50, 5, generator=generator).double()
    targets = (prior + 0.7 * scores + torch.randn(50, 5, generator=generator)).argmax(1)
    expected = minimize_scalar(lambda t: float(cross_entropy(prior + t * scores, targets)), bounds=(0, 20)).x
    assert best_factor(prior, scores, targets) == pytest.approx(expected, rel=0.15)  # it adds one row
    assert best_factor(prior, -scores, targets) == 0.0
    assert best_factor(prior, 0 * scores, targets) == 0.0
    assert best_factor(torch.zeros(5, 5), torch.eye(5), torch.arange(5)) < 4  # although every row is a hit


def test_optimizer_steps_separate_classes_that_are_not_gaussian():
    """Half of one class lies far from the boundary and dominates its mean and covariance."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(2, (4000,), generator=generator)
    features = torch.randn(4000, 5, generator=generator).double()
    features[:, 0] += labels * torch.where(torch.rand(4000, generator=generator) < 0.5, 3.0, 40.0)
    train, test = features[None].split(2000, 1)
    (probes,) = fit_watching_probes(train, [labels[:2000]])
    discriminant = LinearDiscriminantAnalysis().fit(train[0], labels[:2000]).predict_proba(test[0])
    least = log_loss(labels[2000:], discriminant)
    assert cross_entropy(probes.log_proba(test)[0], labels[2000:]) < least - 0.02


@pytest.mark.parametrize(
    ("rows", "dim", "num_classes", "spread", "dtype"),
    [
        (400, 30, 6, 0.15, torch.float32),
        (1500, 10, 2, 0.5, torch.float64),
        (300, 160, 6, 0.3, torch.float32),  # more dimensions than the steps change
    ],
)
def test_the_probe_is_near_the_best_logistic_probe(rows, dim, num_classes, spread, dtype):
    features, labels = problem(rows + 3000, dim, 1, spread=spread, dtype=dtype)
    labels = labels % num_classes
    train, test = features[0].split([rows, 3000])
    known, new = labels.split([rows, 3000])
    (probes,) = fit_watching_probes(train[None], [known], num_classes=num_classes)
    log_proba = probes.log_proba(test[None])[0].double()
    scaler = StandardScaler().fit(train.numpy())
    best, accuracy = np.inf, 0.0
    for c in np.logspace(-4, 1, 11):
        fitted = LogisticRegression(C=c, max_iter=1000).fit(scaler.transform(train.numpy()), known.numpy())
        share = fitted.predict_proba(scaler.transform(test.numpy()))
        loss = log_loss(new.numpy(), share, labels=range(num_classes))
        if loss < best:
            best, accuracy = loss, (share.argmax(1) == new.numpy()).mean()
    assert cross_entropy(log_proba, new) < best + 0.05
    assert (log_proba.argmax(1) == new).double().mean().item() > accuracy - 0.01


def test_the_probe_stays_bounded_if_all_rows_are_classified_correctly():
    train, test, known, new = train_test_split(*load_wine(return_X_y=True), train_size=89, random_state=0)
    for dtype in (torch.float32, torch.float64):
        (probes,) = fit_watching_probes(torch.from_numpy(train)[None].to(dtype), [torch.from_numpy(known)])
        log_proba = probes.log_proba(torch.from_numpy(test)[None].to(dtype))[0]
        assert cross_entropy(log_proba, torch.from_numpy(new)) < 0.2


def test_affine_maps_of_features_text_order_and_class_ids_change_nothing():
    features, labels = problem()
    groups = torch.arange(120) // 2
    (expected,) = fit_watching_probes(features, [labels], groups=groups)
    moved = features * torch.tensor([-3.0, 0.1] * 4).double() + 100
    order = torch.randperm(120, generator=torch.Generator().manual_seed(1))
    for given, row_order in ((moved, torch.arange(120)), (features, order)):
        (found,) = fit_watching_probes(given[:, row_order], [labels[row_order]], groups=groups[row_order])
        torch.testing.assert_close(found.log_proba(given), expected.log_proba(features), atol=1e-7, rtol=0)
    names = torch.tensor([4, 9, 2, 0, 7, 5])
    (found,) = fit_watching_probes(features, [names[labels]], groups=groups)
    assert found.num_classes == 10
    torch.testing.assert_close(found.log_proba(features)[..., names], expected.log_proba(features), atol=1e-7, rtol=0)
    assert found.log_proba(features)[..., [1, 3, 6, 8]].isneginf().all()  # classes without a row
    torch.testing.assert_close(found.c, expected.c)


def test_layers_and_labellings_fitted_together_equal_separate_fits():
    features, labels = problem(layers=3)
    other = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(2))]
    together = fit_watching_probes(features, [labels, other], device="cpu")
    for given, found in zip((labels, other), together, strict=True):
        single = [fit_watching_probes(features[layer : layer + 1], [given])[0] for layer in range(3)]
        expected = LogisticProbes.stacked(single)
        torch.testing.assert_close(found.weight, expected.weight, atol=1e-12, rtol=0)
        torch.testing.assert_close(found.c, expected.c)
    assert fit_watching_probes(features, []) == []


@pytest.mark.parametrize("num_classes", [2, 3])
def test_uninformative_features_give_the_class_shares(num_classes):
    labels = torch.arange(600) % num_classes
    (probes,) = fit_watching_probes(torch.full((1, 600, 4), 7.0), [labels])
    share = torch.bincount(labels) / 600
    torch.testing.assert_close(probes.log_proba(torch.full((1, 1, 4), 7.0))[0, 0].exp(), share)
    noise = torch.randn(1, 1200, 200, generator=torch.Generator().manual_seed(3))
    (probes,) = fit_watching_probes(noise[:, :600], [labels])
    losses = -probes.log_proba(noise[:, 600:])[0].gather(1, labels[:, None])
    assert losses.mean() < -(share * share.log()).sum() + 0.01


def test_classes_of_one_row_each_cannot_be_held_out_and_give_their_shares():
    features, labels = torch.randn(1, 5, 3), torch.arange(5)
    (probes,) = fit_watching_probes(features, [labels])
    torch.testing.assert_close(probes.log_proba(features).exp(), torch.full((1, 5, 5), 0.2))


def test_invalid_labels_and_features_are_refused():
    features, labels = problem()
    for given, message in (
        ((features, [labels.clamp(max=0)]), "labels of 2 classes or more"),
        ((features, [labels[:-1]]), "a label for each of 120 rows"),
        ((features.clone().index_fill_(0, torch.tensor([1]), torch.nan), [labels]), "others at layer 1"),
    ):
        with pytest.raises(ValueError, match=message):
            fit_watching_probes(*given)
