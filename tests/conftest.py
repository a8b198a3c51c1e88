"""What every test may rely on: one thread, no network, no cache of the user's, this checkout on the path."""

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
from tests.support.data_mapping import linked

# What is started in the background of a script inherits an ignored Ctrl-C, and tests send one.
signal.signal(signal.SIGINT, signal.default_int_handler)
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")  # gw0, gw1, ...
if WORKER:  # to take all that was imported apart costs four seconds, and nothing is left to do
    atexit.register(os._exit, 0)
DATA = Path(os.environ.get("LIT_LAYERS_DATA", Path(__file__).parents[1] / ".." / "shared" / "data")).resolve()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that train or start processes come first, then those of whole commands: functions and models take least.

    The last file decides how long the other workers are idle.
    """
    long = {item.path for item in items if item.get_closest_marker("slow")}
    commands = {Path(__file__).parent / room for room in ("", "cli", "hostile")}
    items.sort(key=lambda item: (item.path not in long, item.path.parent not in commands, item.path))


class TurnedFolder(pytest.Dir):
    """A folder of which each process of pytest-xdist reads another part first.

    Where no file is compiled yet, each so rewrites the asserts of its part, and finds those of the others written.
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
    """What is imported stays: looking for garbage in it takes a sixth of the time of an import, and again later.

    Python looks after each 700 objects more, which takes a tenth of the tests' time; they need no more memory so.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000)
        gc.enable()
        atexit.register(gc.unfreeze)  # else triton reports all that it has as leaked


def pytest_collection_finish() -> None:
    import torch  # the process that hands the tests out collects none and needs no torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def emergence_times_once() -> Iterator[None]:
    """Emergence times measured once for each curve: they are half the cost of a page, and many tests make the same.

    The same input gives the same times (`tests/functional/test_emergence.py`), so that a result may stand for the next.
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
