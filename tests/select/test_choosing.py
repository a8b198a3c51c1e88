"""The layer of a task: it equals that of scikit-learn's probes and of the rules as their definitions state them.

Only training and validation rows may decide.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from lit_layers.analyses.probes.probe_fits import ProbeOptions
from lit_layers.errors import InputError
from lit_layers.functional.curves import row_counts
from lit_layers.select.choosing import Choice, choose

SIZES = {"train": 240, "validation": 160, "test": 200}
DIM = 6
# Signal of the label in each layer, 0 to 5: none at first, almost all of it from layer 3 on.
STRENGTHS = (0.0, 0.4, 0.9, 2.0, 1.9, 2.1)


@dataclass
class Planted:
    """Features in memory that record which splits and layers are requested."""

    targets: dict[str, Tensor]
    states: dict[str, Tensor]  # (layers + 1, rows, dim)
    asked: list[Any] = field(default_factory=list)

    def __call__(self, split: str) -> Any:
        self.asked.append(split)
        outer = self

        class Features:
            num_layers = len(outer.states[split]) - 1

            def layer(self, layer: int) -> Tensor:
                outer.asked.append((split, layer))
                return outer.states[split][layer]

        return Features()


def planted(num_classes: int | None, strengths=STRENGTHS, seed: int = 0) -> Planted:
    """Return a class label (or a number) hidden in noise.

    Each layer has it along one direction per class. Dimensions have random scales and shifts.
    """
    random = np.random.default_rng(seed)
    targets, states = {}, {}
    directions = random.normal(size=(num_classes or 1, DIM))
    scale, shift = 10.0 ** random.uniform(-2, 2, size=DIM), random.normal(size=DIM) * 5
    for split, rows in SIZES.items():
        if num_classes is None:
            label = random.normal(size=rows) * 2 + 1
            signal = (label - 1)[:, None] * directions[0]
            targets[split] = torch.from_numpy(label)
        else:
            label = random.integers(num_classes, size=rows)
            signal = directions[label]
            targets[split] = torch.from_numpy(label)
        noise = random.normal(size=(len(strengths), rows, DIM))
        found = np.stack([strength * signal + each for strength, each in zip(strengths, noise, strict=True)])
        states[split] = torch.from_numpy(found * scale + shift)
    return Planted(targets, states)


def scikit_learn_rows(data: Planted, split: str, layer: int, num_classes: int | None) -> np.ndarray:
    """Return for each row whether it is predicted correctly, or its squared error."""
    scaler = StandardScaler().fit(data.states["train"][layer].numpy())
    train, rows = (scaler.transform(data.states[each][layer].numpy()) for each in ("train", split))
    model: Any = Ridge(alpha=1.0) if num_classes is None else LogisticRegression(C=1.0, tol=1e-10, max_iter=10_000)
    predicted = model.fit(train, data.targets["train"].numpy()).predict(rows)
    truth = data.targets[split].numpy()
    return (predicted - truth) ** 2 if num_classes is None else (predicted == truth).astype(float)


def layer_by_definition(rule: str, tolerance: float, scores: list[float]) -> int:
    """Apply the definition of a rule to the scores of layers 1 to L. Larger scores are better."""
    layers, last = range(1, len(scores) + 1), scores[-1]
    if rule == "best":
        return next(layer for layer in layers if scores[layer - 1] == max(scores))
    if rule == "within_tolerance":
        return next(layer for layer in layers if scores[layer - 1] >= last - tolerance)
    if rule == "fraction_of_last":
        return next(layer for layer in layers if scores[layer - 1] >= (1 - tolerance) * last)
    if rule == "plateau":
        steps = {layer: scores[layer] - scores[layer - 1] for layer in layers[:-1]}  # from a layer to the next one
        return next(layer for layer in layers if all(step <= tolerance for low, step in steps.items() if low >= layer))
    first = scores[0]
    above = [score - (first + index / (len(scores) - 1) * (last - first)) for index, score in enumerate(scores)]
    return 1 + above.index(max(above))


RULES = [("within_tolerance", 0.02), ("fraction_of_last", 0.1), ("plateau", 0.05), ("knee", 0.0), ("best", 0.0)]


@pytest.mark.parametrize("num_classes", [2, 4, None])
def test_every_rule_chooses_the_layer_that_a_loop_with_scikit_learn_chooses(num_classes):
    data = planted(num_classes)
    for rule, tolerance in RULES:
        if num_classes is not None or rule != "fraction_of_last":  # that rule is only for accuracies
            expect_chosen(data, num_classes, rule, tolerance)


def expect_chosen(data: Planted, num_classes: int | None, rule: str, tolerance: float) -> None:
    found = choose(data, data.targets, num_classes=num_classes, rule=rule, tolerance=tolerance)
    curve = [scikit_learn_rows(data, "validation", layer, num_classes).mean() for layer in range(6)]
    sign = -1 if num_classes is None else 1
    expected = layer_by_definition(rule, tolerance, [sign * score for score in curve[1:]])
    assert found.layer == expected, rule
    assert found.num_layers == 5
    if num_classes == 4 and rule != "best":
        assert expected == 3, "where the strength is planted"
    assert found.metric == ("mean_squared_error" if num_classes is None else "accuracy")
    assert {layer: score.value for layer, score in found.validation.items()} == pytest.approx(
        dict(enumerate(curve)), rel=1e-4
    )
    assert (found.rule, found.tolerance) == (rule, tolerance)
    tested = {layer: scikit_learn_rows(data, "test", layer, num_classes) for layer in {expected, 5}}
    assert {layer: score.value for layer, score in found.test.items()} == pytest.approx(
        {layer: rows.mean() for layer, rows in tested.items()}, rel=1e-4
    )
    gap = tested[expected] - tested[5]
    assert found.difference.value == pytest.approx(gap.mean(), abs=1e-4)
    # The comparison is paired: rows of the difference are resampled, not rows of each score.
    means = torch.cat([counts @ torch.from_numpy(gap) / len(gap) for counts in row_counts(len(gap), 2000, 0)])
    bounds = means.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    assert (found.difference.low, found.difference.high) == pytest.approx(bounds, abs=1e-3)


def test_shares_equal_those_of_a_loop_over_resampled_validation_rows():
    data = planted(4)
    found = choose(data, data.targets, num_classes=4, rule="best")
    rows = np.stack([scikit_learn_rows(data, "validation", layer, 4) for layer in range(1, 6)])
    counted = np.zeros(5)
    for counts in row_counts(SIZES["validation"], 2000, 0):
        for curve in counts.numpy() @ rows.T:
            counted[layer_by_definition("best", 0, curve.tolist()) - 1] += 1
    assert list(found.shares) == [1, 2, 3, 4, 5]
    assert list(found.shares.values()) == pytest.approx(counted / 2000, abs=2e-3)
    assert sum(found.shares.values()) == pytest.approx(1)


def test_the_baseline_predicts_validation_rows_from_the_training_labels():
    data = planted(4)
    majority = np.bincount(data.targets["train"].numpy()).argmax()
    found = choose(data, data.targets, num_classes=4)
    assert found.baseline == pytest.approx((data.targets["validation"].numpy() == majority).mean())
    data = planted(None)
    found = choose(data, data.targets, num_classes=None)
    mean = data.targets["train"].numpy().mean()
    assert found.baseline == pytest.approx(((data.targets["validation"].numpy() - mean) ** 2).mean())


def test_test_rows_are_requested_after_the_choice_and_only_for_two_layers():
    data = planted(4)
    choice = choose(data, data.targets, num_classes=4, tolerance=0.02)
    first = data.asked.index("test")
    assert [ask for ask in data.asked[:first] if "test" in ask] == []
    assert data.asked[:2] == ["train", "validation"]
    assert sorted(data.asked[2:first]) == [(split, layer) for split in ("train", "validation") for layer in range(6)]
    assert sorted(data.asked[first + 1 :]) == [("test", choice.layer), ("test", 5)]


def test_neither_the_choice_nor_the_shares_depend_on_test_rows():
    one, other = planted(4), planted(4)
    other.states["test"] = torch.randn_like(one.states["test"])
    other.targets["test"] = torch.arange(SIZES["test"]) % 4
    choices = [choose(data, data.targets, num_classes=4, rule="best") for data in (one, other)]
    facts: list[Callable[[Choice], Any]] = [lambda c: c.layer, lambda c: c.validation, lambda c: c.shares]
    assert all(fact(choices[0]) == fact(choices[1]) for fact in facts)
    assert choices[0].test != choices[1].test


def test_the_last_layer_can_be_chosen_and_its_difference_to_itself_is_0():
    data = planted(3, strengths=(0.0, 0.0, 0.1, 3.0))
    found = choose(data, data.targets, num_classes=3)
    assert found.layer == found.num_layers == 3
    assert list(found.test) == [3]
    assert (found.difference.value, found.difference.low, found.difference.high) == (0, 0, 0)


def test_the_probe_is_fitted_on_the_training_rows_of_the_chosen_layer():
    data = planted(4)
    found = choose(data, data.targets, num_classes=4, options=ProbeOptions(c=0.1))
    scaler = StandardScaler().fit(data.states["train"][found.layer].numpy())
    rows = scaler.transform(data.states["train"][found.layer].numpy())
    model = LogisticRegression(C=0.1, tol=1e-10, max_iter=10_000).fit(rows, data.targets["train"].numpy())
    given = found.probe.log_proba(data.states["test"][found.layer][None])[0].exp()
    expected = model.predict_proba(scaler.transform(data.states["test"][found.layer].numpy()))
    np.testing.assert_allclose(given.numpy(), expected, atol=1e-4)


def test_a_class_without_training_rows_counts_as_an_error_at_every_layer():
    data = planted(4)
    keep = data.targets["train"] != 2
    data.targets["train"], data.states["train"] = data.targets["train"][keep], data.states["train"][:, keep]
    found = choose(data, data.targets, num_classes=4)
    curve = {layer: scikit_learn_rows(data, "validation", layer, 4).mean() for layer in range(6)}
    assert {layer: score.value for layer, score in found.validation.items()} == pytest.approx(curve)


def test_a_model_that_predicts_no_better_than_the_labels_has_no_layer():
    """Layer 0 cannot be chosen. The other layers have no signal, and unregularised probes overfit a few rows."""
    for num_classes, sentence in (
        (3, r"rule: no layer can be chosen: the best validation accuracy of a probe is 0\.\d+, and the majority class"),
        (None, r"the best validation mean_squared_error of a probe is \d+\.\d+, and the training mean alone gives"),
    ):
        data = planted(num_classes, strengths=(5.0, 0.0, 0.0), seed=1)
        data.targets["train"], data.states["train"] = data.targets["train"][:20], data.states["train"][:, :20]
        if num_classes:
            for labels in data.targets.values():
                labels[torch.arange(len(labels)) % 10 != 0] = 0
        with pytest.raises(InputError, match=sentence):
            choose(data, data.targets, num_classes=num_classes, options=ProbeOptions(c=100.0, penalty=0.0))
        assert "test" not in data.asked, num_classes


def test_invalid_options_and_rows_are_refused_before_any_feature_is_computed():
    for num_classes, options, sentence in (
        (None, {"rule": "fraction_of_last"}, "rule: fraction_of_last with tolerance 0.01 chooses no layer here: .*"),
        (4, {"tolerance": -0.1}, "expected a tolerance of at least 0, got -0.1"),
        (4, {"tolerance": math.nan}, "expected a tolerance of at least 0, got nan"),
        (4, {"rule": "fraction_of_last", "tolerance": 1.0}, "a tolerance below 1"),
        (4, {"rule": "first"}, "rule: first with tolerance 0.01 chooses no layer here"),
        (2, {"by": "mean_squared_error"}, "by: expected accuracy or log_loss of this task's probes, got mean_squared"),
    ):
        data = planted(num_classes)
        with pytest.raises(InputError, match=sentence):
            choose(data, data.targets, num_classes=num_classes, **options)
        assert data.asked == [], options
    data = planted(3)
    for split in SIZES:
        with pytest.raises(InputError, match=f"{split}: expected at least 2 rows, got 1: give more"):
            choose(data, data.targets | {split: data.targets[split][:1]}, num_classes=3)
    with pytest.raises(InputError, match="train: all rows have one class, and a probe needs two"):
        choose(data, data.targets | {"train": torch.zeros(SIZES["train"], dtype=torch.int64)}, num_classes=3)
    assert data.asked == []
    with pytest.raises(InputError, match="the probe of layer 0 has not converged: allow more, or lower c"):
        choose(data, data.targets, num_classes=3, options=ProbeOptions(max_iterations=1))


def test_progress_is_reported_layer_by_layer():
    data, reported = planted(3), []
    choose(data, data.targets, num_classes=3, progress=lambda *args: reported.append(args))
    assert reported == [*((layer, 6, f"probe of layer {layer}") for layer in range(6)), (6, 6, "")]


def test_the_choice_by_log_loss_equals_that_of_scikit_learns_probabilities():
    data = planted(3, seed=4)
    data.targets["validation"][:5] = data.targets["test"][:7] = 3  # a class without training rows has no log-loss
    found = choose(data, data.targets, num_classes=4, rule="best", by="log_loss")

    def losses(split: str, layer: int) -> np.ndarray:
        scaler = StandardScaler().fit(data.states["train"][layer].numpy())
        train, rows = (scaler.transform(data.states[each][layer].numpy()) for each in ("train", split))
        model = LogisticRegression(C=1.0, tol=1e-10, max_iter=10_000).fit(train, data.targets["train"].numpy())
        truth = data.targets[split].numpy()
        seen = truth < 3
        return -model.predict_log_proba(rows[seen])[np.arange(seen.sum()), truth[seen]]

    curve = [losses("validation", layer).mean() for layer in range(6)]
    assert {layer: score.value for layer, score in found.validation.items()} == pytest.approx(
        dict(enumerate(curve)), rel=1e-3
    )
    assert found.layer == 1 + int(np.argmin(curve[1:]))
    assert found.test[found.layer].value == pytest.approx(losses("test", found.layer).mean(), rel=1e-3)
    shares = np.bincount(data.targets["train"].numpy(), minlength=3) / SIZES["train"]
    truth = data.targets["validation"].numpy()
    assert found.baseline == pytest.approx(-np.log(shares[truth[truth < 3]]).mean(), rel=1e-9)
    assert found.metric == "log_loss"
