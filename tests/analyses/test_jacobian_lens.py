"""The Jacobian lens and its controls, against numpy and the logit lens of `Lens`."""

import pickle
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed

from lit_layers.analyses import JacobianLens, Lens
from lit_layers.analyses.base import DividedAnalysis, StagedAnalysis
from lit_layers.analyses.readouts import jacobian_lens
from lit_layers.analyses.readouts.jacobian_lens import FittedLens, JacobianSum, one_by_one, with_shuffled_weights
from lit_layers.analyses.states import first_rows
from lit_layers.errors import InputError
from lit_layers.measuring.one_model import in_one_pass
from lit_layers.models.view import LayeredModel
from lit_layers.records import Record
from lit_layers.training.rank_assignment import Ranks
from tests.support.forked import run_ranks
from tests.support.listed_batches import Listed
from tests.support.tiny_models import tiny

SKIP = 2


def prompts(number: int = 7, tokens: int = 12) -> Listed:
    ids = torch.randint(3, 60, (number, tokens), generator=torch.Generator().manual_seed(4))
    return Listed({"input_ids": ids[:3]}, {"input_ids": ids[3:]})


def lens(batches=None, **options) -> JacobianLens:
    fixed = {"num_prompts": 2, "skip_first": SKIP}
    return JacobianLens(batches=batches or prompts(), **(fixed | options))


@pytest.fixture(scope="module")
def view() -> LayeredModel:
    return LayeredModel(tiny("gpt2", torch.float64))


@pytest.fixture(scope="module")
def records(view):
    return list(lens().run(view))


def fitted_on(view: LayeredModel, batches: Any, num_prompts: int) -> FittedLens:
    """The lens of the first prompts, from the Jacobians of every second one and of the others."""
    given = [*one_by_one(first_rows(batches, num_prompts))]
    halves = [JacobianSum.over(view, given[half::2], SKIP) for half in range(2)]
    return FittedLens.mean(halves, num_prompts)


def values(records, metric: str, name: str) -> list[float]:
    return [r.value for r in records if r.metric == metric and r.tags.get("lens", name) == name]


def test_divergence_and_rank_are_those_of_numpy(view, records):
    """From the states by the lens' matrix through the model's own norm and head, softmax and ranks in numpy."""
    fitted = fitted_on(view, prompts(), 2)
    identity = np.eye(view.dim)
    for name, matrices in (("jacobian", fitted.jacobians.numpy()), ("logit", [identity] * view.num_layers)):
        for layer in range(view.num_layers):
            divergences, ranks = [], []
            for batch in prompts():
                for ids in batch["input_ids"]:
                    trajectory = view.trajectory({"input_ids": ids[None]})
                    carried = torch.from_numpy(trajectory.hidden[layer].numpy() @ matrices[layer].T)
                    scores = view.readout(carried)[0].detach().numpy()
                    own = trajectory.logits[0].numpy()
                    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (own, scores))
                    places = range(SKIP, len(ids) - 1)
                    divergences.append([(np.exp(p[t]) * (p[t] - q[t])).sum() for t in places])
                    ranks.append([1 + (scores[t] > scores[t, ids[t + 1]]).sum() for t in places])
            held_out = slice(2, None)
            expected = np.mean(divergences[held_out]), np.exp(np.log(ranks[held_out]).mean())
            found = values(records, "lens_kl", name)[layer], values(records, "lens_rank", name)[layer]
            assert found == pytest.approx(expected, rel=1e-6), (name, layer)


def test_the_logit_lens_is_that_of_lens_where_no_place_is_skipped(view):
    ids = torch.cat([b["input_ids"] for b in prompts()])
    here = list(lens(num_prompts=1, skip_first=0, lenses=("logit",)).run(view))
    there = list(Lens(batches=Listed({"input_ids": ids[1:]})).run(view))
    expected = [r.value for r in there if r.metric == "kl_to_final"][:-1]
    assert values(here, "lens_kl", "logit") == pytest.approx(expected, rel=1e-9)


def test_shuffled_weights_are_those_of_the_blocks_in_another_order(view):
    model = with_shuffled_weights(view, 0)
    for before, after in zip(view.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(before.flatten().sort().values, after.flatten().sort().values, rtol=0, atol=0)
    moved = [n for n, p in model.named_parameters() if not torch.equal(p, dict(view.model.named_parameters())[n])]
    assert moved
    assert all(".h." in name and model.get_parameter(name).ndim > 1 for name in moved)


def test_halves_are_of_every_second_prompt_and_their_mean_is_the_lens(view):
    fitted = fitted_on(view, prompts(), 4)
    ids = torch.cat([b["input_ids"] for b in prompts()])
    for half in (0, 1):
        alone = fitted_on(view, [{"input_ids": ids[half:4:2]}], 2)
        torch.testing.assert_close(fitted.halves[half], alone.jacobians, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(fitted.halves.mean(0), fitted.jacobians)


def test_padding_on_the_left_changes_nothing(view):
    ids = torch.cat([b["input_ids"] for b in prompts()])
    left = torch.cat([torch.zeros(7, 3, dtype=torch.long), ids], 1)
    mask = torch.cat([torch.zeros(7, 3, dtype=torch.long), torch.ones_like(ids)], 1)
    padded = list(lens(Listed({"input_ids": left, "attention_mask": mask})).run(view))
    plain = list(lens().run(view))
    assert [r.value for r in padded] == pytest.approx([r.value for r in plain], rel=1e-6)


def test_prompts_that_are_too_short_are_left_out_and_counted(view):
    ids = torch.cat([b["input_ids"] for b in prompts()])
    chosen, length = (
        [0, 0, 1, 2, 3, 4, 4, 5, 6],
        torch.tensor([SKIP + 1, 99, 99, 99, 99, 99, 2, 99, 99]),
    )  # 2nd and 7th cut
    mask = (torch.arange(ids.shape[1]) < length[:, None]).long()
    cut = list(lens(Listed({"input_ids": ids[chosen], "attention_mask": mask}), num_prompts=3).run(view))
    whole = list(lens(num_prompts=2).run(view))
    assert [r.value for r in cut] == pytest.approx([r.value for r in whole], rel=1e-6)
    for record in cut:
        compares = record.metric != "jacobian_lens_halves"
        assert record.tags.get("num_undefined") == (1 if compares else None)
        assert record.tags.get("num_undefined_fit_prompts") == (
            1 if record.tags.get("lens", "jacobian") == "jacobian" else None
        )
    assert not any("num_undefined" in name for record in whole for name in record.tags)


def test_the_model_is_as_it_was(view):
    before = {name: p.clone() for name, p in view.model.named_parameters()}
    list(lens(lenses=("shuffled",)).run(view))
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in view.model.named_parameters())


def test_held_out_prompts_that_are_all_too_short_are_said(view):
    ids = torch.randint(3, 60, (6, 12), generator=torch.Generator().manual_seed(4))
    with pytest.raises(InputError, match="no prompt is left to compare on: give more than 2 that have a place from 2"):
        list(lens(Listed({"input_ids": ids[:2]}, {"input_ids": ids[2:, :3]})).run(view))


# ------------------------------------------------------------------------------------------- several processes


def of_processes(analysis: DividedAnalysis, view: LayeredModel, num_ranks: int) -> list[Record]:
    """The records of a few processes that have parts of each stage at random."""
    draw = random.Random(num_ranks)
    while True:
        owners = [draw.randrange(num_ranks) for _ in range(99)]
        shares = [
            analysis.of_parts(view, {number for number in range(99) if owners[number] == rank})
            for rank in reversed(range(num_ranks))
        ]
        shares = pickle.loads(pickle.dumps(shares))
        if not isinstance(analysis, StagedAnalysis):
            return list(analysis.join(view, shares))
        analysis = analysis.then(view, analysis.in_order(shares))


# What may be sent, in numbers of one lens of float64; the halves of two fits are 32.
@pytest.mark.parametrize(("most", "num_parts"), [(1e9, 4), (20, 1)])
def test_processes_divide_the_halves_of_the_fits_then_the_held_out_prompts(view, monkeypatch, most, num_parts):
    analysis = lens(prompts(10), num_prompts=6)
    monkeypatch.setattr(jacobian_lens, "MOST_SENT", most * view.num_layers * view.dim**2)
    assert len(list(analysis.parts(view))) == num_parts
    alone = [repr(record) for record in analysis.run(view)]
    for num_ranks in (2, 5):
        assert [repr(record) for record in of_processes(analysis, view, num_ranks)] == alone, num_ranks


@pytest.mark.parametrize("options", [{"lenses": ("logit",)}, {"lenses": ("shuffled",)}, {"num_prompts": 1}])
def test_processes_divide_what_is_left_where_a_lens_is_not_measured(view, options):
    analysis = lens(**options)
    assert list(map(repr, of_processes(analysis, view, 3))) == list(map(repr, analysis.run(view)))


def measured_by_a_rank(folder: Path) -> int:
    """Twice, by what is estimated and by the seconds of the first time; leaves what this rank has done."""
    distributed.init_process_group("gloo")
    ranks = Ranks(distributed.new_group(backend="gloo"))
    done = Counter()

    def counting(name: str, function: Any) -> Any:
        def call(*args, **options):
            done[name] += 1
            return function(*args, **options)

        return call

    for module, name in (
        (jacobian_lens, "jacobians_to_last_layer"),
        (jacobian_lens, "FullModel"),
    ):
        setattr(module, name, counting(name, getattr(module, name)))
    analysis = lens(prompts(12), num_prompts=4)
    facts: dict[str, Any] = {"run": "run", "step": 0, "weights_hash": "x"}
    measurements = []
    for _ in range(2):
        measurements = ranks.measure(tiny("gpt2"), [analysis], lambda analysis: None, **facts)
    records = [repr(record) for each in measurements for record in each.records]
    (folder / f"{ranks.rank}.pickle").write_bytes(pickle.dumps((done, records)))
    return 0


def test_two_ranks_have_the_numbers_of_one_process_and_each_does_its_share(tmp_path):
    analysis = lens(prompts(12), num_prompts=4)
    (alone,) = in_one_pass(tiny("gpt2"), [analysis], lambda analysis: None, run="run", step=0, weights_hash="x")
    assert alone.error is None
    assert run_ranks(lambda: measured_by_a_rank(tmp_path)) == [0, 0]
    of_ranks = [pickle.loads((tmp_path / f"{rank}.pickle").read_bytes()) for rank in range(2)]
    assert of_ranks[0][1] == [repr(record) for record in alone.records]
    assert of_ranks[1][1] == []
    work = {"jacobians_to_last_layer": 2 * 4, "FullModel": 12 - 4}
    for name, number in work.items():  # in both rounds
        shares = [done[name] for done, _ in of_ranks]
        assert sum(shares) == 2 * number, name
        assert min(shares) >= number // 2, name


# -------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"num_prompts": 7}, "no prompt is left to compare on: give more than 7"),
        ({"skip_first": 40}, "skip_first: none of the first 2 prompts has a place from 40 on"),
        ({"lenses": ()}, "expected at least one of lenses, got none"),
        ({"lenses": ("logits",)}, "expected lenses to be"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_anything_is_measured(options, sentence, view):
    with pytest.raises(InputError, match=sentence):
        lens(**options).check(view)
    with pytest.raises(InputError, match=sentence):
        list(lens(**options).run(view))


def test_a_model_that_predicts_no_next_token_is_refused():
    with pytest.raises(InputError, match="expected a model that predicts the next token, got BertForMaskedLM"):
        list(lens().run(LayeredModel(tiny("bert"))))
