"""Minimal pairs against the plain model, one sentence at a time without padding, and what the analysis refuses."""

from collections import Counter

import numpy as np
import pandas as pd
import pytest
import torch
from tokenizers import processors

import lit_layers
from lit_layers.analyses import MinimalPairs, minimal_pairs
from lit_layers.data.tokenization import END_OF_TEXT, load_tokenizer, save_tokenizer, train_bpe
from lit_layers.errors import InputError
from lit_layers.models.view import LayeredModel
from tests.support.measured import records_of
from tests.support.tiny_models import tiny

VOCABULARY, ORDINARY, END, END_TOKEN = 300, 1, 0, (END_OF_TEXT, 0)
NORMS = {"gpt2": "transformer.ln_f", "gpt_neox": "gpt_neox.final_layer_norm", "llama": "model.norm"}
NOUN = [("I see this dog.", "I see these dog.", "noun"), ("I see these dogs.", "I see this dogs.", "noun")]
VERB = [("The dog barks at night.", "The dog bark at night.", "verb"), ("Dogs bark.", "Dogs barks.", "verb")]
ROWS = [VERB[0], NOUN[0], ("He saw himself.", "He saw themselves.", "reflexive"), VERB[1], NOUN[1]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One tokenizer in three folders: without BOS token, with the end of text as BOS, or adding this to each text."""
    folder, made = tmp_path_factory.mktemp("tokenizers"), train_bpe([" ".join(row) for row in ROWS] * 3, VOCABULARY)
    for name in ("plain", "named"):
        save_tokenizer(made, folder / name)
    (folder / "plain" / "tokenizer_config.json").unlink()
    made.tokenizer.post_processor = processors.TemplateProcessing(f"{END_OF_TEXT} $A", special_tokens=[END_TOKEN])
    save_tokenizer(made, folder / "adds")
    return folder


@pytest.fixture
def make(folder, tmp_path):
    def make(rows=ROWS, columns=minimal_pairs.COLUMNS, tokenizer="plain"):
        pd.DataFrame(rows, columns=columns).to_csv(tmp_path / "pairs.csv", index=False)
        return MinimalPairs(tokenizer=str(folder / tokenizer), pairs=str(tmp_path / "pairs.csv"))

    return make


def text_model(name="gpt2", **options):
    return tiny(name, torch.float64, vocab_size=VOCABULARY, **{"bos_token_id": END, **options})


def log_probabilities(model, ids):
    """Return log p(ids after the first), (1 + layers,): of the plain model, then by the logit lens at each layer."""
    with torch.no_grad():
        output = model(torch.tensor([ids]), output_hidden_states=True)
        norm, head = model.get_submodule(NORMS[model.config.model_type]), model.get_output_embeddings()
        lenses = [head(norm(states)) for states in output.hidden_states[:-1]]
    logits = torch.cat([output.logits, *lenses, output.logits]).numpy()[:, :-1]
    chosen = np.take_along_axis(logits, np.array(ids[1:])[None, :, None], axis=-1)[..., 0]
    return (chosen - np.log(np.exp(logits).sum(-1))).sum(-1)


CASES = [(family, "plain", END, [END]) for family in NORMS]
# No BOS token, one outside the vocabulary, or one that the default of a config names, but the tokenizer does not.
CASES += [("gpt2", "plain", bos, []) for bos in (None, VOCABULARY, ORDINARY)]
CASES += [("gpt2", "named", ORDINARY, [END]), ("gpt2", "adds", ORDINARY, [END])]


@pytest.mark.parametrize(("family", "tokenizer", "bos", "start"), CASES)
def test_every_layer_scores_like_the_plain_model_on_one_sentence_at_a_time(folder, make, family, tokenizer, bos, start):
    model, encode = text_model(family, bos_token_id=bos), load_tokenizer(str(folder / "plain")).tokenizer.encode
    good, bad = ([log_probabilities(model, start + encode(row[side]).ids) for row in ROWS] for side in (0, 1))
    expected, records = np.array(good).T - np.array(bad).T, records_of(make(tokenizer=tokenizer), model)
    assert 0 < (expected > 0).sum() < expected.size
    for condition in (None, "verb", "noun", "reflexive"):
        members = [row for row, each in enumerate(ROWS) if condition in (None, each[2])]
        tags = ({"condition": condition} if condition else {}) | ({} if start else {"num_without_bos": len(members)})
        for metric, values in (("accuracy", (expected > 0).astype(float)), ("difference", expected)):
            for layer, row in zip([None, *range(len(values) - 1)], values[:, members], strict=True):
                record = records.pop(0)
                assert (record.metric, record.layer, record.n) == (f"minimal_pair_{metric}", layer, len(row))
                assert (record.value, record.tags) == (pytest.approx(row.mean(), abs=1e-9), tags)
                assert len(row) == 1 or record.stderr == pytest.approx(row.std(ddof=1) / len(row) ** 0.5, abs=1e-9)
                assert condition is not None or record.by_prompt == pytest.approx(row, abs=1e-5)
    assert not records


def test_equal_probabilities_count_half_and_a_model_of_frequencies_has_no_preference(folder, make):
    model = text_model(tie_word_embeddings=False, n_positions=128)
    for parameter in model.transformer.ln_f.parameters():  # all logits are those of the bias: first 0, then random
        torch.nn.init.zeros_(parameter)
    encode = load_tokenizer(str(folder / "plain")).tokenizer.encode
    extra = np.array([len(encode(row[1]).ids) - len(encode(row[0]).ids) for row in ROWS])
    found = {(r.metric, r.layer, *r.tags.values()): r for r in records_of(make(), model)}
    assert found["minimal_pair_difference", None].by_prompt == pytest.approx(extra * np.log(VOCABULARY), abs=1e-4)
    assert found["minimal_pair_accuracy", None].value == np.mean((extra > 0) + (extra == 0) / 2) != np.mean(extra > 0)
    torch.nn.init.normal_(model.transformer.ln_f.bias)
    english = lit_layers.layers(model, ["minimal_pairs"], texts=["A dog"], tokenizer=folder / "plain").frame
    assert english["value"][english["metric"] == "minimal_pair_difference"].to_numpy() == pytest.approx(0, abs=1e-9)
    for _, rows in pd.concat(map(pd.read_csv, minimal_pairs.OWN_PAIRS.values())).groupby("condition"):
        # Each pair has a mirror, or both sentences have the same tokens.
        good, bad = ([Counter(encode(text).ids) for text in rows[side]] for side in ("good", "bad"))
        moved = [(frozenset((a - b).items()), frozenset((b - a).items())) for a, b in zip(good, bad, strict=True)]
        assert Counter(moved) == Counter((b, a) for a, b in moved)


def test_order_batches_and_longer_sentences_change_no_pair(make, monkeypatch):
    assert make().data_hash() != make(tokenizer="named").data_hash()  # another BOS token gives other numbers
    before = [r.by_prompt for r in records_of(make(), text_model()) if not r.tags]
    monkeypatch.setattr(minimal_pairs, "BATCH_TOKENS", 1)
    longer = ("The old dog barks at the dog.", "The old dogs barks at the dog.", "long")
    after = [r.by_prompt for r in records_of(make([longer, *ROWS[::-1]]), text_model()) if not r.tags]
    assert np.array(after)[:, :0:-1] == pytest.approx(np.array(before), abs=1e-6)


REFUSED = [
    (ROWS, ["good", "wrong", "condition"], "expected the columns good, bad, condition, it lacks bad"),
    ([], minimal_pairs.COLUMNS, "expected one pair or more, got none"),
    ([VERB[1], ("A b", "A b", "x")], minimal_pairs.COLUMNS, "row 1: expected two different sentences, got 'A b' twice"),
    ([("A b", " ", "x")], minimal_pairs.COLUMNS, "row 0: expected two sentences and a condition"),
    ([("A", "b" * 40, "x")], minimal_pairs.COLUMNS, r"expected .* at most 12 tokens, bad of row 0 of .* has \d\d:"),
]


@pytest.mark.parametrize(("rows", "columns", "message"), REFUSED)
def test_files_that_are_no_minimal_pairs_are_refused(make, rows, columns, message):
    with pytest.raises(InputError, match=f"^minimal_pairs: .*{message}"):
        make(rows, columns).check(LayeredModel(text_model(n_positions=12)))
