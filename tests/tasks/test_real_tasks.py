"""Real data: what is said of their differences from the official ones holds, and mteb's own numbers agree."""

import json
from pathlib import Path
from typing import Any

import pytest

from lit_layers.tasks.catalogue import resolve, tasks_of
from lit_layers.tasks.mteb_tasks import Prepared, open_task
from tests.support.data_mapping import copies

LOCAL_DATA = copies("mteb")
pytestmark = [pytest.mark.realdata, pytest.mark.soak]
PAIRS = [f"STS{year}" for year in (13, 14, 15, 16)]


def official(name: str) -> dict[str, Any]:
    """What mteb says of the official data, by split."""
    import mteb

    (path,) = (Path(mteb.__file__).parent / "descriptive_stats").rglob(f"{name}.json")
    return json.loads(path.read_text())


def opened(realdata: Path, name: str) -> Prepared:
    (spec,) = resolve([name], realdata)
    return Prepared(open_task(spec, seed=42), spec)


def test_every_local_task_is_there_with_as_many_rows_as_the_official_one_or_a_difference_that_says_how_many(realdata):
    assert [spec.name for spec in resolve(["local"], realdata)] == list(LOCAL_DATA)
    for name in LOCAL_DATA.keys() & tasks_of("mteb").keys():
        prepared, expected = opened(realdata, name), official(name)
        found = {"test": prepared.num_rows()}
        if tasks_of("mteb")[name].domain == "classification":
            found["train"] = len(prepared.task.dataset["train"])
        for split, number in found.items():
            if number != expected[split]["num_samples"]:
                assert f"{expected[split]['num_samples']:,}" in LOCAL_DATA[name].difference


def test_pairs_have_the_texts_of_the_official_ones_or_are_shorter_as_the_difference_says(realdata):
    for name in (*PAIRS, "STSBenchmark", "SICK-R"):
        part, expected = opened(realdata, name).task.dataset["test"], official(name)["test"]
        for column, of in (("sentence1", "text1_statistics"), ("sentence2", "text2_statistics")):
            total, distinct = sum(map(len, part[column])), len(set(part[column]))
            assert distinct == pytest.approx(expected[of]["unique_texts"], abs=3), name
            if name in PAIRS:
                assert 0.975 < total / expected[of]["total_text_length"] < 0.99, name
            else:
                assert total == expected[of]["total_text_length"], name
            assert ("shorter" in LOCAL_DATA[name].difference) == (name in PAIRS)
