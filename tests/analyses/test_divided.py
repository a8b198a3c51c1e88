"""Analyses that several ranks share give the numbers of one process, whichever rank measures what."""

from dataclasses import dataclass
from functools import partial

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
from lit_layers.analyses.base import Analysis, Jobs, Rows
from lit_layers.measuring.one_model import outcomes
from lit_layers.records import Record
from tests.support.listed_batches import Listed
from tests.support.shares import found_by_ranks
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


@pytest.fixture(scope="module")
def model():
    return tiny("gpt2")


@pytest.mark.parametrize("size", [2, 3])
def test_any_number_of_ranks_finds_the_numbers_of_one_process(model, size):
    alone = list(outcomes(model, ANALYSES, weights_hash="x"))
    found, meeting = found_by_ranks(model, ANALYSES, size)
    assert [each.error for each in (*alone, *found)] == [None] * 2 * len(ANALYSES)
    for whole, shared in zip(alone, found, strict=True):
        # NaN is not equal to itself, its text is
        assert [repr(record) for record in shared.records] == [repr(record) for record in whole.records]
        assert shared.facts == whole.facts
    assert meeting.num_gathers == 2 * len(ANALYSES) + 1, "two exchanges an analysis, and one at the end"


@dataclass(kw_only=True)
class Odd(Analysis):
    """Something that fails at one prompt, which one of several ranks has."""

    batches: Listed
    name: str = "odd"
    fails: str = ""

    def reads(self, model):
        return {"batches": Rows(self.batches, at_once=1)}

    def update(self, seen, batch):
        is_longest = bool(batch["attention_mask"].all())
        if self.fails == "update" and is_longest:
            raise RuntimeError("at a prompt")
        if self.fails == "value" and is_longest:
            return {"norm": lambda: None}
        return {"norm": seen.hidden.norm()[None]}

    def jobs(self, model, batches):
        def job(number):
            if self.fails == "job" and number == 1:
                raise RuntimeError("in a job")
            return (lambda: None) if self.fails == "result" and number == 1 else [Record(metric="norm", value=1.0)]

        return Jobs([partial(job, number) for number in range(3)])


@pytest.mark.parametrize(
    ("fails", "error"),
    [
        ("update", "RuntimeError: at a prompt"),
        ("value", "Can't"),
        ("job", "RuntimeError: in a job"),
        ("result", "Can't"),
    ],
)
def test_what_fails_on_one_rank_is_the_error_of_the_analysis_and_no_other(model, fails, error):
    found, _ = found_by_ranks(model, [Odd(batches=text(), fails=fails), Trajectory(batches=text())], 2)
    assert error in found[0].error
    assert found[0].records == []
    assert (found[1].error, len(found[1].records) > 5) == (None, True)


class Broken(Listed):
    """Batches that break off in one process of two."""

    def __iter__(self):
        for number, batch in enumerate(super().__iter__()):
            if number == 1 and self.fails.pop():
                raise OSError("the disk is gone")
            yield batch


def test_data_that_breaks_off_on_one_rank_is_the_error_of_all_who_read_it(model):
    broken = Broken(*text())
    broken.fails = [True, *[False] * 5]  # each rank looks once for each analysis before
    others = Listed(next(iter(text())))
    found, _ = found_by_ranks(model, [Trajectory(batches=broken), Lens(batches=broken), Coupling(batches=others)], 2)
    assert [each.error for each in found] == ["OSError: the disk is gone"] * 2 + [None]


def test_data_without_prompts_is_an_error(model):
    found, _ = found_by_ranks(model, [Trajectory(batches=Listed())], 2)
    assert found[0].error == "InputError: trajectory: the data holds no prompts"
