"""Many orders scored together: as each by itself, no beginning twice, and nothing lost when interrupted."""

import pytest
import torch

from lit_layers.errors import InputError
from lit_layers.functional.block_schedules import variants
from lit_layers.models.running_order import running_order
from lit_layers.models.view import LayeredModel
from lit_layers.tasks import lm_eval_scorer
from lit_layers.tasks.benchmark_scores import BenchmarkScores
from lit_layers.tasks.lm_eval_model import OrderLikelihoods
from lit_layers.tasks.lm_eval_scorer import LmEvalScorer, local_task
from tests.support.benchmark_rows import tiny_speaker, write_tasks, write_tokenizer
from tests.support.measured import records_of
from tests.support.noted_calls import noted_calls
from tests.support.tiny_models import tiny

BLOCKS = 5
ORDERS = [variant.schedule for variant in variants(BLOCKS, seeds=(0, 1), loops=(2, 3), custom=["(2,3) 1", "3 (1,2,4)"])]
ORDERS = list(dict.fromkeys(ORDERS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("orders")
    write_tasks(folder / "local" / "benchmarks")
    write_tokenizer(folder / "tokenizer")
    return folder


@pytest.fixture(scope="module")
def model():
    return tiny_speaker(blocks=BLOCKS, seed=3)


@pytest.fixture
def scorer(folder):
    def make(task="arc_challenge", **options):
        options = {"batch_size": 7, "max_length": 600} | options
        return LmEvalScorer(local_task(task, folder / "local"), str(folder / "tokenizer"), **options)

    return make


def calls_of(model, run):
    """How often a block ran, by the number of texts and of tokens at a time; and what `run` gave.

    By the first part of a block: where states are handed on in its place, a block itself is called, too.
    """
    calls = {}

    def note(state):
        shape = tuple(state.shape[:2])
        calls[shape] = calls.get(shape, 0) + 1

    with noted_calls({next(block.children()) for block in LayeredModel(model).blocks}, note):
        found = run()
    calls.pop((1, 1), None)  # one token, to see what blocks return
    return calls, found


def distinct(orders):
    """Return how often a block runs where each beginning of the orders runs once."""
    beginnings = {order[:end] for order in orders for end in range(1, len(order) + 1)}
    return sum(len(each[-1]) if isinstance(each[-1], tuple) else 1 for each in beginnings)


def alone(scorer, model, order):
    with running_order(model, order):
        return scorer.score(model)


@pytest.mark.parametrize("name", ["gpt2", "llama", "mpt"])  # the last cannot leave logits out
def test_each_order_has_the_scores_that_it_has_alone(name, scorer, tmp_path):
    options = {"d_model": 32, "max_seq_len": 600, "n_layers": BLOCKS, "vocab_size": 400}
    model = tiny(name, **options) if name == "mpt" else tiny_speaker(name, positions=600, blocks=BLOCKS, seed=3)
    together, by_itself = scorer(), scorer()
    known = together.in_orders(LayeredModel(model.eval()), ORDERS, tmp_path)
    for order in ORDERS[:: 4 if name == "gpt2" else 9]:
        calls, found = calls_of(model, lambda order=order: together.score(model, known.of(order)))
        expected = alone(by_itself, model, order)
        assert not calls
        for row, wanted in zip(found.log_likelihoods, expected.log_likelihoods, strict=True):
            assert row == pytest.approx(wanted, rel=1e-6, abs=1e-5)  # sums of float32 of another order of states
        assert found.values == expected.values
        assert found.rows_hash == expected.rows_hash


def test_no_beginning_of_orders_runs_twice(scorer, model, tmp_path, monkeypatch):
    calls, known = calls_of(model, lambda: scorer().in_orders(LayeredModel(model), ORDERS, tmp_path))
    assert len(known.requests) == 16  # of 4 questions; in batches of 7, 7 and 2
    assert sorted(calls.values()) == [distinct(ORDERS)] * 3
    assert sorted(texts for texts, _ in calls) == [2, 7, 7]
    assert distinct(ORDERS) < 0.6 * sum(len(step) if isinstance(step, tuple) else 1 for o in ORDERS for step in o)
    # Where states would take more than the limit, fewer texts are passed at a time.
    longest = max(tokens for _, tokens in calls) + 1
    held = lm_eval_scorer.SharedPrefixes(ORDERS, BLOCKS).num_held
    monkeypatch.setattr(lm_eval_scorer, "MAX_STATES", 3 * held * longest * LayeredModel(model).dim * 4)
    calls, bounded = calls_of(model, lambda: scorer().in_orders(LayeredModel(model), ORDERS, tmp_path / "other"))
    assert max(texts for texts, _ in calls) == 3
    for order in ORDERS:
        for request in known.requests.values():
            assert bounded.of(order)(request) == (pytest.approx(known.of(order)(request)[0], abs=1e-4), False)


def test_an_interrupted_run_goes_on_where_it_was(folder, scorer, model, tmp_path, monkeypatch):

    def run(**options):
        options = {"variants": ("skip", "reverse", "parallel"), "batch_size": 7} | options
        analysis = BenchmarkScores(
            task="arc_challenge",
            tokenizer=str(folder / "tokenizer"),
            folder=folder / "local",
            results=tmp_path / "results",
            **options,
        )
        return list(records_of(analysis, LayeredModel(model)))

    add, added = OrderLikelihoods.add, []

    def stop(self, requests, found):
        if len(added) == 2:
            raise KeyboardInterrupt
        added.append(requests)
        add(self, requests, found)

    monkeypatch.setattr(OrderLikelihoods, "add", stop)
    with pytest.raises(KeyboardInterrupt):
        run()
    monkeypatch.setattr(OrderLikelihoods, "add", add)
    (kept,) = tmp_path.rglob("*.npy")
    calls, records = calls_of(model, run)
    assert [texts for texts, _ in calls] == [2]  # the last batch
    assert not kept.exists()
    calls, again = calls_of(model, run)
    assert not calls
    assert again == records


def test_a_file_that_was_cut_when_it_was_made_is_made_again(model, scorer, tmp_path):
    first = scorer().in_orders(LayeredModel(model), ORDERS[:2], tmp_path)
    first.path.write_bytes(first.path.read_bytes()[:200])
    calls, again = calls_of(model, lambda: scorer().in_orders(LayeredModel(model), ORDERS[:2], tmp_path))
    assert calls
    assert again.waiting() == []


def test_what_fails_for_all_orders_is_computed_one_by_one(scorer, model, tmp_path, monkeypatch):
    told, together = [], scorer()
    monkeypatch.setattr(
        LayeredModel, "embedded", lambda *args, **options: (_ for _ in ()).throw(torch.OutOfMemoryError("full"))
    )
    known = together.in_orders(LayeredModel(model), ORDERS[:2], tmp_path, told.append)
    assert told == ["orders are scored one by one: OutOfMemoryError: full"]
    with running_order(model, ORDERS[1]):
        assert together.score(model, known.of(ORDERS[1])) == scorer().score(model)


def test_a_full_model_without_numbers_ends_it_early(scorer, tmp_path, monkeypatch):
    broken = tiny_speaker(blocks=BLOCKS)
    with torch.no_grad():
        broken.transformer.ln_f.weight.fill_(torch.nan)
    calls, known = calls_of(broken, lambda: scorer(batch_size=2).in_orders(LayeredModel(broken), ORDERS, tmp_path))
    assert sum(calls.values()) == distinct(ORDERS)
    assert len(known.waiting()) == 14


def test_answers_that_are_written_have_no_likelihoods(scorer, model, tmp_path):
    calls, known = calls_of(model, lambda: scorer("gsm8k").in_orders(LayeredModel(model), ORDERS, tmp_path))
    assert (calls, known.requests) == ({}, {})
    (tmp_path / "file").write_text("")
    request = next(iter(scorer().in_orders(LayeredModel(model), ORDERS[:2], tmp_path).requests.values()))
    with pytest.raises(InputError, match=r"results: cannot write .*file"):
        OrderLikelihoods(tmp_path / "file", ORDERS, [request])
