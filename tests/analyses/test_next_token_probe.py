"""The next-token probe against scikit-learn on captured states, and its choice of rows."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score
from sklearn.preprocessing import StandardScaler

from lit_layers.analyses import NextTokenProbe
from lit_layers.analyses.probes import probe_fits
from lit_layers.analyses.probes.next_token_probe import _states, class_of, draw_rows, duplicates, most_frequent, passes
from lit_layers.errors import InputError
from lit_layers.functional.curves import bootstrap_interval, wilson_interval
from lit_layers.functional.probes.logistic import fit_watching_probes
from lit_layers.models.view import LayeredModel
from lit_layers.tasks.text_features import permuted
from tests.analyses.prompt_states import states_of_each_prompt
from tests.support.listed_batches import Listed
from tests.support.measured import records_of
from tests.support.rounding import check_records
from tests.support.tiny_models import LAYERS, VOCAB, tiny

CONTEXT = 4


def texts(count, seed, *, longest=12, shortest=3):
    """Return texts of different lengths in which low token ids are frequent."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    return [3 + (torch.rand(length, generator=generator) ** 4 * (VOCAB - 3)).long() for length in lengths]


def batches(rows, padding="right", size=7, junk=50):
    """Return the texts in padded batches, with arbitrary ids as padding."""
    found = []
    for start in range(0, len(rows), size):
        chunk = rows[start : start + size]
        width = max(map(len, chunk))
        ids, mask = torch.full((len(chunk), width), junk), torch.zeros(len(chunk), width, dtype=torch.long)
        for index, row in enumerate(chunk):
            position = slice(0, len(row)) if padding == "right" else slice(width - len(row), width)
            ids[index, position], mask[index, position] = row, 1
        found.append({"input_ids": ids, "attention_mask": mask})
    return Listed(*found)


def analysis(train, test, padding="right", **options):
    given = {"num_classes": 6, "min_context": CONTEXT, "tolerance": 1e-8, "random_labels": False} | options
    return NextTokenProbe(train=batches(train, padding), test=batches(test, padding), **given)


def run(model, *args, **options):
    records = records_of(analysis(*args, **options), model)
    keys = [(r.metric, r.layer, *((k, v) for k, v in r.tags.items() if not k.startswith("num_"))) for r in records]
    assert len(set(keys)) == len(keys)
    return dict(zip(keys, records, strict=True))


@pytest.fixture(scope="module")
def split():
    return texts(150, seed=1), texts(60, seed=2)


def rows_of(model, split, per_text):
    """Return states (layers + 1, rows, dim), targets, logits and text index of each row, from whole single texts."""
    states, targets, logits, owner = [], [], [], []
    drawn = draw_rows(split, min_context=CONTEXT, per_text=per_text)
    for index, (text, prompt) in enumerate(
        zip(split, states_of_each_prompt(model, [{"input_ids": text[None]} for text in split]), strict=True)
    ):
        for position in drawn.position[drawn.text == index].tolist():
            states.append(prompt[:, position])
            targets.append(int(text[position + 1]))
            logits.append(model(input_ids=text[None]).logits[0, position].detach().numpy())
            owner.append(index)
    return np.stack(states, axis=1), np.array(targets), np.stack(logits), np.array(owner)


@pytest.mark.parametrize("per_text", [1, pytest.param(3, marks=pytest.mark.soak)])
def test_every_record_equals_that_of_scikit_learn_on_states_of_the_running_model(model, split, per_text):
    train, test = split
    train_states, train_targets, _, _ = rows_of(model, train, per_text)
    test_states, targets, logits, _ = rows_of(model, test, per_text)
    ranked = sorted(Counter(train_targets.tolist()).items(), key=lambda item: (-item[1], item[0]))
    classes = [token for token, _ in ranked[:6]]
    used, covered = np.isin(train_targets, classes), np.isin(targets, classes)
    records = run(model, train, test, positions_per_sequence=per_text)

    def check(metric, layer, expected, n, **tags):
        record = records.pop((metric, layer, *tags.items()))
        assert record.value == pytest.approx(expected, rel=1e-6)
        assert record.n == n
        return record

    coverage = check("coverage", None, covered.mean(), len(targets))
    assert coverage.tags == {
        "num_classes": 6,
        "num_train_rows": used.sum(),
        "num_duplicates": 0,
        "num_too_short": sum(len(text) <= CONTEXT for text in train + test),
    }
    for layer in range(LAYERS + 1):
        scaler = StandardScaler().fit(train_states[layer][used])
        probe = LogisticRegression(tol=1e-12, max_iter=10_000)
        probe.fit(scaler.transform(train_states[layer][used]), train_targets[used])
        predicted = probe.predict(scaler.transform(test_states[layer]))
        log_proba = probe.predict_log_proba(scaler.transform(test_states[layer][covered]))
        losses = -log_proba[np.arange(covered.sum()), np.searchsorted(probe.classes_, targets[covered])]
        truth = targets[covered]
        check("accuracy", layer, (predicted == targets)[covered].mean(), covered.sum())
        check("accuracy_all", layer, ((predicted == targets) & covered).mean(), len(targets))
        check("log_loss", layer, losses.mean(), covered.sum())
        f1 = f1_score(truth, predicted[covered], average="macro", labels=np.unique(truth), zero_division=0)
        check("macro_f1", layer, f1, covered.sum())

    def reference(name, predicted, log_proba):
        check("accuracy", None, (predicted == targets)[covered].mean(), covered.sum(), reference=name)
        check("accuracy_all", None, (predicted == targets).mean(), len(targets), reference=name)
        check("log_loss", None, -log_proba[covered].mean(), covered.sum(), reference=name)

    share = {token: count / used.sum() for token, count in ranked[:6]}
    reference("majority", np.full(len(targets), classes[0]), np.log([share.get(token, np.nan) for token in targets]))
    log_softmax = torch.from_numpy(logits).log_softmax(-1).numpy()
    reference("lm_head", logits.argmax(1), log_softmax[np.arange(len(targets)), targets])
    closed = torch.from_numpy(logits[:, classes]).log_softmax(-1).numpy()
    at_target = np.array([row[classes.index(t)] if t in classes else np.nan for row, t in zip(closed, targets)])  # noqa: B905
    reference("lm_head_closed", np.array(classes)[closed.argmax(1)], at_target)
    assert {key[0] for key in records} == {"macro_f1"}  # only those of references are left


@pytest.mark.soak
def test_the_watching_probe_is_fitted_to_the_states_and_reports_its_c(model, split):
    states, targets, _, _ = rows_of(model, split[0], 1)
    test_states, test_targets, _, _ = rows_of(model, split[1], 1)
    classes = most_frequent(torch.from_numpy(targets), 6)
    labels, truth = (class_of(torch.from_numpy(each), classes) for each in (targets, test_targets))
    used, covered = (each >= 0 for each in (labels, truth))
    labels = labels[used]
    labellings = {"labels": labels, "control": permuted(labels, 0)}
    probes = fit_watching_probes(torch.from_numpy(states)[:, used], list(labellings.values()))
    records = run(model, *split, estimator="watch", random_labels=True)
    for probe, tags in zip(probes, ((), (("control", "random_labels"),)), strict=True):
        log_proba = probe.log_proba(torch.from_numpy(test_states)[:, covered])
        for layer in range(LAYERS + 1):
            losses = -log_proba[layer].gather(1, truth[covered, None])
            assert records["log_loss", layer, *tags].value == pytest.approx(losses.mean().item(), rel=1e-6)
            hits = log_proba[layer].argmax(1) == truth[covered]
            assert records["accuracy", layer, *tags].value == pytest.approx(hits.double().mean().item())
            chosen = records["probe_c", layer, *tags]
            assert (chosen.value, chosen.n) == (pytest.approx(probe.c[layer].item()), len(labels))
    options = [analysis(*split, estimator=kind).config()["init_args"] for kind in ("logistic", "watch")]
    assert options[1] == {**options[0], "estimator": "watch"}


@pytest.mark.soak
def test_rows_of_one_text_or_document_are_held_out_together_unless_one_exceeds_a_fold(model, split, monkeypatch):
    groups_of = []

    def spy(features, labellings, *, groups, **options):
        assert len(groups) == features.shape[1]
        groups_of.append(groups)
        return fit_watching_probes(features, labellings, groups=groups, **options)

    def largest_group(**options):
        run(model, *split, estimator="watch", **options)
        return groups_of.pop().unique(return_counts=True)[1].max().item()

    monkeypatch.setattr(probe_fits, "fit_watching_probes", spy)
    assert largest_group(positions_per_sequence=2) == 2
    largest = {}
    for count in (1, 10, 100):  # of 150 texts; a document of 100 exceeds a fifth
        monkeypatch.setattr(Listed, "origins", lambda self, count=count: torch.arange(150) // count)
        largest[count] = largest_group()
    assert largest[1] == largest[100] == 1
    assert 5 < largest[10] <= 10


@pytest.mark.soak
@pytest.mark.parametrize(("name", "per_text"), [("gpt2", 1), ("bert", 2)])
def test_tokens_after_the_target_of_a_row_do_not_matter(split, name, per_text):
    train, test = split
    drawn = draw_rows(test, min_context=CONTEXT, per_text=per_text)
    last = {int(text): int(position) for text, position in zip(drawn.text, drawn.position, strict=True)}
    changed = [
        torch.cat([text[: last[i] + 2], (text[last[i] + 2 :] + 1) % VOCAB]) if i in last else text
        for i, text in enumerate(test)
    ]
    assert sum(not torch.equal(a, b) for a, b in zip(test, changed, strict=True)) > 10
    model = tiny(name, torch.float64)
    given = {"positions_per_sequence": per_text, "max_iterations": 20}
    first, second = run(model, train, test, **given), run(model, train, changed, **given)
    assert first == second
    assert (("accuracy", None, ("reference", "lm_head")) in first) == (name == "gpt2")


def test_the_states_of_a_row_depend_only_on_its_context():
    """An encoder would otherwise read the tokens that follow."""
    rows = draw_rows(texts(20, seed=3), min_context=CONTEXT, per_text=3)
    view = LayeredModel(tiny("bert", torch.float64))
    states, _ = _states(view, rows, None, max_tokens=30, together=view.predicts_next_token)
    for row, (text, position) in enumerate(zip(rows.text.tolist(), rows.position.tolist(), strict=True)):
        single = view.trajectory({"input_ids": rows.texts[text][None, : position + 1]}).hidden[:, 0, -1]
        torch.testing.assert_close(states[:, row], single, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("together", [True, False])
def test_passes_hold_every_row_once_and_no_more_tokens_than_allowed(together):
    rows = draw_rows(texts(40, seed=3), min_context=CONTEXT, per_text=3)
    seen = []
    for batch in passes(rows, max_tokens=30, together=together):
        assert batch.input_ids.numel() <= 30
        for row, context, position in zip(batch.row.tolist(), batch.context, batch.position, strict=True):
            seen.append(row)
            assert position == rows.position[row]
            assert torch.equal(batch.input_ids[context, : position + 1], rows.texts[rows.text[row]][: position + 1])
    assert sorted(seen) == list(range(len(rows)))


def test_positions_are_distinct_and_uniform_over_those_with_context_and_next_token():
    drawn = draw_rows([torch.arange(10)] * 3000, min_context=4, seed=0)
    counts = Counter(drawn.position.tolist())
    assert sorted(counts) == [3, 4, 5, 6, 7, 8]  # 3 is the 4th token, 9 has no next token
    assert sum((count - 500) ** 2 / 500 for count in counts.values()) < 20.5  # chi-square, 5 degrees, p = 0.001
    assert torch.equal(drawn.targets, drawn.position + 1)
    several = draw_rows([torch.arange(5), torch.arange(7), torch.arange(30)], min_context=4, per_text=3)
    assert several.text.tolist() == [0, 1, 1, 1, 2, 2, 2]
    assert several.position[:4].tolist() == [3, 3, 4, 5]
    assert len({*several.position[4:].tolist()} & {*range(3, 29)}) == 3


def test_a_position_depends_only_on_the_seed_and_the_index_of_its_text():
    group = texts(30, seed=5, shortest=8)
    drawn = draw_rows(group, min_context=CONTEXT, seed=3)
    others = [*group[:12], *texts(17, seed=6), group[29]]  # the same number of texts, with others between
    again = draw_rows(others, min_context=CONTEXT, seed=3)
    same = [*range(12), 29]
    assert [again.position[again.text == i].tolist() for i in same] == [
        drawn.position[i : i + 1].tolist() for i in same
    ]
    assert drawn.position.tolist() != draw_rows(group, min_context=CONTEXT, seed=4).position.tolist()
    without = draw_rows(group, min_context=CONTEXT, seed=3, skip={0, 7})
    assert without.position.tolist() == [int(p) for i, p in enumerate(drawn.position) if i not in (0, 7)]


def test_classes_are_the_most_frequent_tokens_and_the_lower_id_wins_ties():
    targets = torch.tensor([9, 9, 4, 4, 7, 2, 2, 2, 8])
    assert most_frequent(targets, 4).tolist() == [2, 4, 9, 7]
    assert most_frequent(targets, 100).tolist() == [2, 4, 9, 7, 8]
    assert class_of(torch.tensor([4, 11, 2, 8, 0]), torch.tensor([2, 4, 9])).tolist() == [1, -1, 0, -1, -1]


def test_a_training_text_that_is_a_test_text_is_left_out_and_counted(model, split):
    train, test = split
    long = [text for text in test if len(text) > CONTEXT][:5]
    mixed = [*train[:40], *long, *train[40:]]
    assert duplicates(mixed, test) == {40, 41, 42, 43, 44}
    records = run(model, mixed, test)
    coverage = records["coverage", None]
    assert coverage.tags["num_duplicates"] == 5
    drawn = draw_rows(mixed, min_context=CONTEXT, skip={40, 41, 42, 43, 44})
    classes = most_frequent(drawn.targets, 6)
    assert coverage.tags["num_train_rows"] == torch.isin(drawn.targets, classes).sum()
    assert coverage.n == sum(len(text) > CONTEXT for text in test)


def test_shares_have_wilson_and_losses_bootstrap_intervals_and_values_follow_the_texts(model, split):
    records = run(model, *split)
    for key in (("accuracy", 2), ("coverage", None), ("accuracy_all", None, ("reference", "lm_head"))):
        record = records[key]
        share, n = record.value, record.n
        assert (record.low, record.high) == wilson_interval(round(share * n), n)
        assert record.stderr == pytest.approx(math.sqrt(share * (1 - share) / (n - 1)))
    loss = records["log_loss", 2]
    assert loss.low < loss.value < loss.high
    assert 3 < (loss.high - loss.low) / loss.stderr < 5
    train, test = (draw_rows(texts, min_context=CONTEXT) for texts in split)
    covered = torch.isin(test.targets, most_frequent(train.targets, 6))
    assert 1 < covered.sum() < len(covered)
    assert np.isfinite(loss.by_prompt).nonzero()[0].tolist() == sorted(test.text[covered].tolist())
    assert np.nanmean(loss.by_prompt.astype(np.float64)) == pytest.approx(loss.value, rel=1e-5)
    every = run(model, *split, num_classes=1000, max_iterations=5)["coverage", None]
    assert every.tags["num_classes"] == len(train.targets.unique()) > 10, "fewer classes than requested"
    assert every.tags["num_train_rows"] == len(train)


@pytest.mark.soak
def test_intervals_are_a_bootstrap_over_texts_if_a_text_has_several_rows(model, split):
    train, test = split
    record = run(model, train, test, positions_per_sequence=3)["coverage", None]
    drawn = draw_rows(test, min_context=CONTEXT, per_text=3)
    trained = draw_rows(train, min_context=CONTEXT, per_text=3).targets
    hits = torch.isin(drawn.targets, most_frequent(trained, 6)).double()
    sums = torch.stack([hits[drawn.text == text].sum() for text in drawn.text.unique()])
    counts = torch.stack([(drawn.text == text).sum().double() for text in drawn.text.unique()])
    ratio = hits.mean()
    low, high = bootstrap_interval(ratio + (sums - ratio * counts) / counts.mean())
    assert (record.value, record.low, record.high) == pytest.approx((ratio.item(), low.item(), high.item()))


@pytest.mark.soak
def test_a_model_in_half_precision_is_run_in_float32(split):
    model = tiny("gpt2", torch.bfloat16)
    given = analysis(*split, tolerance=1e-6)
    expected = records_of(given, LayeredModel(tiny("gpt2", torch.bfloat16).float()))
    check_records(records_of(given, model), expected)  # its float32 copy may round differently
    assert next(model.parameters()).dtype == torch.bfloat16


def test_texts_without_usable_rows_are_refused_in_one_sentence(model):
    for train, test, message in (
        ([torch.full((9,), 5)] * 4, [torch.arange(9)], "all training rows have one next token, and a probe needs two"),
        ([torch.arange(4)] * 3, [torch.arange(9)], "train has no text of over 4 tokens"),
        ([torch.arange(9)] * 3, [torch.arange(9)], "over 4 tokens beside 3 that are test texts too"),
        ([torch.arange(9)], [torch.arange(4)], "test has no text of over 4 tokens"),
        (
            [torch.arange(9), torch.arange(1, 10), torch.arange(2, 11)],
            [torch.full((9,), 40)],
            "no test row has one of the . classes as its next token",
        ),
    ):
        with pytest.raises(InputError, match=f"^next_token_probe: .*{message}"):
            analysis(train, test).check(LayeredModel(model))
