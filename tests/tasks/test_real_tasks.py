"""Real data: what is said of their differences from the official ones holds, and mteb's own numbers agree."""

import json
from pathlib import Path
from typing import Any

import pytest

from lit_layers.tasks.catalogue import resolve, tasks_of
from lit_layers.tasks.mteb_tasks import Prepared, open_task
from tests.support.data_mapping import copies
from tests.support.measured import records_of
from tests.tasks.tiny_tasks import saved_model, task

LOCAL_DATA = copies("mteb")
pytestmark = pytest.mark.realdata
PAIRS = [f"STS{year}" for year in (13, 14, 15, 16)]


def official(name: str) -> dict[str, Any]:
    """What mteb says of the official data, by split."""
    import mteb

    (path,) = (Path(mteb.__file__).parent / "descriptive_stats").rglob(f"{name}.json")
    return json.loads(path.read_text())


def opened(realdata: Path, name: str) -> Prepared:
    (spec,) = resolve([name], realdata)
    return Prepared(open_task(spec, seed=42), spec)


def test_every_local_task_is_there(realdata):
    assert [spec.name for spec in resolve(["local"], realdata)] == list(LOCAL_DATA)


@pytest.mark.parametrize("name", [name for name in LOCAL_DATA if name in tasks_of("mteb")])
def test_rows_are_as_many_as_the_official_ones_or_the_difference_says_how_many_those_are(realdata, name):
    prepared, expected = opened(realdata, name), official(name)
    found = {"test": prepared.num_rows()}
    if tasks_of("mteb")[name].domain == "classification":
        found["train"] = len(prepared.task.dataset["train"])
    for split, number in found.items():
        if number != expected[split]["num_samples"]:
            assert f"{expected[split]['num_samples']:,}" in LOCAL_DATA[name].difference


@pytest.mark.parametrize("name", [*PAIRS, "STSBenchmark", "SICK-R"])
def test_pairs_have_the_texts_of_the_official_ones_or_are_shorter_as_the_difference_says(realdata, name):
    part, expected = opened(realdata, name).task.dataset["test"], official(name)["test"]
    for column, of in (("sentence1", "text1_statistics"), ("sentence2", "text2_statistics")):
        total, distinct = sum(map(len, part[column])), len(set(part[column]))
        assert distinct == pytest.approx(expected[of]["unique_texts"], abs=3)
        if name in PAIRS:
            assert 0.975 < total / expected[of]["total_text_length"] < 0.99
        else:
            assert total == expected[of]["total_text_length"]
        assert ("shorter" in LOCAL_DATA[name].difference) == (name in PAIRS)


@pytest.mark.soak
def test_a_model_is_scored_on_real_pairs(realdata, tmp_path):
    view = saved_model(tmp_path / "model")
    for name, rows in (("STS16", 1186), ("STSBenchmark", 1379)):
        found = list(records_of(task(name, realdata, tmp_path / "model", tmp_path, layers=(0, 3)), view))
        assert [record.layer for record in found] == [0, 3]
        assert {record.n for record in found} == {rows}
        assert all(0 < record.value < 1 for record in found)
