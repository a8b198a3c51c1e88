"""The label probe against scikit-learn on captured states, cases with known answers, and refusals."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score
from sklearn.preprocessing import StandardScaler

from lit_layers.analyses import LabelProbe
from lit_layers.analyses.probes import probe_fits
from lit_layers.errors import InputError
from lit_layers.functional.curves import bootstrap_interval, wilson_interval
from lit_layers.models.view import LayeredModel
from tests.analyses.prompt_states import states_of_each_prompt
from tests.support.distilled import PREFIX, distilled, states_of_each_image
from tests.support.listed_batches import Listed
from tests.support.measured import keyed_records, records_of
from tests.support.tiny_models import IMAGE, LAYERS, VOCAB, tiny, tiny_batch

EVERY = range(LAYERS + 1)


def images(count, seed, *, classes=3, size=8):
    """Return noise images with a bright band whose position depends on the label (2, 5, 8, ...)."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(classes, (count,), generator=generator)
    numbers[:classes] = torch.arange(classes)
    pixels = torch.randn(count, 3, IMAGE, IMAGE, generator=generator)
    for image, number in zip(pixels, numbers.tolist(), strict=True):
        image[:, 4 * number : 4 * number + 4] += 0.7
    return cut({"pixel_values": pixels, "labels": 3 * numbers + 2}, size)


def texts(count, seed, padding="left"):
    """Return texts of different lengths, labelled by whether their mean token id is high."""
    rows = [tiny_batch("gpt2", batch=4, tokens=10, padding=padding, seed=100 * seed + n) for n in range(count // 4)]
    for batch in rows:
        real = batch["attention_mask"]
        batch["labels"] = ((batch["input_ids"] * real).sum(1) / real.sum(1) > VOCAB / 2).long()
    return Listed(*rows)


def cut(rows, size):
    total = len(rows["labels"])
    return Listed(*({name: v[start : start + size] for name, v in rows.items()} for start in range(0, total, size)))


def joined(batches, name):
    return torch.cat([batch[name] for batch in batches])


def analysis(train, test, **options):
    return LabelProbe(train=train, test=test, **({"tolerance": 1e-8, "random_labels": False} | options))


def run(model, train, test, **options):
    return keyed_records(analysis(train, test, **options), model)


def values(records):
    return {key: record.value for key, record in records.items()}


@pytest.fixture(scope="module")
def split():
    return images(60, seed=1), images(40, seed=2)


def scikit_learn_fit(train, labels, test, c):
    """Return log-probabilities of the test rows and the classes, from features (rows, dim)."""
    scaler = StandardScaler().fit(train)
    fitted = LogisticRegression(C=c, tol=1e-10, max_iter=20000).fit(scaler.transform(train), labels)
    return fitted.predict_log_proba(scaler.transform(test)), fitted.classes_


def check(records, tags, layer, log_proba, classes, truth):
    """Compare the records of one probe with its log-probabilities."""
    predicted = classes[log_proba.argmax(1)]
    hits = predicted == truth
    accuracy = records.pop(("accuracy", layer, *tags))
    assert accuracy.value == hits.mean()
    assert (accuracy.low, accuracy.high) == wilson_interval(int(hits.sum()), len(hits))
    assert accuracy.stderr == pytest.approx(hits.std(ddof=1) / math.sqrt(len(hits)))
    losses = -log_proba[np.arange(len(truth)), np.searchsorted(classes, truth)]
    loss = records.pop(("log_loss", layer, *tags))
    assert loss.value == pytest.approx(losses.mean(), rel=1e-5)
    low, high = bootstrap_interval(torch.tensor(losses))
    assert (loss.low, loss.high) == pytest.approx((low.item(), high.item()), rel=1e-4)
    f1 = records.pop(("macro_f1", layer, *tags))
    assert f1.value == pytest.approx(f1_score(truth, predicted, average="macro", labels=np.unique(truth)))
    assert {record.n for record in (accuracy, loss, f1)} == {len(truth)}


def test_every_record_equals_that_of_scikit_learn_on_states_of_the_running_model(split):
    model, c = distilled(), 0.02
    records = run(model, *split, pooling=("cls", "mean", "last"), c=c)
    features = {}
    for name, batches in zip(("train", "test"), split, strict=True):
        states = states_of_each_image(model, joined(batches, "pixel_values"))
        features[name, "cls"] = np.stack([s[:, 0] for s in states], axis=1)
        features[name, "mean"] = np.stack([s[:, PREFIX:].mean(1) for s in states], axis=1)  # only patches
        features[name, "last"] = np.stack([s[:, -1] for s in states], axis=1)
    labels, truth = (joined(batches, "labels").numpy() for batches in split)
    for pooling in ("cls", "mean", "last"):
        for layer in EVERY:
            train, test = features["train", pooling][layer], features["test", pooling][layer]
            if np.ptp(train, axis=0).max() > 0:
                log_proba, classes = scikit_learn_fit(train, labels, test, c)
            else:  # constant: the class token before block 1
                classes, counts = np.unique(labels, return_counts=True)
                log_proba = np.log(counts / len(labels)).repeat(len(truth)).reshape(-1, len(truth)).T
            check(records, (pooling,), layer, log_proba, classes, truth)
    classes, counts = np.unique(labels, return_counts=True)
    majority = records["accuracy", None, "majority"]
    assert majority.tags == {"reference": "majority", "num_classes": 3, "num_train_rows": 60, "num_duplicates": 0}
    log_share = np.broadcast_to(np.log(counts / 60), (len(truth), 3))
    check(records, ("majority",), None, log_share, classes, truth)
    assert not records
    assert model.training


@pytest.mark.soak
def test_a_probe_that_chooses_its_c_is_near_the_best_logistic_probe_and_reports_its_c(split):
    model = tiny("vit", torch.float64)
    records = run(model, *split, estimator="watch", random_labels=True)
    logistic = [run(model, *split, c=c) for c in (1e-3, 1e-2, 1e-1)]
    for layer in EVERY:
        best = min(each["log_loss", layer, "mean"].value for each in logistic)
        assert records["log_loss", layer, "mean"].value < best + 0.1
        assert records["probe_c", layer, "mean"].n == records["probe_c", layer, "mean", "random_labels"].n == 60


@pytest.mark.parametrize(
    ("estimator", "model_is_on", "fitted_on"), [("logistic", "mps", "cpu"), ("watch", "cuda", "cuda")]
)
def test_probes_are_fitted_on_the_device_of_the_model_if_it_has_float64(estimator, model_is_on, fitted_on, monkeypatch):
    name = {"logistic": "fit_logistic_probes", "watch": "fit_watching_probes"}[estimator]
    fitter = getattr(probe_fits, name)

    def fit(features, labels, *, device, **options):
        assert torch.device(device).type == fitted_on
        return fitter(features, labels, **options)

    monkeypatch.setattr(probe_fits, name, fit)
    model, labels = SimpleNamespace(device=torch.device(model_is_on)), torch.arange(20) % 2
    features, layers = torch.randn(2, 20, 3), torch.tensor([True, True])
    fitting = probe_fits.Fitting(features, labels, features, layers, 2, {}, lambda log_proba, tags, layer: [])
    probes = probe_fits.probe_jobs(model, [], [fitting], probe_fits.ProbeOptions(estimator=estimator), None)
    assert [len(job()) for job in probes.calls] == [int(estimator == "watch")] * 2  # the chosen c


def test_texts_are_probed_at_their_real_tokens():
    model = tiny("gpt2", torch.float64)
    train, test = texts(60, 1, "left"), texts(32, 2, "right")
    records = run(model, train, test, pooling=("last", "mean", "cls"))
    labels, truth = (joined(batches, "labels").numpy() for batches in (train, test))
    first, second = (states_of_each_prompt(model, list(batches)) for batches in (train, test))
    poolings = {"last": lambda s: s[:, -1], "mean": lambda s: s.mean(1), "cls": lambda s: s[:, 0]}
    for pooling, pool in poolings.items():
        for layer in EVERY:
            known, new = (np.stack([pool(states)[layer] for states in split]) for split in (first, second))
            log_proba, classes = scikit_learn_fit(known, labels, new, 1.0)
            check(records, (pooling,), layer, log_proba, classes, truth)


def test_a_label_in_the_pixels_is_read_at_every_layer_and_permuted_labels_are_not():
    model = tiny("vit", torch.float64)
    count = 90
    numbers = torch.arange(count) % 3
    pixels = torch.zeros(count, 3, IMAGE, IMAGE)
    pixels[:, 0] = numbers[:, None, None].float() - 1
    pixels += 0.02 * torch.randn(pixels.shape, generator=torch.Generator().manual_seed(0))
    rows = {"pixel_values": pixels, "labels": numbers}
    train, test = ({name: v[chosen] for name, v in rows.items()} for chosen in (slice(0, 60), slice(60, 90)))
    records = run(model, cut(train, 16), cut(test, 16), pooling=("mean", "cls"), random_labels=True)
    for layer in EVERY:
        assert records["accuracy", layer, "mean"].value == 1
        assert records["accuracy", layer, "mean", "random_labels"].value < 0.8
    # the class token is constant before block 1, which gives class frequencies of a third
    assert records["log_loss", 0, "cls"].value == pytest.approx(math.log(3), rel=1e-6)
    assert records["accuracy", 0, "cls"].value == records["accuracy", None, "majority"].value == pytest.approx(1 / 3)
    assert records["log_loss", None, "majority"].value == pytest.approx(math.log(3))


def test_label_ids_and_batch_sizes_change_nothing(split):
    model = tiny("vit", torch.float64)
    expected = values(run(model, *split))
    other = [{name: joined(batches, name) for name in ("pixel_values", "labels")} for batches in split]
    changed = [cut(rows | {"labels": 100 - rows["labels"]}, 13) for rows in other]
    for key, value in values(run(model, *changed)).items():
        assert value == pytest.approx(expected[key], rel=1e-6), key


@pytest.mark.soak
def test_a_training_row_that_is_a_test_row_is_left_out_and_counted(split):
    model, (train, test) = tiny("vit", torch.float64), split
    expected = run(model, train, test)
    doubled = run(model, Listed(*train, *test), test)
    assert values(doubled) == pytest.approx(values(expected))
    assert doubled["accuracy", None, "majority"].tags["num_duplicates"] == 40
    assert doubled["accuracy", None, "majority"].tags["num_train_rows"] == 60
    with pytest.raises(InputError, match=r"train holds labels \[\] beside 40 rows that are test rows too"):
        run(model, test, test)


def test_duplicate_texts_are_found_for_any_padding():
    model, test = tiny("gpt2", torch.float64), texts(32, 2, "left")
    changed = [{name: v.flip(-1) if v.ndim > 1 else v for name, v in batch.items()} for batch in test]
    for batch in changed:  # the tokens of each text in their order, now padded on the right
        for row, mask in zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True):
            row[mask] = row[mask].flip(0)
    found = run(model, Listed(*texts(60, 1), *changed), test)
    assert found["accuracy", None, "majority"].tags["num_duplicates"] == 32


@pytest.mark.soak
def test_the_seed_decides_the_control_of_permuted_labels(split):
    model = tiny("vit", torch.float64)
    quick = {"tolerance": 1e-3}
    first, other = (values(run(model, *split, random_labels=True, seed=seed, **quick)) for seed in (0, 1))
    control = ("log_loss", 2, "mean", "random_labels")
    assert first[control] != other[control]
    assert {key: value for key, value in first.items() if key[-1] != "random_labels"} == values(
        run(model, *split, **quick)
    )


def test_a_probe_that_has_not_converged_is_flagged(split):
    model = tiny("vit")
    flagged = [r for r in records_of(analysis(*split, max_iterations=1), model) if r.layer is not None]
    assert {r.tags.get("num_not_converged") for r in flagged} == {1}
    assert all("num_not_converged" not in r.tags for r in run(model, *split, tolerance=1e-6).values())


def labelled(labels, count=6):
    return Listed({"pixel_values": torch.randn(count, 3, IMAGE, IMAGE), "labels": labels})


def test_invalid_labels_are_refused_in_one_sentence(split):
    for train, test, message in (
        (None, labelled(torch.tensor([2, 5, 7, 2, 7, 7])), "no training row has the label 7 of 3 of the 6 test"),
        (None, labelled(torch.tensor([99] * 6)), "no training row has the label 99 of 6 of the 6 test rows"),
        (labelled(torch.tensor([4] * 6)), None, r"train holds labels \[4\], and a probe needs two"),
        (labelled(torch.rand(6)), None, "expected an integer label for each of 6 rows, got torch.flo"),
        (labelled(torch.tensor([[1, 2]] * 6)), None, r"got torch.int64 of shape \(6, 2\)"),
        (None, labelled(torch.tensor([2, -100] * 3)), "expected an integer label for each .* the least -100"),
        (None, Listed(tiny_batch("vit")), r"the batches of test have no labels, they hold \['pixel_values'\]"),
    ):
        given = analysis(train or split[0], test or split[1])
        with pytest.raises(InputError, match=f"^label_probe: .*{message}"):
            given.check(LayeredModel(tiny("vit")))


def test_an_image_model_without_a_class_token_refuses_that_pooling(split):
    view = LayeredModel(tiny("vit_average"))
    with pytest.raises(InputError, match="this VisionTransformer has no class token: choose pooling 'mean'"):
        analysis(*split, pooling=("mean", "cls")).check(view)
    assert records_of(analysis(*split, tolerance=1e-3), view)
