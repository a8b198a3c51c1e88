"""The list of tasks, and how names are found in it."""

from collections import Counter

import pytest

from lit_layers.errors import InputError
from lit_layers.tasks.catalogue import LAYERWISE32, resolve


def test_the_list_has_32_tasks_of_five_domains():
    assert len({spec.name for spec in LAYERWISE32}) == 32
    assert Counter(spec.domain for spec in LAYERWISE32) == {
        "classification": 10,
        "clustering": 6,
        "pair_classification": 3,
        "reranking": 4,
        "sts": 9,
    }


def test_the_scores_and_subsets_are_those_of_mteb():
    import mteb

    for spec in LAYERWISE32:
        metadata = mteb.get_task(spec.name).metadata
        assert metadata.main_score == spec.score
        assert "test" in metadata.eval_splits
        assert spec.subset in metadata.hf_subsets
        assert all(language.startswith("eng") for language in metadata.hf_subsets_to_langscripts[spec.subset])


def test_names_are_found_once_and_in_order():
    assert [spec.name for spec in resolve(["STS13", "layerwise32"])][:2] == [
        "STS13",
        LAYERWISE32[0].name,
    ]
    assert len(resolve(["layerwise32", "STS13"])) == 32
    assert [spec.name for spec in resolve(["reranking"])] == [
        "AskUbuntuDupQuestions",
        "MindSmallReranking",
        "SciDocsRR",
        "StackOverflowDupQuestions",
    ]


def test_local_means_what_lies_in_the_folder(tmp_path):
    (tmp_path / "tasks.yaml").write_text("mteb: {STS12: 12.csv, STS13: 13.csv}")
    (tmp_path / "13.csv").touch()
    assert [spec.name for spec in resolve(["local"], tmp_path)] == ["STS13"]
    assert resolve(["layerwise32"], tmp_path) == [*LAYERWISE32]
    assert {spec.name for spec in resolve(["layerwise32"], tmp_path) if spec.copy} == {"STS13"}


def test_what_is_no_task_is_named_with_its_neighbours():
    cases = [
        ("Banking77", "task: there is no 'Banking77'; did you mean Banking77Classification"),
        ("xyz", "task: there is no 'xyz'; expected one such as layerwise32, local, "),
        ("local", "tasks: local means all tasks whose data lie in --folder, there are none"),
    ]
    for name, sentence in cases:
        with pytest.raises(InputError, match=sentence):
            resolve([name])


def test_options_of_official_tasks_are_checked_before_anything_is_measured(tmp_path):
    (tmp_path / "tasks.yaml").write_text("mteb: {STS12: {files: a.csv, options: {subset: 3}}}")
    wrong = "^task STS12: .*tasks.yaml: options: subset: Input should be a valid string, got 3"
    with pytest.raises(InputError, match=wrong):
        resolve(["STS12"], tmp_path)
