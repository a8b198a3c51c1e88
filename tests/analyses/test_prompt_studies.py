"""Studies of changed prompts against unchanged prompts and against prompts changed by hand."""

import math

import numpy as np
import pytest
import torch

from lit_layers.analyses import PromptStudies, Representation
from lit_layers.errors import InputError
from tests.analyses.prompt_states import prompts_of, states_of_each_prompt
from tests.support.listed_batches import Listed
from tests.support.measured import records_of
from tests.support.tiny_models import tiny_batch

BATCHES = [
    tiny_batch("gpt2", batch=3, tokens=14, padding="left", seed=1),
    tiny_batch("gpt2", batch=2, tokens=9, seed=2),
]
LAYERS = (0, 1, 2, 3)
SPECIAL = {0, 1, 2, 5}  # 1 and 2 by the config


@pytest.fixture(scope="module")
def records(model):
    given = PromptStudies(batches=Listed(*BATCHES), special_tokens=(0, 5), seed=3)
    return records_of(given, model)


def find(records, layer=None, normalization="raw", drop_first=0, **tags):
    wanted = {"normalization": normalization, "drop_first": drop_first, **tags}
    (record,) = [r for r in records if (r.layer, r.tags) == (layer, wanted)]
    return record


def entropy(rows):
    shares = np.linalg.svd(rows, compute_uv=False) ** 2
    shares = shares[shares > 1e-13 * shares[0]] / shares.sum()
    return -(shares * np.log(shares)).sum()


def changed_by_hand(study, p):
    """Change each token whose draw is below p, with draws seeded by (seed, study, prompt), as documented."""
    found = []
    for number, ids in enumerate(prompts_of(BATCHES)):
        draw = np.random.default_rng([3, ("repetition", "randomness").index(study), number])
        below = draw.random(len(ids)) < p
        if study == "repetition":
            others = np.full(len(ids), ids[draw.integers(len(ids))])
        else:
            others = draw.choice(np.array(sorted(set(range(61)) - SPECIAL)), len(ids))
        found.append(torch.from_numpy(np.where(below, others, ids.numpy())))
    return found


def test_unchanged_prompts_have_exactly_the_plain_values(model, records):
    plain = records_of(Representation(batches=Listed(*BATCHES)), model)
    for layer in (*LAYERS, None):
        for normalization in ("raw", "maxEntropy"):
            for dropped in (0, 1):
                expected = find([r for r in plain if r.metric == "prompt_entropy"], layer, normalization, dropped)
                for study in ("repetition", "randomness"):
                    found = find(records, layer, normalization, dropped, study=study, p=0.0)
                    assert (found.value, found.stderr, found.n) == (expected.value, expected.stderr, expected.n)


@pytest.mark.parametrize(("study", "p"), [("repetition", 0.5), ("randomness", 0.1), ("randomness", 1.0)])
def test_each_token_changes_with_the_given_probability(model, records, study, p):
    ids = [{"input_ids": changed[None]} for changed in changed_by_hand(study, p)]
    states = states_of_each_prompt(model, ids)
    for layer in LAYERS:
        raw = [entropy(prompt[layer]) for prompt in states]
        record = find(records, layer, study=study, p=p)
        assert record.value == pytest.approx(np.mean(raw), rel=1e-8)
        shares = [value / math.log(min(len(prompt[layer]), 32)) for value, prompt in zip(raw, states, strict=True)]
        assert find(records, layer, "maxEntropy", study=study, p=p).value == pytest.approx(np.mean(shares), rel=1e-8)
    every = np.mean([[entropy(prompt[layer]) for prompt in states] for layer in LAYERS[1:]])
    assert find(records, study=study, p=p).value == pytest.approx(every, rel=1e-8)


def test_lengths_use_the_first_tokens_of_prompts_that_are_long_enough(model):
    analysis = PromptStudies(batches=Listed(*BATCHES), studies=("length",), lengths=(3, 9, 12))
    records = records_of(analysis, model)
    for length, n in ((3, 5), (9, 5), (12, 2)):
        ids = [{"input_ids": ids[None, :length]} for ids in prompts_of(BATCHES) if len(ids) >= length]
        assert len(ids) == n
        states = states_of_each_prompt(model, ids)
        for layer in LAYERS:
            record = find(records, layer, study="length", length=length)
            assert record.n == n
            assert record.value == pytest.approx(np.mean([entropy(prompt[layer]) for prompt in states]), rel=1e-8)


def test_default_lengths_are_powers_of_two_up_to_the_longest_prompt(records):
    assert {r.tags["length"] for r in records if r.tags["study"] == "length"} == {8}


def test_a_length_that_no_prompt_has_is_refused(model):
    with pytest.raises(InputError, match="prompt_studies: no prompt has 99 tokens, which lengths asks for"):
        records_of(PromptStudies(batches=Listed(*BATCHES), lengths=(8, 99)), model)
