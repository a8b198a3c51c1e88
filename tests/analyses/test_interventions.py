"""Variants of the running order against the modules of the model, called one by one in float64."""

import itertools
import math
import random

import numpy as np
import pytest
import torch

from lit_layers.analyses.readout_scores import Interventions
from lit_layers.errors import InputError
from lit_layers.functional.curves import bootstrap_interval
from lit_layers.models.view import LayeredModel
from tests.analyses.prompt_states import BATCHES, prompts_of
from tests.support.listed_batches import Listed
from tests.support.measured import records_of
from tests.support.tiny_models import tiny

BLOCKS = 4
SEEDS = (0, 1, 5)
CUSTOM = "1 (2,4,4) 3 1"
METRICS = ("variant_loss", "variant_accuracy", "kl_to_full")


def key(record):
    tags = {name: tag for name, tag in record.tags.items() if not name.startswith("num_")}
    return (record.metric, record.layer, *sorted(tags.items()))


def run(model, *batches, **options):
    records = records_of(Interventions(batches=Listed(*batches), **options), model)
    found = {key(record): record for record in records}
    assert len(found) == len(records)
    return {key: record for key, record in found.items() if not record.metric.endswith("_difference")}


def key_of(metric, layer=None, **tags):
    return (metric, layer, *sorted(tags.items()))


@pytest.fixture(scope="module")
def model():
    return tiny("gpt2", torch.float64, n_layer=BLOCKS)


@pytest.fixture(scope="module")
def records(model):
    return run(model, *BATCHES, seeds=SEEDS, loops=(2, 3), custom=(CUSTOM,))


def logits_of(model, ids, schedule):
    """Return the logits of one prompt without padding, from the modules of the model."""
    trunk = model.transformer
    with torch.no_grad():
        hidden = trunk.wte(ids[None]) + trunk.wpe(torch.arange(len(ids))[None])
        for step in schedule:
            members = step if isinstance(step, tuple) else (step,)
            hidden = sum(trunk.h[number - 1](hidden) for number in members) / len(members)
        return model.lm_head(trunk.ln_f(hidden))[0].numpy()


def log_softmax(logits):
    top = logits.max(-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))


def prompt_scores(model, schedule):
    """Return losses, hits and divergences of the predicted tokens of each prompt."""
    found = []
    for ids in prompts_of(BATCHES):
        full = log_softmax(logits_of(model, ids, range(1, BLOCKS + 1))[:-1])
        own = log_softmax(logits_of(model, ids, schedule)[:-1])
        targets = ids[1:].numpy()
        divergence = (np.exp(full) * (full - own)).sum(-1)
        found.append((-own[np.arange(len(targets)), targets], own.argmax(-1) == targets, divergence))
    return found


def shuffled(numbers, seed):
    order = list(numbers)
    random.Random(seed).shuffle(order)
    return order


# Schedules of four blocks: M = 1 is block 3, M = 3 are blocks 2 to 4, and block 3 is the repeated one.
EXPECTED = {
    (None, ("variant", "baseline")): (1, 2, 3, 4),
    (None, ("middle", 1), ("variant", "skip")): (1, 2, 4),
    (None, ("middle", 3), ("variant", "skip")): (1,),
    (None, ("middle", 1), ("variant", "middle_repeat")): (1, 2, 3, 4),
    (None, ("middle", 3), ("variant", "middle_repeat")): (1, 3, 3, 3),
    (None, ("middle", 1), ("variant", "reverse")): (1, 2, 3, 4),
    (None, ("middle", 3), ("variant", "reverse")): (1, 4, 3, 2),
    (None, ("middle", 1), ("variant", "parallel")): (1, 2, 3, 4),
    (None, ("middle", 3), ("variant", "parallel")): (1, (2, 3, 4)),
    (None, ("loops", 2), ("middle", 1), ("variant", "looped_parallel")): (1, 2, 3, 3, 4),
    (None, ("loops", 3), ("middle", 1), ("variant", "looped_parallel")): (1, 2, 3, 3, 3, 4),
    (None, ("loops", 2), ("middle", 3), ("variant", "looped_parallel")): (1, (2, 3, 4), (2, 3, 4)),
    (None, ("loops", 3), ("middle", 3), ("variant", "looped_parallel")): (1, (2, 3, 4), (2, 3, 4), (2, 3, 4)),
    (1, ("variant", "skip_one")): (2, 3, 4),
    (2, ("variant", "skip_one")): (1, 3, 4),
    (3, ("variant", "skip_one")): (1, 2, 4),
    (4, ("variant", "skip_one")): (1, 2, 3),
    (1, ("variant", "switch")): (2, 1, 3, 4),
    (2, ("variant", "switch")): (1, 3, 2, 4),
    (3, ("variant", "switch")): (1, 2, 4, 3),
    (None, ("schedule", CUSTOM), ("variant", "custom")): (1, (2, 4, 4), 3, 1),
}
for _middle, _seed in itertools.product((1, 3), SEEDS):
    _order = (1, 2, 3, 4) if _middle == 1 else (1, *shuffled((2, 3, 4), _seed))
    _tags = {"middle": _middle, "schedule": " ".join(map(str, _order)), "seed": _seed, "variant": "random"}
    EXPECTED[None, *sorted(_tags.items())] = _order
MEANS = [(None, ("middle", middle), ("variant", "random")) for middle in (1, 3)]


def test_differences_from_the_full_model_are_over_the_same_prompts(model):
    found = {key(each): each for each in records_of(Interventions(batches=Listed(*BATCHES)), model)}
    differences = {key: each for key, each in found.items() if each.metric.endswith("_difference")}
    assert {each.metric for each in differences.values()} == {"variant_loss_difference", "variant_accuracy_difference"}
    assert not [each for each in differences.values() if each.tags["variant"] == "baseline" or "seed" in each.tags]
    for (metric, *rest), record in differences.items():
        own, full = found[metric.removesuffix("_difference"), *rest], found[key_of(metric[:-11], variant="baseline")]
        rows = own.by_prompt.astype(float) - full.by_prompt
        assert record.value == pytest.approx(own.value - full.value, abs=1e-9)
        assert record.stderr == pytest.approx(rows.std(ddof=1) / len(rows) ** 0.5, rel=1e-4, abs=1e-7)
        assert record.low <= record.value <= record.high


def test_every_variant_has_a_record_of_every_metric_and_there_are_no_others(records):
    wanted = {(metric, *rest) for metric in METRICS for rest in (*EXPECTED, *MEANS)}
    wanted |= {("kendall_distance", *rest) for rest in EXPECTED if ("variant", "random") in rest}
    assert set(records) == wanted


def test_every_value_is_the_mean_over_predicted_tokens_of_blocks_called_one_by_one(model, records):
    expected = [
        (metric, variant, values)
        for variant, order in EXPECTED.items()
        for metric, values in zip(METRICS, zip(*prompt_scores(model, order), strict=True), strict=True)
    ]
    for metric, variant, values in expected:
        record, every = records[metric, *variant], np.concatenate(values)
        assert record.value == pytest.approx(every.mean(), rel=1e-9, abs=1e-12), (metric, variant)
        assert (record.n, record.tags["num_tokens"]) == (len(values), len(every)) == (8, 51)
        counts = np.array([len(row) for row in values])
        linear = every.mean() + (np.array([row.sum() for row in values]) - every.mean() * counts) / counts.mean()
        assert record.stderr == pytest.approx(linear.std(ddof=1) / math.sqrt(8), rel=1e-6, abs=1e-12)


def test_random_orders_are_averaged_within_each_prompt(model, records):
    seed_scores = [prompt_scores(model, (1, *shuffled((2, 3, 4), seed))) for seed in SEEDS]
    for metric, kind in zip(METRICS, range(3), strict=True):
        sums = np.mean([[prompt[kind].sum() for prompt in found] for found in seed_scores], axis=0)
        counts = np.array([len(prompt[0]) for prompt in seed_scores[0]])
        ratio = sums.sum() / counts.sum()
        spread = torch.from_numpy(ratio + (sums - ratio * counts) / counts.mean())
        record = records[key_of(metric, middle=3, variant="random")]
        low, high = bootstrap_interval(spread)
        assert record.value == pytest.approx(ratio, rel=1e-9)
        assert record.stderr == pytest.approx(spread.std().item() / math.sqrt(8), rel=1e-6)
        assert (record.low, record.high) == pytest.approx((low.item(), high.item()), rel=1e-6)
        assert (record.tags["num_seeds"], record.tags["num_tokens"], record.n) == (3, 51, 8)


def test_unchanged_orders_are_counted_and_distances_reported(records):
    assert records[key_of("kl_to_full", middle=1, variant="random")].tags["num_identical"] == 3
    identical = sum(shuffled((2, 3, 4), seed) == [2, 3, 4] for seed in SEEDS)
    assert records[key_of("kl_to_full", middle=3, variant="random")].tags["num_identical"] == identical
    distances = {dict(found[2:])["seed"]: r.value for found, r in records.items() if found[0] == "kendall_distance"}
    for seed in SEEDS:
        order = shuffled((2, 3, 4), seed)
        assert distances[seed] == sum(a > b for a, b in itertools.combinations(order, 2))
    single = [r.value for f, r in records.items() if f[0] == "kendall_distance" and dict(f[2:])["middle"] == 1]
    assert single == [0, 0, 0]


def test_a_middle_of_one_block_gives_exactly_the_full_model(records):
    for metric, variant in itertools.product(METRICS, ("parallel", "reverse", "middle_repeat", "random")):
        expected = records[key_of(metric, variant="baseline")].value
        found = records[key_of(metric, middle=1, variant=variant)].value
        assert found == (pytest.approx(expected, rel=1e-15) if variant == "random" else expected)  # a mean over seeds


def test_a_variant_that_overflows_is_reported_and_does_not_affect_others():
    model = tiny("gpt2", torch.float16, n_layer=BLOCKS)
    model.transformer.h[2].mlp.c_proj.bias.data[0] = 5e4  # finite once, infinite when it is added again
    found = run(model, BATCHES[1], variants=("middle_repeat", "skip"))
    broken = found[key_of("variant_loss", middle=3, variant="middle_repeat")]
    assert math.isnan(broken.value)
    assert (broken.n, broken.tags["num_undefined"], broken.tags["num_tokens"]) == (0, 2, 0)
    for metric in METRICS:
        for rest in ({"variant": "baseline"}, {"variant": "skip", "middle": 3}):
            assert math.isfinite(found[key_of(metric, **rest)].value)


def test_options_that_do_not_fit_the_model_are_refused(model):
    for options, message in (
        ({"variants": ("skips",)}, "variants: there is no 'skips'; choose from baseline"),
        ({"middles": (2,)}, "middles: of 4 blocks the middle has 1, 3 blocks, got 2"),
        ({"loops": (0,)}, "loops: expected at least 1, got 0"),
        ({"custom": ("1 5",)}, r"block: expected 1\.\.4, got 5"),
        ({"custom": ("1 ()",)}, "schedule: expected numbers and groups such as .*, got '1 ..'"),
    ):
        analysis = Interventions(batches=Listed(*BATCHES), **options)
        with pytest.raises(InputError, match=f"^interventions: {message}"):
            analysis.check(LayeredModel(model))
    with pytest.raises(InputError, match="^interventions: an order needs at least two blocks, the model has 1"):
        Interventions(batches=Listed()).check(LayeredModel(tiny("gpt2", n_layer=1)))
