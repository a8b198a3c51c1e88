"""Analyses divided over several ranks give the numbers of one process."""

from dataclasses import dataclass
from functools import partial

import pytest

from lit_layers.analyses import Coupling, Lens, Trajectory
from lit_layers.analyses.base import Analysis, Jobs, Rows
from lit_layers.records import Record
from tests.support.every_analysis import prompts
from tests.support.listed_batches import Listed
from tests.support.thread_ranks import outcomes_on_ranks


@dataclass(kw_only=True)
class Odd(Analysis):
    """An analysis that fails at one prompt, and so on one rank."""

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
def test_a_failure_on_one_rank_is_the_error_of_only_that_analysis(model, fails, error):
    found, _ = outcomes_on_ranks(model, [Odd(batches=prompts(), fails=fails), Trajectory(batches=prompts())], 2)
    assert error in found[0].error
    assert found[0].records == []
    assert (found[1].error, len(found[1].records) > 5) == (None, True)


class Broken(Listed):
    """Batches that raise an error in one of two processes."""

    def __iter__(self):
        for number, batch in enumerate(super().__iter__()):
            if number == 1 and self.fails.pop():
                raise OSError("the disk is gone")
            yield batch


def test_a_data_error_on_one_rank_is_the_error_of_all_analyses_that_read_it(model):
    broken = Broken(*prompts())
    broken.fails = [True, *[False] * 5]  # popped from the end: each rank first reads them once for each analysis
    others = Listed(next(iter(prompts())))
    found, _ = outcomes_on_ranks(model, [Trajectory(batches=broken), Lens(batches=broken), Coupling(batches=others)], 2)
    assert [each.error for each in found] == ["OSError: the disk is gone"] * 2 + [None]


def test_data_without_prompts_is_an_error(model):
    found, _ = outcomes_on_ranks(model, [Trajectory(batches=Listed())], 2)
    assert found[0].error == "InputError: trajectory: the data holds no prompts"
