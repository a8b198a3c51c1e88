"""The probe for watching against refits without each row, a general minimiser and scikit-learn at the best c."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from sklearn.datasets import load_wine
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

from lit_layers.functional import probe, watching_probe
from lit_layers.functional.probe import PrincipalRows
from lit_layers.functional.watching_probe import calibration, fit_watching_probes

CLASSES = 6


def problem(rows=120, dim=8, layers=2, seed=0, apart=1.0, dtype=torch.float64):
    """Rows of classes of different sizes, further apart from layer to layer."""
    generator = torch.Generator().manual_seed(seed)
    labels = (CLASSES * torch.rand(rows, generator=generator) ** 2).long()
    labels[:CLASSES] = torch.arange(CLASSES)
    centers = torch.randn(layers, CLASSES, dim, generator=generator, dtype=dtype)
    centers *= apart * torch.arange(1, layers + 1)[:, None, None]
    features = centers[:, labels] + torch.randn(layers, rows, dim, generator=generator, dtype=dtype)
    return features * torch.logspace(-1, 1, dim, dtype=dtype) + 3, labels


def closed_form(features, labels):
    chosen, held_out = watching_probe._rows_to_choose_by(labels)
    rows = PrincipalRows(features, standardize=True, intercept=True)
    return watching_probe._ClosedForm(rows, 0, labels, chosen), chosen[:held_out]


def refitted(scaled, labels, x, c):
    """Log shares, scores and q of `x` by the closed form of the given rows, in numpy."""
    mean, n = scaled.mean(0), len(scaled)
    covariance = (scaled - mean).T @ (scaled - mean) / n
    counts = np.bincount(labels, minlength=CLASSES)
    scores, q = np.empty(CLASSES), np.empty(CLASSES)
    for number, count in enumerate(counts):
        total = (scaled[labels == number] - mean).sum(0)
        weight = np.linalg.solve(count * covariance + np.eye(len(mean)) / c, total)
        scores[number], q[number] = (x - mean) @ weight, total @ weight / count / 2
    return np.log(counts / n), scores, q


@pytest.mark.parametrize("c", [1e-3, 0.1, 30.0])
def test_what_is_left_out_is_out_of_all_sums(c):
    features, labels = problem(layers=1, rows=40)
    closed, held_out = closed_form(features, labels)
    assert len(held_out) == 8  # a fifth
    found = closed.without(c)
    scaled, truth = StandardScaler().fit_transform(features[0].numpy()), labels.numpy()
    alone = np.bincount(truth)[truth] == 1
    assert sorted(closed.chosen.tolist()) == np.flatnonzero(~alone).tolist()
    for place, row in enumerate(closed.chosen.tolist()):
        others = np.arange(len(truth)) != row
        expected = refitted(scaled[others], truth[others], scaled[row], c)
        for part, numbers in zip(found, expected, strict=True):
            np.testing.assert_allclose(part[place].numpy(), numbers, rtol=1e-9, atol=1e-12)


def test_no_digits_of_float32_rows_are_lost_by_leaving_them_out():
    features, labels = problem(layers=1, rows=40, dim=60, dtype=torch.float32)
    closed, _ = closed_form(features, labels)
    found = closed.without(1e3)
    closed.rows = closed.rows.double()
    for single, double in zip(found, closed.without(1e3), strict=True):
        assert single.dtype == torch.float32
        torch.testing.assert_close(single.double(), double, rtol=1e-7, atol=0)


def test_the_weights_are_the_closed_form_s_of_all_rows_and_of_fewer():
    features, labels = problem(layers=1)
    rows = PrincipalRows(features, standardize=True, intercept=True)
    closed, held_out = closed_form(features, labels)
    calibrated = watching_probe._Calibrated(0.3, 0.7, 0.4, torch.empty(0), torch.empty(0))
    scaled, x, truth = StandardScaler().fit_transform(features[0].numpy()), np.eye(features.shape[2]), labels.numpy()
    stay = np.setdiff1d(np.arange(len(truth)), held_out)
    assert set(truth[stay]) == set(truth)
    for without, kept in ((None, np.arange(len(truth))), (held_out, stay)):
        point = closed.point(calibrated, without)
        logits = torch.from_numpy(x) @ rows.axes[0] @ point[:-1] + point[-1]
        # The steps' start leaves rows out of sums and shares, not out of the covariance.
        counts, mean = np.bincount(truth[kept]), scaled[kept].mean(0)
        for number, count in enumerate(counts):
            total = (scaled[kept][truth[kept] == number] - mean).sum(0)
            weight = np.linalg.solve(count * np.cov(scaled.T, bias=True) + np.eye(len(mean)) / 0.3, total)
            expected = np.log(count / len(kept)) + 0.7 * (x - mean) @ weight - 0.4 * total @ weight / count / 2
            np.testing.assert_allclose(logits[:, number].numpy(), expected, rtol=1e-9, atol=1e-12)


def test_the_calibration_is_the_minimum():
    generator = torch.Generator().manual_seed(1)
    prior, parts = (torch.randn(*shape, 5, generator=generator).double() for shape in ((50,), (2, 50)))
    targets = (prior + 0.7 * parts[0] + 0.3 * parts[1] + torch.randn(50, 5, generator=generator)).argmax(1)

    def mean_loss(factors):
        logits = prior.numpy() + factors[0] * parts[0].numpy() + factors[1] * parts[1].numpy()
        log_proba = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        share = np.exp(prior.numpy()) / np.exp(prior.numpy()).sum(1, keepdims=True)
        return -(log_proba[np.arange(50), targets].sum() + (share * log_proba).sum() / 50) / 51

    expected = minimize(mean_loss, [0.0, 0.0])
    for start in ((0.0, 0.0), (5.0, -2.0)):
        value, *factors = calibration(prior, parts, targets, start)
        assert value == pytest.approx(expected.fun, abs=1e-4)  # it stops where less than 1e-4 nats are gained
        assert factors == pytest.approx(expected.x, abs=0.05)
    assert calibration(prior, -parts, targets)[1:] == (0.0, 0.0)  # scores that say the opposite say nothing
    assert calibration(prior, -parts, targets)[0] == pytest.approx(mean_loss([0, 0]))


def test_rows_that_are_all_told_right_leave_the_calibration_bounded():
    train, test, known, new = train_test_split(*load_wine(return_X_y=True), train_size=89, random_state=0)
    for dtype in (torch.float32, torch.float64):
        (probes,) = fit_watching_probes(torch.from_numpy(train)[None].to(dtype), [torch.from_numpy(known)])
        log_proba = probes.log_proba(torch.from_numpy(test)[None].to(dtype))[0]
        assert torch.nn.functional.cross_entropy(log_proba, torch.from_numpy(new)) < 0.15
    # Told so surely that only rounding is left of the curvature; one of the parts says nothing.
    scores = 1e3 * torch.eye(3)
    for parts in (torch.stack([scores, scores]), torch.stack([scores, torch.zeros(3, 3)]), torch.zeros(2, 3, 3)):
        assert np.isfinite(calibration(torch.zeros(3, 3), parts, torch.arange(3), (1.0, 0.0))).all()


@pytest.mark.parametrize(
    ("rows", "dim", "num_classes", "apart", "most"),
    [(200, 768, 20, 0.3, 0.15), (500, 512, 50, 0.3, 0.15), (2000, 64, 2, 0.1, 0.55), (5000, 128, 500, 0.5, 0.55)],
)
def test_the_steps_do_not_spoil_the_closed_form(rows, dim, num_classes, apart, most):
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(num_classes, (rows + 500,), generator=generator)
    labels[:num_classes] = torch.arange(num_classes)
    centers = apart * torch.randn(num_classes, dim, generator=generator)
    features = (centers[labels] + torch.randn(rows + 500, dim, generator=generator))[None]
    (probes,) = fit_watching_probes(features[:, :rows], [labels[:rows]])
    # What the steps alone come to: 3.1, 2.0, 0.60 and 2.5.
    assert torch.nn.functional.cross_entropy(probes.log_proba(features[:, rows:])[0], labels[rows:]) < most


def test_the_steps_count_by_the_rows_they_were_made_without():
    targets = torch.arange(99) % 3
    right = torch.nn.functional.one_hot(targets, 3).float()
    wrong = right.roll(1, 1)
    for logits, change, expected in (
        (0 * right, right, 1.0),
        (right, -right, 0.0),
        (wrong, wrong, None),  # worse than the class shares whatever counts
        (4 * wrong, 8 * (right - wrong), 1.0),
    ):
        closed = watching_probe._Calibrated(1.0, 1.0, 1.0, torch.zeros(99, 3), logits)
        assert watching_probe._best_share(closed, change, targets)[1] == expected


def test_steps_are_made_as_long_as_they_help_and_none_where_the_closed_form_says_nothing(monkeypatch):
    """Looks at the held-out rows are given the best share; after the step of which nothing helps comes none."""
    features, labels = problem(rows=400, layers=1)
    for shares, expected in (([0.0, *[0.25] * 9], 8), ([0.0, 0.25, 0.0], 2), ([0.0, None], 1)):
        each = iter(shares)
        monkeypatch.setattr(watching_probe, "_best_share", lambda *given, each=each: (1.0, next(each)))
        (probes,) = fit_watching_probes(features, [labels])
        assert probes.num_iterations.tolist() == [expected]
    monkeypatch.undo()
    monkeypatch.setattr(watching_probe, "minimize", lambda *given: pytest.fail("steps were made"))
    fit_watching_probes(torch.zeros(1, 400, 8), [labels])


@pytest.mark.parametrize(("rows", "dim", "apart"), [(400, 30, 0.15), (300, 60, 0.3), (1500, 10, 0.5)])
def test_it_is_near_the_best_logistic_probe(rows, dim, apart):
    features, labels = problem(rows + 3000, dim, 1, apart=apart, dtype=torch.float32)
    train, test = features[0].split([rows, 3000])
    known, new = labels.split([rows, 3000])
    (probes,) = fit_watching_probes(train[None], [known], num_classes=CLASSES)
    log_proba = probes.log_proba(test[None])[0].double()
    scaler = StandardScaler().fit(train.numpy())
    best, accuracy = np.inf, 0.0
    for c in np.logspace(-4, 1, 11):
        fitted = LogisticRegression(C=c, max_iter=1000).fit(scaler.transform(train.numpy()), known.numpy())
        share = fitted.predict_proba(scaler.transform(test.numpy()))
        loss = log_loss(new.numpy(), share, labels=range(CLASSES))
        if loss < best:
            best, accuracy = loss, (share.argmax(1) == new.numpy()).mean()
    assert -log_proba.gather(1, new[:, None]).mean().item() < best + 0.06
    assert (log_proba.argmax(1) == new).double().mean().item() > accuracy - 0.015


def test_affine_features_and_other_numbers_of_classes_change_nothing():
    features, labels = problem()
    (expected,) = fit_watching_probes(features, [labels])
    moved = features * torch.tensor([-3.0, 0.1] * 4).double() + 100
    (found,) = fit_watching_probes(moved, [labels])
    torch.testing.assert_close(found.log_proba(moved), expected.log_proba(features), atol=1e-8, rtol=0)
    names = torch.tensor([4, 9, 2, 0, 7, 5])
    (found,) = fit_watching_probes(features, [names[labels]])
    assert found.num_classes == 10
    torch.testing.assert_close(found.log_proba(features)[..., names], expected.log_proba(features), atol=1e-8, rtol=0)
    assert found.log_proba(features)[..., [1, 3, 6, 8]].isneginf().all()  # of which there was no row
    torch.testing.assert_close(found.c, expected.c)


def test_layers_and_labellings_side_by_side_are_each_one_s_own(monkeypatch):
    def slices(features):  # as on a GPU
        return [slice(0, 2), slice(2, 3)][: len(features)]

    features, labels = problem(layers=3)
    other = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(2))]
    together = fit_watching_probes(features, [labels, other])
    monkeypatch.setattr(watching_probe, "layers_at_once", lambda features, num_classes, device: slices(features))
    for given, in_groups in zip((labels, other), fit_watching_probes(features, [labels, other]), strict=True):
        alone = [fit_watching_probes(features[layer : layer + 1], [given])[0] for layer in range(3)]
        for found in (together[given is other], in_groups):
            expected = probe.together(alone)
            torch.testing.assert_close(found.weight, expected.weight, atol=1e-10, rtol=0)
            torch.testing.assert_close(found.c, expected.c)


@pytest.mark.parametrize("num_classes", [2, 3])
def test_features_that_say_nothing_give_the_class_shares(num_classes):
    labels = torch.arange(600) % num_classes
    (probes,) = fit_watching_probes(torch.full((1, 600, 4), 7.0), [labels])
    share = torch.bincount(labels) / 600
    torch.testing.assert_close(probes.log_proba(torch.full((1, 1, 4), 7.0))[0, 0].exp(), share)
    noise = torch.randn(1, 1200, 4, generator=torch.Generator().manual_seed(3))
    (probes,) = fit_watching_probes(noise[:, :600], [labels])
    losses = -probes.log_proba(noise[:, 600:])[0].gather(1, labels[:, None])
    assert losses.mean() < -(share * share.log()).sum() + 0.005


def test_classes_of_one_row_each_cannot_be_left_out_and_give_their_shares():
    features, labels = torch.randn(1, 5, 3), torch.arange(5)
    (probes,) = fit_watching_probes(features, [labels])
    torch.testing.assert_close(probes.log_proba(features).exp(), torch.full((1, 5, 5), 0.2))


def test_where_it_is_computed_changes_nothing():
    features, labels = problem()
    assert fit_watching_probes(features, []) == []
    (expected,), (found,) = (fit_watching_probes(features, [labels], device=device) for device in (None, "cpu"))
    torch.testing.assert_close(found.weight, expected.weight)


def test_what_cannot_be_fitted_is_refused():
    features, labels = problem()
    for given, message in (
        ((features, [labels.clamp(max=0)]), "at least 2 classes, got only class 0"),
        ((features, [labels[:-1]]), "one label for each of 120 rows"),
        ((features.clone().index_fill_(0, torch.tensor([1]), torch.nan), [labels]), "others at layer 1"),
    ):
        with pytest.raises(ValueError, match=message):
            fit_watching_probes(*given)
    with pytest.raises(TypeError, match="labels to be an integer tensor"):
        fit_watching_probes(features, [labels.double()])
