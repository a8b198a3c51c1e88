"""Log-likelihoods equal those of one pass per token in float64, and generated texts those of single steps."""

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
    """Return the log-likelihood of each pair of token ids, and whether the continuation is greedy."""
    return lambda model, pairs, size=4: wrapped(model, size)._loglikelihood_tokens([(("", ""), *one) for one in pairs])


def some_pairs(number=9, seed=0):
    """Return contexts of 1 to 30 tokens, some too long, with continuations of 1 to 5 tokens.

    The last two pairs have one context and one token each.
    """
    generator = torch.Generator().manual_seed(seed)

    def ids(size):
        return torch.randint(1, 400, (size,), generator=generator).tolist()

    pairs = [(ids(1 + 29 * index // number), ids(1 + index % 5)) for index in range(number)]
    return [*pairs, (pairs[3][0], [7]), (pairs[3][0], [9])]


def token_by_token(model, pairs, length):
    """Compute token by token in float64, from the left, without batches."""
    model, found = model.double(), []
    for context, continuation in pairs:
        total, greedy = 0.0, True
        for index, token in enumerate(continuation):
            seen = (context + continuation[:index])[-(length - (len(continuation) - 1 - index)) :]
            with torch.no_grad():
                scores = model(torch.tensor([seen])).logits[0, -1].log_softmax(-1)
            total, greedy = total + float(scores[token]), greedy and int(scores.argmax()) == token
        found.append((total, greedy))
    return found


@pytest.mark.parametrize("name", ["gpt2", "mpt"])  # mpt cannot leave out logits
def test_log_likelihoods_equal_those_of_one_token_after_the_other(name, likelihoods):
    options = {"d_model": 32, "max_seq_len": LENGTH, "n_layers": 3, "vocab_size": 400}
    model = tiny(name, **options) if name == "mpt" else tiny_causal_model(name, positions=LENGTH, blocks=3)
    pairs = [pair for pair in some_pairs() if len(pair[0]) + len(pair[1]) <= LENGTH]
    for schedule in (schedules.baseline(3), schedules.parse_schedule("1 (2,3) 2", 3)):
        with running_order(model, schedule):
            found = likelihoods(model.float(), pairs)
            expected = token_by_token(model, pairs, LENGTH)
        assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=2e-4)
        assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


def test_a_long_context_loses_its_beginning(model, likelihoods):
    context, continuation = list(range(1, 40)), [5, 6, 7]
    found = likelihoods(model, [(context, continuation), (context[-(LENGTH - 2) :], continuation)])
    with torch.no_grad():  # the longest input of the model, which ends one token before the end of the text
        scores = model(torch.tensor([[*context, 5, 6][-LENGTH:]])).logits[0, -3:].double().log_softmax(-1)
    assert found[0][0] == pytest.approx(float(scores[range(3), continuation].sum()), abs=1e-5)


def test_padding_rows_of_a_vocabulary_have_no_effect(model, likelihoods):
    before = likelihoods(model, some_pairs(4))
    pad_vocabulary_(model, 128)
    with torch.no_grad():
        model.get_output_embeddings().weight[400:] = 9.0  # would have the highest logits
    for found, expected in zip(likelihoods(model, some_pairs(4)), before, strict=True):
        assert found == (pytest.approx(expected[0], abs=1e-5), expected[1])


def test_half_precision_is_converted_before_the_softmax(model, likelihoods):
    model = model.to(torch.bfloat16)
    with torch.no_grad():
        logits = model(torch.tensor([[3, 4, 5]])).logits[0, 1:].double().log_softmax(-1)
    ((value, _),) = likelihoods(model, [([3, 4], [5, 6])], 1)
    assert value == pytest.approx(float(logits[0, 5] + logits[1, 6]), abs=1e-5)


def test_answers_that_leave_no_room_for_a_prompt_are_refused(model, wrapped):
    with pytest.raises(InputError, match="max_new_tokens: 24 leave no room for a prompt in a model of 24 tokens"):
        wrapped(model).generate_until([types.SimpleNamespace(args=("a", {"until": [], "max_gen_toks": 24}))])


def test_a_generated_text_equals_that_of_single_steps_without_padding_rows(model, wrapped):
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
