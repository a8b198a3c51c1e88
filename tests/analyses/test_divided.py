"""Analyses that several processes share give the numbers of one, whoever measures which part."""

import pickle
import random

import pytest
import torch

from lit_layers.analyses import (
    AttentionPatterns,
    AttentiveProbe,
    Coupling,
    CouplingMatrices,
    CrossTokenInfluence,
    InContext,
    Induction,
    Interventions,
    JacobianLens,
    LabelProbe,
    LayerSimilarity,
    Lens,
    NextTokenProbe,
    NextTokenResidual,
    NgramAgreement,
    OrderStates,
    PooledStates,
    Representation,
    StateGeometry,
    TokenCoupling,
    Trajectory,
)
from lit_layers.analyses.base import DividedAnalysis, StagedAnalysis
from lit_layers.measuring import one_model
from lit_layers.models.view import LayeredModel
from tests.support.listed_batches import Listed
from tests.support.shares import measure_share
from tests.support.tiny_models import tiny


def text(seed: int = 3, labels: int = 0) -> Listed:
    """Prompts of different lengths, more than there are ranks."""
    generator = torch.Generator().manual_seed(seed)
    batches: list[dict[str, torch.Tensor]] = []
    for lengths in ((9, 7), (9,), (5, 9, 8)):
        mask = torch.tensor([[1] * length + [0] * (9 - length) for length in lengths])
        batches.append({"input_ids": torch.randint(3, 60, mask.shape, generator=generator), "attention_mask": mask})
        if labels:
            batches[-1]["labels"] = torch.arange(len(batches), len(batches) + len(mask)) % labels
    return Listed(*batches)


ANALYSES = [
    Trajectory(batches=text()),
    Representation(batches=text()),
    Lens(batches=text()),
    Coupling(batches=text(), k=(2, 5), num_prompts=6),
    TokenCoupling(batches=text(), k=(2,), pairs="all", num_tokens=3, num_prompts=4),
    CrossTokenInfluence(batches=text(), num_prompts=5),
    Interventions(batches=text(), seeds=(0, 1), loops=(3,)),
    LayerSimilarity(batches=text()),
    StateGeometry(batches=text()),
    PooledStates(batches=text()),
    AttentionPatterns(batches=text()),
    Induction(num_prompts=3, num_tokens=5),
    InContext(batches=text(), early=2, late=5),
    NgramAgreement(batches=text(), corpus=text(1), orders=(1, 2)),
    OrderStates(batches=text(), seeds=(0, 1), loops=(3,)),
    CouplingMatrices(batches=text(), pairs=[(1, 2)], k=3, num_prompts=4),
    NextTokenProbe(train=text(), test=text(1), num_classes=4, min_context=2, positions_per_sequence=3),
    LabelProbe(train=text(labels=2), test=text(1, labels=2), pooling=("mean", "last")),
    AttentiveProbe(train=text(labels=2), test=text(1, labels=2), steps=3),
    NextTokenResidual(batches=Listed(*text(), *text(1)), num_halves=2),
    JacobianLens(batches=text(), num_prompts=2, skip_first=1),
]


LONG = ("token_coupling", "cross_token_influence")  # of which the shares are looked at below


@pytest.fixture(scope="module")
def model():
    return tiny("gpt2")


@pytest.mark.parametrize(
    "analysis",
    [pytest.param(each, marks=[pytest.mark.soak] * (each.name in LONG)) for each in ANALYSES],
    ids=[each.name for each in ANALYSES],
)
def test_shares_of_any_number_of_processes_join_to_the_numbers_of_one(model, analysis):
    whole = one_model.measure(model, analysis, run="run", step=3, tokens=5, weights_hash="x")
    assert whole.error is None
    assert whole.records
    for num_ranks in (2, 3, 8):
        draw = random.Random(num_ranks)
        owners = [draw.randrange(num_ranks) for _ in range(99)]  # some rank has none, others many
        shares = [
            measure_share(model, analysis, {n for n in range(99) if owners[n] == rank}, weights_hash="x")
            for rank in reversed(range(num_ranks))
        ]
        joined = one_model.join_shares(
            model, analysis, pickle.loads(pickle.dumps(shares)), run="run", step=3, tokens=5, weights_hash="x"
        )
        # NaN is not equal to itself, its text is
        assert [repr(record) for record in joined.records] == [repr(record) for record in whole.records], num_ranks
    assert (joined.run, joined.step, joined.tokens, joined.error) == ("run", 3, 5, None)
    assert joined.provenance == whole.provenance


@pytest.mark.parametrize("analysis", ANALYSES, ids=lambda analysis: analysis.name)
def test_every_share_has_parts_of_its_own(model, analysis):
    shares = [analysis.of_parts(LayeredModel(model), range(rank, 99, 2)) for rank in range(2)]
    numbers = [number for share in shares for number in share]
    assert sorted(numbers) == list(range(len(numbers)))
    assert all(number % 2 == rank for rank, share in enumerate(shares) for number in share)


STAGED = [analysis for analysis in ANALYSES if isinstance(analysis, StagedAnalysis)]


@pytest.mark.parametrize("analysis", STAGED, ids=lambda analysis: analysis.name)
def test_what_follows_gives_the_same_numbers_whoever_has_which_layer(model, analysis):
    view = LayeredModel(model)
    alone = [*map(repr, analysis.run(view))]
    following = analysis.then(view, analysis.in_order([analysis.of_parts(view)]))
    draw = random.Random(5)
    owners = [draw.randrange(3) for _ in range(99)]
    shares = [following.of_parts(view, {n for n in range(99) if owners[n] == rank}) for rank in (2, 0, 1)]
    assert sum(map(bool, shares)) > 1
    assert [repr(record) for record in following.join(view, shares)] == alone


class Odd(DividedAnalysis):
    """Three parts, of which one fails or cannot be sent."""

    name = "odd"

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def parts(self, model):
        return range(3)

    def of_part(self, model, part):
        if part == 1 and self.fails:
            raise RuntimeError("the second part")
        return (lambda: part) if part == 1 else part

    def combine(self, model, found):
        raise AssertionError("nothing to combine")


@pytest.mark.parametrize(("fails", "error"), [(True, "RuntimeError: the second part"), (False, "local object 'Odd.")])
def test_a_failing_share_is_the_error_of_the_whole(model, fails, error):
    shares = [measure_share(model, Odd(fails), range(rank, 99, 2)) for rank in range(2)]
    assert shares[0].error is None
    measurement = one_model.join_shares(model, Odd(fails), shares, run="run", step=0)
    assert measurement.error is not None
    assert error in measurement.error
    assert measurement.records == []


def test_data_without_prompts_is_an_error_of_the_joined_measurement(model):
    nothing = Trajectory(batches=Listed())
    shares = [measure_share(model, nothing, range(rank, 99, 2)) for rank in range(2)]
    measurement = one_model.join_shares(model, nothing, shares, run="run", step=0)
    assert measurement.error == "InputError: trajectory: the data holds no prompts"
