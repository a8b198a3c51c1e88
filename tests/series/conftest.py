"""A model to make steps of, whole and in shards, and a place for a fake Hub."""

from pathlib import Path

import pytest

from tests.support.series_hub import template


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return template(tmp_path_factory.mktemp("template") / "whole")


@pytest.fixture(scope="session")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return template(tmp_path_factory.mktemp("template") / "shards", shard="60KB")
