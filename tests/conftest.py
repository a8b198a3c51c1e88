"""The environment of all tests: one thread, no network, temporary caches, this checkout on the path."""

import atexit
import gc
import hashlib
import os
import pickle
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest

from tests.support.costs import Costs
from tests.support.data_mapping import link_data

# A process started in the background of a script ignores Ctrl-C, which tests send.
signal.signal(signal.SIGINT, signal.default_int_handler)
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")  # gw0, gw1, ...
if WORKER:  # exit without freeing imported objects, which takes four seconds
    atexit.register(os._exit, 0)
DATA = Path(os.environ.get("LIT_LAYERS_DATA", Path(__file__).parents[1] / ".." / "shared" / "data")).resolve()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the test files: those that train or start processes first, then whole commands, then fast ones.

    Other workers are idle while the last file runs, so the last ones should be short.
    """
    long = {item.path for item in items if item.get_closest_marker("slow")}
    commands = {Path(__file__).parent / room for room in ("", "cli", "hostile")}
    items.sort(key=lambda item: (item.path not in long, item.path.parent not in commands, item.path))


class TurnedFolder(pytest.Dir):
    """A test folder that each pytest-xdist worker collects in another order.

    pytest rewrites the asserts of files that are not compiled yet. Each worker then rewrites a part of them and finds
    the others in the cache.
    """

    def collect(self) -> list[pytest.Item | pytest.Collector]:
        parts = [*super().collect()]
        begin = len(parts) * int(WORKER.removeprefix("gw")) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        return parts[begin:] + parts[:begin]


class FoldersInTurn:
    def pytest_collect_directory(self, path: Path, parent: pytest.Collector) -> pytest.Collector:
        return TurnedFolder.from_parent(parent, path=path)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Costs())
    if WORKER:
        config.pluginmanager.register(FoldersInTurn())


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Freeze imported objects, because collecting garbage among them takes a sixth of the import time, and again later.

    Also collect garbage less often than after each 700 new objects, which takes a tenth of the tests' time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000)
        gc.enable()
        atexit.register(gc.unfreeze)  # without this triton reports its objects as leaked


def pytest_collection_finish() -> None:
    import torch  # only workers need torch: the main process distributes tests and runs none

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def emergence_times_once() -> Iterator[None]:
    """Cache emergence times by curve: they are half the cost of a page, and many tests compute the same.

    Equal inputs give equal times (`tests/functional/test_emergence.py`).
    """
    clock, known = sys.modules.get("lit_layers.clock.times_and_order"), {}
    with pytest.MonkeyPatch.context() as patch:
        if clock is not None:
            measure = clock.emergence_times

            def remembered(*given: Any, **options: Any) -> Any:
                curve = hashlib.sha256(pickle.dumps((given, options))).digest()
                if curve not in known:
                    known[curve] = measure(*given, **options)
                return known[curve]

            patch.setattr(clock, "emergence_times", remembered)
        yield


@pytest.fixture(scope="session")
def realdata(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the optional folder of real data sets, with the path of each task."""
    if not DATA.is_dir():
        pytest.skip(f"no data folder at {DATA}: set LIT_LAYERS_DATA")
    return link_data(DATA, tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache folder for all test processes, so that no test writes to the user's cache or prepares twice."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(autouse=True)
def own_cache(shared_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIT_LAYERS_CACHE", str(shared_cache))
