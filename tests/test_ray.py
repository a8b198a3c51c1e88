"""Real Ray on this machine: results equal those of one process, even after a node is killed; refusals."""

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lit_layers.errors import InputError
from lit_layers.measuring.offline import analyze_series
from lit_layers.series import StepFolders
from tests.support.measured_series import sorted_lines, trained, two_groups

# `slow` runs it first in its tier, because it waits half of its time.
pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(1200)]
NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield
    import ray

    ray.shutdown()


@contextlib.contextmanager
def cluster(num_nodes: int) -> Iterator:
    """Start a Ray cluster: a head without CPUs, and nodes with one CPU each."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={**NODE, "num_cpus": 0, "include_dashboard": False})
    made._shutdown_at_exit = False  # its exit hooks need the main thread, but the killer thread adds a node
    try:
        for _ in range(num_nodes):
            made.add_node(**NODE)
        yield made
    finally:
        made.shutdown()


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return trained(tmp_path_factory.mktemp("runs") / "run", steps=11, every=1)


def test_all_twelve_tasks_complete_although_a_machine_is_killed(run, tmp_path, monkeypatch):
    analyze_series(StepFolders(run), two_groups(), root=tmp_path / "alone" / "run")
    killed, root = [], tmp_path / "carried" / "run"
    with cluster(2) as made:
        monkeypatch.setenv("RAY_ADDRESS", made.address)

        def kill() -> None:
            while not (root / "measurements.jsonl").exists() or len(sorted_lines(root)) < 6:
                time.sleep(0.05)
            victim = next(iter(made.worker_nodes))
            made.remove_node(victim, allow_graceful=False)
            killed.append(len(sorted_lines(root)))

        killer = threading.Thread(target=kill, daemon=True)
        killer.start()
        result = analyze_series(StepFolders(run), two_groups(), root=root, engine="ray")
        killer.join(timeout=60)
    assert killed[0] < 36, "all was measured before the machine was killed"
    assert result.failures == []
    assert len({m.step for m in result.measurements}) == 12
    assert sorted_lines(root) == sorted_lines(tmp_path / "alone" / "run")


def test_an_address_without_a_cluster_is_refused_in_one_sentence(run, tmp_path, monkeypatch):
    def no_answer(**_: object) -> None:
        raise ConnectionError("Failed to connect\nto Ray cluster")

    monkeypatch.setattr("ray.init", no_answer)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    with pytest.raises(InputError, match="had: Failed to connect to Ray cluster; RAY_ADDRESS=local starts one here"):
        analyze_series(StepFolders(run), two_groups(), root=tmp_path / "out", engine="ray")
