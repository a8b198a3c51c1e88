"""The list of tasks, and how names select from it."""

import pytest

from lit_layers.errors import InputError
from lit_layers.tasks.catalogue import LAYERWISE32, resolve


def test_the_scores_and_subsets_equal_those_of_mteb():
    import mteb

    for spec in LAYERWISE32:
        metadata = mteb.get_task(spec.name).metadata
        assert metadata.main_score == spec.score
        assert "test" in metadata.eval_splits
        assert spec.subset in metadata.hf_subsets
        assert all(language.startswith("eng") for language in metadata.hf_subsets_to_langscripts[spec.subset])


def test_names_are_resolved_once_and_in_order():
    assert [spec.name for spec in resolve(["STS13", "layerwise32"])][:2] == ["STS13", LAYERWISE32[0].name]
    assert len({spec.name for spec in resolve(["layerwise32", "STS13"])}) == 32
    assert len({spec.domain for spec in LAYERWISE32}) == 5
    names = ["AskUbuntuDupQuestions", "MindSmallReranking", "SciDocsRR", "StackOverflowDupQuestions"]
    assert [spec.name for spec in resolve(["reranking"])] == names


def test_local_means_the_tasks_with_files_in_the_folder(tmp_path):
    (tmp_path / "tasks.yaml").write_text("mteb: {STS12: 12.csv, STS13: 13.csv}")
    (tmp_path / "13.csv").touch()
    assert [spec.name for spec in resolve(["local"], tmp_path)] == ["STS13"]
    assert resolve(["layerwise32"], tmp_path) == [*LAYERWISE32]
    assert {spec.name for spec in resolve(["layerwise32"], tmp_path) if spec.copy} == {"STS13"}
    with pytest.raises(InputError, match="tasks: local means all tasks whose data lie in --folder, there are none"):
        resolve(["local"])
