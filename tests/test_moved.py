"""Former names of modules lead to the ones of today, which keep their public names in hashes."""

import importlib

import pytest

from lit_layers.analyses import CrossTokenInfluence, NextTokenProbe, TokenCoupling
from lit_layers.analyses.speed import Speed
from lit_layers.functional.entropy import effective_rank
from lit_layers.functional.geometry import pool
from lit_layers.functional.similarity import linear_cka_matrix
from lit_layers.moved import MOVED, public_path
from lit_layers.tasks import benchmark_scores, catalogue, glue_rows
from lit_layers.tasks.mteb_scores import MtebTask
from lit_layers.tasks.probe_task import ProbeTask


def test_every_former_name_is_that_of_a_module_of_today():
    for former, now in MOVED.items():
        assert importlib.import_module(former).__name__ == former
        assert all(importlib.import_module(each).__name__ == each for each in now)


def test_what_is_imported_by_a_former_name_is_what_is_imported_today():
    from lit_layers.functional.cka_matrix import linear_cka_matrix as former_matrix
    from lit_layers.functional.pooling import pool as former_pool

    assert former_matrix is linear_cka_matrix
    assert former_pool is pool
    from lit_layers.models.build import load as former_load
    from lit_layers.models.saved import load

    assert former_load is load
    from lit_layers.data.tasks import ProbeTask as FormerTask
    from lit_layers.data.tasks import find_task as former_find
    from lit_layers.embeddings import MtebTask as FormerMteb
    from lit_layers.embeddings import resolve as former_resolve
    from lit_layers.embeddings.task_list import TaskSpec as FormerSpec
    from lit_layers.intervene import PAINTED, BenchmarkScores, normalized_score

    assert (FormerTask, former_find) == (ProbeTask, catalogue.find_task)
    assert (FormerMteb, former_resolve) == (MtebTask, catalogue.resolve)
    assert FormerSpec("STS12", "sts", "cosine_spearman").analysis == "mteb/STS12"
    from lit_layers.tasks.glue import GLUE
    from lit_layers.tasks.probe import TASKS
    from lit_layers.tasks.probe import ProbeTask as LaterTask

    assert (LaterTask, TASKS, GLUE) == (ProbeTask, catalogue.TASKS, glue_rows.GLUE)
    assert (PAINTED, BenchmarkScores) == (catalogue.PAINTED, benchmark_scores.BenchmarkScores)
    assert normalized_score(0.5, 0.25, 0.75) == 0.5
    with pytest.raises((ImportError, AttributeError)):
        importlib.import_module("lit_layers.functional.pooling").no_such_name  # noqa: B018


def test_a_class_is_called_as_before_it_moved_and_a_function_of_a_joined_file_as_it_is():
    assert public_path(ProbeTask) == "lit_layers.data.tasks.ProbeTask"
    assert public_path(TokenCoupling) == "lit_layers.analyses.token_coupling.TokenCoupling"
    assert public_path(CrossTokenInfluence) == "lit_layers.analyses.cross_token_influence.CrossTokenInfluence"
    assert public_path(NextTokenProbe) == "lit_layers.analyses.next_token_probe.NextTokenProbe"
    assert public_path(MtebTask) == "lit_layers.embeddings.analysis.MtebTask"
    assert public_path(benchmark_scores.BenchmarkScores) == "lit_layers.intervene.benchmark_scores.BenchmarkScores"
    assert public_path(Speed) == "lit_layers.intervene.speed.Speed"
    assert effective_rank.__module__ == "lit_layers.functional.entropy"
    assert public_path(type("Pooled", (), {"__module__": "lit_layers.functional.geometry"})) == (
        "lit_layers.functional.geometry.Pooled"
    )
