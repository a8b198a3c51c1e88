"""Former names of modules lead to the ones of today, which keep their public names in hashes."""

import importlib

import pytest

from lit_layers.analyses import CrossTokenInfluence, NextTokenProbe, TokenCoupling
from lit_layers.functional.entropy import effective_rank
from lit_layers.functional.geometry import linear_cka_matrix, pool
from lit_layers.moved import MOVED, public_path
from lit_layers.tasks.probe import ProbeTask


def test_every_former_name_is_that_of_a_module_of_today():
    for former, now in MOVED.items():
        assert importlib.import_module(former).__name__ == former
        assert importlib.import_module(now).__name__ == now


def test_what_is_imported_by_a_former_name_is_what_is_imported_today():
    from lit_layers.functional.cka_matrix import linear_cka_matrix as former_matrix
    from lit_layers.functional.pooling import pool as former_pool

    assert former_matrix is linear_cka_matrix
    assert former_pool is pool
    with pytest.raises((ImportError, AttributeError)):
        importlib.import_module("lit_layers.functional.pooling").no_such_name  # noqa: B018


def test_a_class_is_called_as_before_it_moved_and_a_function_of_a_joined_file_as_it_is():
    assert public_path(ProbeTask) == "lit_layers.data.tasks.ProbeTask"
    assert public_path(TokenCoupling) == "lit_layers.analyses.token_coupling.TokenCoupling"
    assert public_path(CrossTokenInfluence) == "lit_layers.analyses.cross_token_influence.CrossTokenInfluence"
    assert public_path(NextTokenProbe) == "lit_layers.analyses.next_token_probe.NextTokenProbe"
    assert effective_rank.__module__ == "lit_layers.functional.entropy"
    assert public_path(type("Pooled", (), {"__module__": "lit_layers.functional.geometry"})) == (
        "lit_layers.functional.geometry.Pooled"
    )
