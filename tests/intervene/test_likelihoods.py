"""Log-likelihoods against a pass a token in float64; tokens of prompts; generation against a step at a time."""

import json

import pytest
import torch
from tokenizers import processors

from lit_layers.data.tokenization import load_tokenizer, save_tokenizer
from lit_layers.errors import InputError
from lit_layers.functional import block_schedules as schedules
from lit_layers.intervene.generation import generate_until
from lit_layers.intervene.likelihoods import log_likelihoods, num_cut
from lit_layers.intervene.own_scorer import refuse_unknown_tokens
from lit_layers.intervene.prompt_tokens import PromptTokenizer
from lit_layers.models.running_order import running_order
from lit_layers.models.vocabulary import pad_vocabulary_
from tests.support.benchmark_rows import tiny_speaker, write_tokenizer
from tests.support.tiny_models import tiny

LENGTH = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return PromptTokenizer.of(load_tokenizer(str(folder)))


@pytest.fixture
def model():
    return tiny_speaker(positions=LENGTH, blocks=3)


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


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "mpt"])  # the last cannot leave logits out
def test_log_likelihoods_are_those_of_one_token_after_the_other(name):
    options = {"d_model": 32, "max_seq_len": LENGTH, "n_layers": 3, "vocab_size": 400}
    model = tiny(name, **options) if name == "mpt" else tiny_speaker(name, positions=LENGTH, blocks=3)
    pairs = [pair for pair in some_pairs() if len(pair[0]) + len(pair[1]) <= LENGTH]
    for schedule in (schedules.baseline(3), schedules.parse_schedule("1 (2,3) 2", 3)):
        with running_order(model, schedule):
            found = log_likelihoods(model.float(), pairs, max_length=LENGTH, batch_size=4)
            expected = one_by_one(model, pairs, LENGTH)
        assert [each.value for each in found] == pytest.approx([value for value, _ in expected], abs=2e-4)
        assert [each.greedy for each in found] == [greedy for _, greedy in expected]


def test_a_long_context_loses_its_beginning(model):
    context, continuation = list(range(1, 40)), [5, 6, 7]
    (found,) = log_likelihoods(model, [(context, continuation)], max_length=LENGTH, batch_size=1)
    with torch.no_grad():  # as many tokens as the model takes, the last of them one before the end
        scores = model(torch.tensor([[*context, 5, 6][-LENGTH:]])).logits[0, -3:].double().log_softmax(-1)
    assert found.value == pytest.approx(float(scores[range(3), continuation].sum()), abs=1e-5)
    assert num_cut([(context, continuation), (context[-(LENGTH - 2) :], continuation)], LENGTH) == 1


@pytest.mark.parametrize("batch_size", [1, 2, 64])
def test_neither_batches_nor_neighbours_change_a_likelihood(model, batch_size):
    pairs = some_pairs()
    found = log_likelihoods(model, pairs, max_length=LENGTH, batch_size=batch_size)
    alone = [log_likelihoods(model, [pair], max_length=LENGTH, batch_size=1)[0].value for pair in pairs]
    assert [each.value for each in found] == pytest.approx(alone, abs=1e-4)


def test_equal_inputs_are_passed_once(model):
    rows = []
    model.register_forward_pre_hook(lambda _, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True)
    pairs = [([4, 5, 6], [token]) for token in range(1, 9)] + [([4, 5], [6, 1])]
    found = log_likelihoods(model, pairs, max_length=LENGTH, batch_size=4)
    assert sum(rows) == 1
    assert sum(each.greedy for each in found) <= 1
    both = log_likelihoods(model, [([4, 5], [6]), ([4, 5, 6], [1])], max_length=LENGTH, batch_size=4)
    assert found[-1].value == pytest.approx(sum(each.value for each in both), abs=1e-4)


def test_what_is_most_probable_is_greedy(model):
    with torch.no_grad():
        likeliest = int(model(torch.tensor([[4, 5, 6]])).logits[0, -1].argmax())
    right, wrong = log_likelihoods(model, [([4, 5, 6], [likeliest]), ([4, 5, 6], [1])], max_length=9, batch_size=2)
    assert right.greedy
    assert not wrong.greedy
    assert right.value > wrong.value


def test_padding_rows_of_a_vocabulary_do_not_count(model):
    pairs = some_pairs(4)
    before = log_likelihoods(model, pairs, max_length=LENGTH, batch_size=3)
    pad_vocabulary_(model, 128)
    after = log_likelihoods(model, pairs, max_length=LENGTH, batch_size=3, vocab_size=400)
    assert [each.value for each in after] == pytest.approx([each.value for each in before], abs=1e-5)
    with_padding = log_likelihoods(model, pairs, max_length=LENGTH, batch_size=3)
    assert all(more.value < each.value for more, each in zip(with_padding, before, strict=True))


def test_half_precision_is_widened_before_the_softmax(model):
    model = model.to(torch.bfloat16)
    context, continuation = [3, 4], [5, 6]
    with torch.no_grad():
        logits = model(torch.tensor([[3, 4, 5]])).logits[0, 1:].double().log_softmax(-1)
    (found,) = log_likelihoods(model, [(context, continuation)], max_length=LENGTH, batch_size=1)
    assert found.value == pytest.approx(float(logits[0, 5] + logits[1, 6]), abs=1e-5)


def test_a_continuation_longer_than_the_model_is_refused(model):
    with pytest.raises(InputError, match="a continuation has 30 tokens, the model takes 24 at most"):
        log_likelihoods(model, [([1], [2] * 30)], max_length=LENGTH, batch_size=1)


def test_spaces_move_to_the_continuation_and_an_empty_context_is_the_prefix(tokenizer):
    inner = tokenizer.found.tokenizer

    def ids(text):
        return inner.encode(text).ids

    (moved,), (plain,) = tokenizer.pairs([("the boy  ", " runs")]), tokenizer.pairs([("the boy", "   runs")])
    assert moved == plain == (ids("the boy"), ids("the boy   runs")[len(ids("the boy")) :])
    assert tokenizer.pairs([("", "the boy")]) == [([0], ids("the boy"))]
    assert tokenizer.pairs([("", "<|endoftext|>the boy")]) == [([0], ids("the boy"))]


def test_special_tokens_come_once(folder, tmp_path):
    found = load_tokenizer(str(folder))
    found.tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    save_tokenizer(found, tmp_path)
    tokenizer = PromptTokenizer.of(load_tokenizer(str(tmp_path)))
    with_prefix, without = tokenizer.encode(["<|endoftext|>the boy", "the boy"])
    assert with_prefix == without
    assert without[0] == 0 != without[1]
    assert tokenizer.pairs([("", "the boy")]) == [([0], without[1:])]


def test_the_prefix_is_the_token_that_begins_a_text(folder, tmp_path):
    found = load_tokenizer(str(folder))
    found.tokenizer.add_special_tokens(["<s>"])
    save_tokenizer(found, tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": {"content": "<s>"}}))
    tokenizer = PromptTokenizer.of(load_tokenizer(str(tmp_path)))
    assert (tokenizer.prefix_id, tokenizer.end_id) == (400, 0)
    assert tokenizer.hash != PromptTokenizer.of(load_tokenizer(str(folder))).hash


def test_a_continuation_of_no_token_and_foreign_tokens_are_refused(tokenizer):
    with pytest.raises(InputError, match="the tokenizer makes no token of its own of the continuation ''"):
        tokenizer.pairs([("the boy", "")])
    with pytest.raises(InputError, match="tokenizer: it has 400 tokens and the model 399: give the model's own"):
        refuse_unknown_tokens(tokenizer, 399)


def written(model, tokenizer, prompts, **options):
    options = {"max_length": 64, "max_new_tokens": 12, "batch_size": 3} | options
    return generate_until(model, prompts, options.pop("stops", ("Question:",)), tokenizer, **options)


def a_step_at_a_time(model, tokens, steps):
    tokens = list(tokens)
    for _ in range(steps):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        if tokens[-1] == 0:
            break
    return tokens


PROMPTS = ["the boy", "Two boats left the harbour at dawn, and by noon", "x", "Question: a dog\nAnswer:", "four five"]


@pytest.mark.parametrize("order", ["1 2 3", "1 (2,3) (2,3) 2", "3 1"])
def test_texts_are_those_of_the_likeliest_token_each_time(tokenizer, order):
    model = tiny_speaker(positions=64, blocks=3, seed=2)
    with running_order(model, schedules.parse_schedule(order, 3)):
        found = written(model, tokenizer, PROMPTS)
        for prompt, text in zip(PROMPTS, found, strict=True):
            (ids,) = tokenizer.encode([prompt])
            assert text == tokenizer.decode(a_step_at_a_time(model, ids, 12)[len(ids) :]).split("Question:")[0]
    assert len(set(found)) > 1


def test_a_text_ends_at_its_first_stop_and_at_the_end_of_text(tokenizer):
    model = tiny_speaker(positions=64, blocks=3, seed=2)
    (ids,) = tokenizer.encode(PROMPTS[:1])
    tail = a_step_at_a_time(model, ids, 12)[len(ids) :]
    whole = tokenizer.decode(tail)
    stop = whole[len(whole) // 2 :][:3]
    (cut, *_) = written(model, tokenizer, PROMPTS, stops=("never", stop))
    assert cut == whole.split(stop)[0] != whole
    model.generation_config.eos_token_id = [tail[4]]  # as if the model's own end
    (ended, *_) = written(model, tokenizer, PROMPTS)
    assert ended == tokenizer.decode(tail[: tail.index(tail[4])])


def test_padding_rows_of_a_vocabulary_are_never_written(tokenizer):
    model = tiny_speaker(positions=64, blocks=3, seed=2, tie_word_embeddings=False)
    before = written(model, tokenizer, PROMPTS)
    pad_vocabulary_(model, 128)
    with torch.no_grad():  # so that padding would often be likeliest
        model.lm_head.weight[400:] = 3 * model.lm_head.weight[1:113]
    assert written(model, tokenizer, PROMPTS, vocab_size=400) == before
    assert written(model, tokenizer, PROMPTS) != before


def test_a_long_prompt_loses_its_beginning_and_no_room_is_refused(tokenizer):
    model = tiny_speaker(positions=32, blocks=3, seed=2)
    long = PROMPTS[1] * 4
    (ids,) = tokenizer.encode([long])
    (found,) = written(model, tokenizer, [long], max_length=32)
    expected = a_step_at_a_time(model, ids[-20:], 12)[20:]
    assert found == tokenizer.decode(expected).split("Question:")[0]
    with pytest.raises(InputError, match="max_new_tokens: 32 leave no room for a prompt in a model of 32 tokens"):
        written(model, tokenizer, [long], max_length=32, max_new_tokens=32)
