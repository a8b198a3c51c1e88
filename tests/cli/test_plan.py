"""A plan is an extrapolation from a share of the data."""

import pytest
import torch

from lit_layers.analyses import Coupling, Induction, Invariance, Trajectory
from lit_layers.cli import measuring as planning
from lit_layers.cli.measuring import sampled
from lit_layers.data import GivenTexts
from lit_layers.errors import InputError
from lit_layers.records import Measurement, Record
from lit_layers.run_data import duration
from tests.support.every_analysis import of_prompts, prompts
from tests.support.listed_batches import Listed


def rows(number: int, batch: int = 16) -> Listed:
    return Listed(*({"input_ids": ids} for ids in torch.arange(number * 4).view(number, 4).split(batch)))


class Clock:
    """A clock that only measuring lets go on: a second for each analysis, and so many for each row."""

    def __init__(self, monkeypatch, of_row: float = 0.1, fails_below: int = 0) -> None:
        self.now, self.of_row, self.fails_below, self.asked = 0.0, of_row, fails_below, []
        monkeypatch.setattr(planning.time, "perf_counter", lambda: self.now)

    def measure(self, analyses) -> list[Measurement]:
        self.now += 2  # opens a checkpoint
        found = []
        for each in analyses:
            number = sum(len(batch["input_ids"]) for batch in each.batches)
            self.asked.append(number)
            self.now += 1 + self.of_row * number
            done = [Record(metric="x", value=1.0)] if number >= self.fails_below else []
            facts = {"step": 0, "tokens": None, "records": done, "seconds": 1 + self.of_row * number}
            error = None if done else "InputError: too few"
            found.append(Measurement(run="r", analysis=each.name, error=error, **facts))
        return found


def test_what_is_measured_whole_is_exact_and_the_rest_is_in_proportion(monkeypatch):
    clock = Clock(monkeypatch)
    plan = sampled([Trajectory(batches=rows(6)), Trajectory(name="long", batches=rows(10_000))], clock.measure)
    assert clock.asked == [4, 4, 6, 8]
    assert plan.shares == {"trajectory": 1.0, "long": 8 / 10_000}
    assert plan.seconds == pytest.approx({"trajectory": 1.6, "long": 1.8 * 10_000 / 8})
    *_, whole = plan.table(3)
    assert (whole[""], whole["time"]) == ("in all, 3 checkpoints", duration(3 * 2253.6))
    assert "an extrapolation" in plan.notes()[0]


def test_an_analysis_that_needs_more_rows_is_given_them_and_one_that_fails_is_named(monkeypatch):
    clock = Clock(monkeypatch, fails_below=30)
    analyses = [Trajectory(batches=rows(64)), Trajectory(name="few", batches=rows(20))]
    plan = sampled(analyses, clock.measure)
    assert plan.seconds == pytest.approx({"trajectory": 2 * (1 + 3.2)})
    assert [note for note in plan.notes() if ": not in" in note] == ["few: not in these numbers: InputError: too few"]


def test_an_analysis_that_refuses_few_rows_stops_no_other(monkeypatch):
    clock = Clock(monkeypatch)

    def measure(analyses):
        for each in analyses:
            if each.name == "probe" and sum(len(batch["input_ids"]) for batch in each.batches) < 30:
                raise InputError(f"probe: too few, {each.name}")
        return clock.measure(analyses)

    plan = sampled([Trajectory(batches=rows(64)), Trajectory(name="probe", batches=rows(64))], measure)
    assert plan.seconds["trajectory"] == plan.seconds["probe"] == pytest.approx(2 * (1 + 3.2))
    assert plan.around == pytest.approx(2)
    with pytest.raises(InputError, match="probe: too few"):  # on all of its rows
        sampled([Trajectory(batches=rows(64)), Trajectory(name="probe", batches=rows(20))], measure)


def test_a_share_is_of_batches_texts_or_prompts_and_of_nothing_else():
    cut, share = Trajectory(batches=rows(40)).first_share(10)
    assert ([len(batch["input_ids"]) for batch in cut.batches], share) == ([10], 0.25)
    cut, share = Coupling(batches=rows(40), num_prompts=20).first_share(5)
    assert (cut.num_prompts, share) == (5, 0.25)
    few = Coupling(batches=rows(4), num_prompts=8)
    assert few.first_share(4) == (few, 1.0), "there are no more prompts than rows"
    cut, share = Induction(num_prompts=8).first_share(2)
    assert (cut.num_prompts, share) == (2, 0.25)
    cut, share = Invariance(texts=GivenTexts([f"text {n}" for n in range(8)]), tokenizer="none").first_share(4)
    assert (len(cut.texts.texts()), share) == (4, 0.5)
    for analysis in of_prompts(prompts()):
        whole, share = analysis.first_share(10_000)
        assert (whole is analysis, share) == (True, 1.0)
        assert 0 < analysis.first_share(2)[1] <= 1
