"""Log-likelihoods against a pass a token in float64, and texts against a step at a time."""

import types

import pytest
import torch

from lit_layers.errors import InputError
from lit_layers.functional import block_schedules as schedules
from lit_layers.models.build import pad_vocabulary_
from lit_layers.models.running_order import running_order
from lit_layers.tasks.lm_eval_scorer import LmEvalScorer
from tests.support.benchmark_rows import tiny_causal_model
from tests.support.tiny_models import tiny

LENGTH = 24


@pytest.fixture
def model():
    return tiny_causal_model(positions=LENGTH, blocks=3)


@pytest.fixture
def wrapped(folder):
    return lambda model, size=4: LmEvalScorer("x", str(folder / "tokenizer"), batch_size=size, max_length=LENGTH)._wrap(
        model
    )


@pytest.fixture
def likelihoods(wrapped):
    """Value and greediness of pairs of token ids."""
    return lambda model, pairs, size=4: wrapped(model, size)._loglikelihood_tokens([(("", ""), *one) for one in pairs])


def some_pairs(number=9, seed=0):
    """Contexts of 1 to 30 tokens, some too long; continuations of 1 to 5; two of a context with one token each."""
    generator = torch.Generator().manual_seed(seed)

    def ids(size):
        return torch.randint(1, 400, (size,), generator=generator).tolist()

    pairs = [(ids(1 + 29 * place // number), ids(1 + place % 5)) for place in range(number)]
    return [*pairs, (pairs[3][0], [7]), (pairs[3][0], [9])]


def one_by_one(model, pairs, length):
    """Token by token in float64, from the left, no batch."""
    model, found = model.double(), []
    for context, continuation in pairs:
        total, greedy = 0.0, True
        for place, token in enumerate(continuation):
            seen = (context + continuation[:place])[-(length - (len(continuation) - 1 - place)) :]
            with torch.no_grad():
                scores = model(torch.tensor([seen])).logits[0, -1].log_softmax(-1)
            total, greedy = total + float(scores[token]), greedy and int(scores.argmax()) == token
        found.append((total, greedy))
    return found


@pytest.mark.parametrize("name", ["gpt2", "mpt"])  # the last cannot leave logits out
def test_log_likelihoods_are_those_of_one_token_after_the_other(name, likelihoods):
    options = {"d_model": 32, "max_seq_len": LENGTH, "n_layers": 3, "vocab_size": 400}
    model = tiny(name, **options) if name == "mpt" else tiny_causal_model(name, positions=LENGTH, blocks=3)
    pairs = [pair for pair in some_pairs() if len(pair[0]) + len(pair[1]) <= LENGTH]
    for schedule in (schedules.baseline(3), schedules.parse_schedule("1 (2,3) 2", 3)):
        with running_order(model, schedule):
            found = likelihoods(model.float(), pairs)
            expected = one_by_one(model, pairs, LENGTH)
        assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=2e-4)
        assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


def test_a_long_context_loses_its_beginning(model, likelihoods):
    context, continuation = list(range(1, 40)), [5, 6, 7]
    found = likelihoods(model, [(context, continuation), (context[-(LENGTH - 2) :], continuation)])
    with torch.no_grad():  # as many tokens as the model takes, the last of them one before the end
        scores = model(torch.tensor([[*context, 5, 6][-LENGTH:]])).logits[0, -3:].double().log_softmax(-1)
    assert found[0][0] == pytest.approx(float(scores[range(3), continuation].sum()), abs=1e-5)


def test_padding_rows_of_a_vocabulary_do_not_count(model, likelihoods):
    before = likelihoods(model, some_pairs(4))
    pad_vocabulary_(model, 128)
    with torch.no_grad():
        model.get_output_embeddings().weight[400:] = 9.0  # they would win
    for found, expected in zip(likelihoods(model, some_pairs(4)), before, strict=True):
        assert found == (pytest.approx(expected[0], abs=1e-5), expected[1])


def test_half_precision_is_widened_before_the_softmax(model, likelihoods):
    model = model.to(torch.bfloat16)
    with torch.no_grad():
        logits = model(torch.tensor([[3, 4, 5]])).logits[0, 1:].double().log_softmax(-1)
    ((value, _),) = likelihoods(model, [([3, 4], [5, 6])], 1)
    assert value == pytest.approx(float(logits[0, 5] + logits[1, 6]), abs=1e-5)


def test_answers_that_leave_no_room_for_a_prompt_are_refused(model, wrapped):
    with pytest.raises(InputError, match="max_new_tokens: 24 leave no room for a prompt in a model of 24 tokens"):
        wrapped(model).generate_until([types.SimpleNamespace(args=("a", {"until": [], "max_gen_toks": 24}))])


def test_a_text_goes_on_as_step_after_step_would_without_padding_rows(model, wrapped):
    pad_vocabulary_(model, 128)
    prompts = ["The boy ran", "A long prompt of many words that the model reads whole, or so it says and more and more"]
    speaker = wrapped(model, 1)
    asked = [types.SimpleNamespace(args=(prompt, {"until": ["#"], "max_gen_toks": 5})) for prompt in prompts]
    with running_order(model, schedules.parse_schedule("1 (2,3) 2", 3)), torch.no_grad():
        texts = speaker.generate_until(asked)
        for prompt, text in zip(prompts, texts, strict=True):
            ids = speaker.tok_encode(prompt)[-(LENGTH - 5) :]
            start = len(ids)
            while len(ids) < start + 5 and ids[-1] != 0:
                ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1, :400].argmax()))
            expected = speaker.tok_decode(ids[start:])
            assert text == expected.split("#")[0]
