"""The probe for watching against refits without each row, a general minimiser and scikit-learn at the best c."""

import itertools

import numpy as np
import pytest
import torch
from scipy.optimize import approx_fprime, minimize
from sklearn.datasets import load_wine
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

from lit_layers.functional.probes import logistic, watching_probe
from lit_layers.functional.probes.logistic import PrincipalRows
from lit_layers.functional.probes.watching_probe import (
    best_share,
    calibration,
    fit_watching_probes,
    fold_numbers,
    held_out_rows,
)

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


def refitted(rest, scaled, labels, x, c):
    """Log shares, scores and q of `x` by the closed form of the given rows about the mean and covariance of `rest`."""
    mean, covariance = rest.mean(0), np.cov(rest.T, bias=True)
    counts = np.bincount(labels, minlength=CLASSES)
    scores, q = np.empty(CLASSES), np.empty(CLASSES)
    for number, count in enumerate(counts):
        total = (scaled[labels == number] - mean).sum(0)
        weight = np.linalg.solve(count * covariance + np.eye(len(mean)) / c, total)
        scores[number], q[number] = (x - mean) @ weight, total @ weight / count / 2
    return np.log(counts / len(labels)), scores, q


def forms_of(monkeypatch, features, labels, groups=None):
    """The closed forms of each fold, of one layer."""
    forms = []

    def spy(given, targets, of=watching_probe._calibrated):
        forms.extend(given)
        return of(given, targets)

    monkeypatch.setattr(watching_probe, "_calibrated", spy)
    fit_watching_probes(features, [labels], groups=groups)
    return forms


@pytest.mark.parametrize("grouped", [False, True])
def test_the_rows_held_out_and_their_groups_are_out_of_everything(monkeypatch, grouped):
    features, labels = problem(layers=1, rows=80)
    groups = torch.arange(80) // 4 if grouped else None
    scaled, truth = StandardScaler().fit_transform(features[0].numpy()), labels.numpy()
    folds, fold = held_out_rows(labels, groups), fold_numbers(80, groups).numpy()
    forms = forms_of(monkeypatch, features, labels, groups)
    assert len(forms) == len(folds) == 5
    for number, (form, held) in enumerate(zip(forms, (fold.numpy() for fold in folds), strict=True)):
        out = fold == number
        if grouped:  # of a text all rows or none
            assert out.reshape(-1, 4).any(1).tolist() == out.reshape(-1, 4).all(1).tolist()
        # A row that is the last of its class stays in the class's sum alone.
        assert not (held & ~out).any()
        for c in (1e-3, 0.1, 30.0):
            found = form.parts(c)
            for place, row in enumerate(np.flatnonzero(held)):
                expected = refitted(scaled[~out], scaled[~held], truth[~held], scaled[row], c)
                for part, numbers in zip(found, expected, strict=True):
                    np.testing.assert_allclose(part[place].numpy(), numbers, rtol=1e-9, atol=1e-10)


def test_rows_of_one_text_that_are_nearly_equal_fool_a_choice_row_by_row_alone():
    """Texts of 8 rows, of which each has the same label and all but the same features: a row beside its copies is told
    by what no other text has."""
    generator = torch.Generator().manual_seed(0)
    texts, dim = 300, 100
    labels = torch.randint(4, (texts,), generator=generator)
    centers = 0.25 * torch.randn(4, dim, generator=generator)
    of_texts = centers[labels] + torch.randn(texts, dim, generator=generator)
    copies, groups = labels[:100].repeat_interleave(8), torch.arange(100).repeat_interleave(8)
    features = of_texts[:100].repeat_interleave(8, 0) + 0.1 * torch.randn(800, dim, generator=generator)
    losses = {}
    for name, given in (("rows", None), ("texts", groups)):
        (probes,) = fit_watching_probes(features[None], [copies], groups=given)
        log_proba = probes.log_proba(of_texts[None, 100:])[0]
        losses[name] = float(torch.nn.functional.cross_entropy(log_proba, labels[100:])), float(probes.c)
    chance = np.log(4)
    assert losses["texts"][0] < chance
    assert losses["rows"][0] > losses["texts"][0] + 0.3
    assert losses["rows"][1] > losses["texts"][1]


def test_the_weights_are_the_closed_form_s_of_all_rows_and_of_fewer(monkeypatch):
    features, labels = problem(layers=1)
    rows = PrincipalRows(features, standardize=True, intercept=True)
    inputs, counts = rows.inputs[0, :, :-1], torch.bincount(labels).double()
    space = watching_probe._Space(torch.zeros(inputs.shape[1]).double(), None, rows.spread[0])
    sums = watching_probe._class_sums(inputs, labels, len(counts))
    whole = watching_probe._ClosedForm(space, sums, counts, inputs[:0])
    held = held_out_rows(labels)[0].numpy()
    calibrated = watching_probe._Calibrated(0.3, 0.7, 0.4, torch.empty(0), torch.empty(0))
    scaled, x, truth = StandardScaler().fit_transform(features[0].numpy()), np.eye(features.shape[2]), labels.numpy()
    fold = forms_of(monkeypatch, features, labels)[0]
    for form, kept, rest in (
        (whole, np.arange(120), np.arange(120)),
        (fold, np.flatnonzero(~held), np.flatnonzero(fold_numbers(120) != 0)),
    ):
        point = form.point(calibrated)
        logits = (torch.from_numpy(x) @ rows.axes[0] @ point[:-1] + point[-1]).numpy()
        for place, row in enumerate(x):
            prior, scores, q = refitted(scaled[rest], scaled[kept], truth[kept], row, 0.3)
            np.testing.assert_allclose(logits[place], prior + 0.7 * scores - 0.4 * q, rtol=1e-9, atol=1e-10)


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
    for logits, gain, expected in (
        (0 * right, right, 1.0),
        (0 * right, -right, 0.25),  # the least harm
        (4 * wrong, 8 * (right - wrong), 1.0),
    ):
        loss, share = best_share(logits, gain, targets)
        assert share == expected
        by_share = [
            log_loss(targets, (logits + s * gain).double().softmax(1), labels=range(3)) for s in (0.25, 0.5, 0.75, 1.0)
        ]
        assert float(loss) == pytest.approx(min(by_share), rel=1e-5, abs=1e-6)  # float32


def test_the_steps_go_down_the_logistic_objective_of_all_classes(monkeypatch):
    """Though all but the frequent classes are one to them: against the whole softmax in numpy."""
    features, labels = problem(rows=200, layers=1)
    for name, value in (("LEAST_MOVED", 3), ("COVERED", 0.1), ("COMPONENTS", 5)):
        monkeypatch.setattr(watching_probe, name, value)
    made = []

    class Spied(watching_probe._Steps):
        def __init__(self, rows, targets, kept, c, start):
            super().__init__(rows, targets, kept, c, start)
            made.append((self, start[0].numpy().copy(), rows.inputs[0, kept].numpy(), targets[kept].numpy(), float(c)))

    monkeypatch.setattr(watching_probe, "_Steps", Spied)
    fit_watching_probes(features, [labels])
    ((steps, start, rows, truth, c),) = made
    assert len(truth) == len(labels)
    moved = steps.moved.numpy()
    assert (len(moved), len(steps.others), steps.first) == (3, 3, 3)

    def objective(flat):
        point = start.copy()
        point[3:, moved] += flat.reshape(6, 3)
        logits = rows @ point
        loss = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(truth)), truth]
        return loss.mean() + (point[:-1] ** 2).sum() / (2 * c * len(truth))

    change = torch.randn(1, 6, 4, generator=torch.Generator().manual_seed(1)).double()
    change[..., 0] = 0
    flat = change[0, :, 1:].numpy().ravel()
    (first, _), (value, slope) = steps.evaluate(0 * change), steps.evaluate(change)
    assert float(value - first) == pytest.approx(objective(flat) - objective(0 * flat), rel=1e-8)
    expected = approx_fprime(flat, objective, 1e-7)
    np.testing.assert_allclose(slope[0, :, 1:].numpy().ravel(), expected, atol=1e-5)
    # The preconditioner is the inverse Hessian of rows that all have the class shares.
    share, spread = steps.share[1:].numpy(), steps.spread[0, :, 0].numpy()
    gradient = torch.randn(1, 6, 4, generator=torch.Generator().manual_seed(2)).double()
    found = steps.precondition(gradient)[0].numpy()
    assert not found[:, 0].any()
    for place in range(6):
        hessian = spread[place] * (np.diag(share) - np.outer(share, share)) + np.eye(3) * (place < 5) / c / len(truth)
        np.testing.assert_allclose(found[place, 1:], np.linalg.solve(hessian, gradient[0, place, 1:].numpy()))


def test_the_steps_of_the_result_are_made_on_all_rows(monkeypatch):
    """Until nothing is left of the objective: then the result is scikit-learn's optimum of all rows at its c."""
    features, labels = problem(rows=300, layers=1)
    losses = (torch.tensor(-float(number)) for number in itertools.count(1))
    monkeypatch.setattr(watching_probe, "best_share", lambda *given: (next(losses), 1.0))
    monkeypatch.setattr(watching_probe, "STEPS", 100)
    (probes,) = fit_watching_probes(features, [labels])
    scaled = StandardScaler().fit_transform(features[0].numpy())
    expected = LogisticRegression(C=float(probes.c), tol=1e-9, max_iter=10_000).fit(scaled, labels.numpy())
    found = probes.log_proba(features)[0].exp().numpy()
    np.testing.assert_allclose(found, expected.predict_proba(scaled), atol=1e-5)


def test_of_each_layer_as_many_steps_are_made_on_all_rows_as_helped_it(monkeypatch):
    features, labels = problem(rows=300, layers=1)
    weights = []
    for number in range(4):  # the last help most, and less than all of their change counts
        losses = iter([torch.tensor(-float(place)) for place in range(1, number + 1)] + [torch.tensor(9.0)])
        monkeypatch.setattr(watching_probe, "best_share", lambda *given, each=losses: (next(each), 0.5))
        weights.append(fit_watching_probes(features, [labels])[0].weight)
    whole = features.expand(3, -1, -1)
    numbers = torch.tensor([3, 0, 1])

    class Told(watching_probe._TriedSteps):
        def look(self, change, *given):
            self.number, self.share_of_change = numbers, torch.full_like(self.none[:, :1, :1], 0.5)
            return self.done

    monkeypatch.setattr(watching_probe, "_TriedSteps", Told)
    monkeypatch.setattr(watching_probe, "layers_at_once", lambda *given: [slice(0, 3)])  # as on a GPU
    (probes,) = fit_watching_probes(whole, [labels])
    for found, number in zip(probes.weight, numbers.tolist(), strict=True):
        torch.testing.assert_close(found, weights[number][0], atol=1e-10, rtol=0)
    assert (weights[1] - weights[0]).abs().max() > 1e-3 < (weights[3] - weights[1]).abs().max()


def test_the_last_step_counts_where_it_helps_most(monkeypatch):
    features, labels = problem(rows=300, layers=1)
    losses, numbers, after = itertools.count(-1, -1), [], watching_probe._Steps.after
    monkeypatch.setattr(watching_probe, "best_share", lambda *given: (torch.tensor(float(next(losses))), 1.0))

    def told(self, number):
        numbers.extend(number.tolist())
        return after(self, number)

    monkeypatch.setattr(watching_probe._Steps, "after", told)
    fit_watching_probes(features, [labels])
    assert numbers == [12]


def test_steps_are_made_as_long_as_they_help_and_none_where_the_closed_form_says_nothing(monkeypatch):
    """Looks at the held-out rows are given a loss; after the step that does not help comes none."""
    features, labels = problem(rows=400, layers=1)
    for losses, expected in (([0.0] * 13, 12), ([0.0, 0.0, 9.0], 3), ([9.0], 1)):
        each = iter(losses)
        monkeypatch.setattr(watching_probe, "best_share", lambda *given, each=each: (torch.tensor(next(each)), 0.25))
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
            expected = logistic.together(alone)
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
