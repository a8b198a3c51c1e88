"""What every test may rely on: one thread, no network, no cache of the user's, this checkout on the path."""

import os
import signal
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest
import torch

from tests.support.data_mapping import linked

torch.set_num_threads(1)
# What is started in the background of a script inherits an ignored Ctrl-C, and tests send one.
signal.signal(signal.SIGINT, signal.default_int_handler)
DATA = Path(os.environ.get("LIT_LAYERS_DATA", Path(__file__).parents[1] / ".." / "shared" / "data")).resolve()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that train or start processes come first: the last one decides how long the other worker is idle."""
    long = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in long)


@pytest.fixture(scope="session")
def realdata(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The optional folder of real data sets, and where each task lies in it."""
    if not DATA.is_dir():
        pytest.skip(f"no data folder at {DATA}: set LIT_LAYERS_DATA")
    return linked(DATA, tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder of all processes of these tests, so that no test writes to the user's or prepares again."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(autouse=True)
def own_cache(shared_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIT_LAYERS_CACHE", str(shared_cache))
