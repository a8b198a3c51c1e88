"""Real Ray on this machine: the record of one process whatever number of workers made it, and whoever was killed.

`LIT_LAYERS_KILLS` is how many kills are drawn (20; 200 before a release), `LIT_LAYERS_SEED` what they are drawn with:
the release's may be run in pieces.
"""

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from lit_layers.cli.main import main
from lit_layers.errors import InputError
from lit_layers.measuring import ray_workers
from lit_layers.measuring.offline import analyze_series
from lit_layers.measuring.ray_workers import Job, RayWorkers, hand_out
from lit_layers.series import StepFolders
from tests.support.labelled_texts import saved_gpt2
from tests.support.measured_series import of_texts, sorted_lines, trained, two_groups
from tests.support.ray_work import Meeting, OnGpu

# `slow`: first of its tier, as it is the longest file and waits half of its time.
pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(3000)]
KILLS = int(os.environ.get("LIT_LAYERS_KILLS", 20))
SEED = int(os.environ.get("LIT_LAYERS_SEED", 0))
ROOT = Path(__file__).parents[1]
NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_DISABLE_IMPORT_WARNING", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@contextlib.contextmanager
def cluster(num_nodes: int) -> Iterator:
    """A head without CPUs, and nodes of one CPU each."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={**NODE, "num_cpus": 0, "include_dashboard": False})
    made._shutdown_at_exit = (
        False  # its hooks are of the main thread alone, and the killer adds nodes; they end with the head
    )
    try:
        for _ in range(num_nodes):
            made.add_node(**NODE)
        yield made
    finally:
        made.shutdown()


@contextlib.contextmanager
def joined(address: str) -> Iterator:
    import ray

    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    try:
        yield
    finally:
        ray.shutdown()


def workers_of(made) -> list[int]:
    """The processes that hold or await a task: children of the nodes that this test started."""
    raylets = {each.process.pid for node in made.worker_nodes for each in node.all_processes["raylet"]}
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            command = (folder / "cmdline").read_bytes()
            if parent in raylets and b"ray::" in command and b"Agent" not in command:  # whose end is their node's
                found.append(int(folder.name))
    return found


class Killer:
    """Kills a worker, or a whole node that another one replaces, at random times, as long as it is open."""

    def __init__(self, made, number: int, pause: tuple[float, float]) -> None:
        self.made, self.number, self.pause, self.draws = made, number, pause, random.Random(SEED)
        self.killed: Counter[str] = Counter()
        self._nodes = len(made.worker_nodes)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while self.killed.total() < self.number and not self._over.wait(self.draws.uniform(*self.pause)):
            if self.draws.random() < 0.2:
                self.made.remove_node(self.draws.choice([*self.made.worker_nodes]), allow_graceful=False)
                self.killed["node"] += 1
            elif workers := workers_of(self.made):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.draws.choice(workers), signal.SIGKILL)
                    self.killed["worker"] += 1
            while len(self.made.worker_nodes) < self._nodes and not self._over.is_set():
                try:
                    self.made.add_node(**NODE)
                except Exception as error:  # Ray waits for it for so long: the machine may be busy
                    sys.stdout.write(f"a node did not start: {error}\n")

    def __enter__(self) -> "Killer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def driven(killer: Killer, draws: random.Random, after: tuple[float, float], words: list[str]) -> None:
    """Runs the process that hands out until it ends by itself; a quarter of all kills are its own."""
    command = [sys.executable, "-m", "tests.support.ray_driver", *words]
    while True:
        kills = killer.killed["driver"] < killer.number // 4
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
            try:
                _, errors = process.communicate(timeout=draws.uniform(*after) if kills else None)
            except subprocess.TimeoutExpired:
                process.kill()
                killer.killed["driver"] += 1
                continue
        assert process.returncode == 0, errors.decode()[-2000:]
        return


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return trained(tmp_path_factory.mktemp("runs") / "run", steps=8, every=1)


@pytest.fixture(scope="module")
def alone(run, tmp_path_factory) -> list:
    root = tmp_path_factory.mktemp("alone") / "run"
    analyze_series(StepFolders(run), two_groups(), root=root)
    return sorted_lines(root)


@pytest.mark.parametrize("num_workers", [1, 2, 8])
def test_any_number_of_workers_makes_the_record_of_one_process(run, alone, tmp_path, num_workers):
    with cluster(num_workers) as made, joined(made.address):
        result = analyze_series(StepFolders(run), two_groups(), root=tmp_path / "run", engine="ray")
    assert result.failures == []
    assert sorted_lines(tmp_path / "run") == alone


def test_a_machine_with_other_code_of_the_package_is_refused_before_a_number_is_written(run, tmp_path, monkeypatch):
    shutil.copytree(ROOT / "lit_layers", tmp_path / "copy" / "lit_layers", ignore=shutil.ignore_patterns("__pycache__"))
    with open(tmp_path / "copy" / "lit_layers" / "metrics.py", "a", encoding="utf-8") as file:
        file.write("# another version\n")
    with cluster(0) as made:
        made.add_node(**NODE, env_vars={"PYTHONPATH": str(tmp_path / "copy")})
        monkeypatch.setenv("RAY_ADDRESS", made.address)
        with pytest.raises(InputError, match=r"a worker has lit_layers \S+ \(code .* and this"):
            analyze_series(StepFolders(run), two_groups(), root=tmp_path / "run", engine="ray")
    assert not (tmp_path / "run" / "measurements.jsonl").exists()


def test_small_tasks_run_beside_a_large_one_which_has_its_place_first(tmp_path):
    """On a machine of 10 GiB, of which the large one takes 8 and each small one 1."""
    jobs = [Job("b", f"small{n}", 1, memory=2**30) for n in range(6)] + [Job("a", "large", 9, memory=8 * 2**30)]
    with cluster(0) as made:
        made.add_node(**NODE | {"num_cpus": 8, "memory": 10 * 2**30})
        with (
            joined(made.address),
            RayWorkers(Meeting(tmp_path, 6), threads=1, gpu="cpu", most=8 * 2**30) as workers,
        ):
            assert dict(hand_out(jobs, workers)) == {job.task: True for job in jobs}


def test_each_worker_has_a_gpu_for_itself_and_none_is_idle(tmp_path):
    """GPUs are what a machine says that it has: none is there. Jobs need other memory, and no worker ends for it."""
    jobs = [Job(f"checkpoint{n % 3}", str(n), cost=n, memory=n * 2**30) for n in range(6)]
    with cluster(0) as made:
        made.add_node(**NODE | {"num_cpus": 8, "num_gpus": 2})
        with (
            joined(made.address),
            RayWorkers(OnGpu(tmp_path), threads=4, gpu="auto", most=2**40) as workers,
        ):
            times = [*dict(hand_out(jobs, workers)).values()]
    assert {gpu for gpu, *_ in times} == {"0", "1"}
    assert len({process for _, process, *_ in times}) == 2
    for used in "01":
        spans = sorted((began, ended) for gpu, _, began, ended in times if gpu == used)
        assert all(ended <= began for (_, ended), (began, _) in itertools.pairwise(spans))


# What each worker gets as it is typed, and what is refused by it or before.
REACHES = ("--dtype=float64", "--stream-blocks")
REFUSED = {
    "--device=cuda": "device: cuda was asked for and no machine of the Ray cluster has a GPU",
    "--kept_mb=1e20": "kept_mb: ",
    "--shard=0/2": "shard: ",
    "--root=/dev/full/x": "/dev/full",
}


def words(run: Path, analyses: Path, root: Path, *options: str) -> list[str]:
    return ["analyze", str(run), "--config", str(analyses), "--root", str(root), "--allow-suspect", *options]


def refusal(code: int, errors: str) -> str:
    (said,) = (line for line in errors.splitlines() if line.startswith("lit-layers analyze: error: "))
    assert (code, "Traceback" in errors) == (2, False), errors
    return said


@pytest.fixture
def left():
    """A command that is refused behind the door of a cluster leaves it as its process ends, which is this one here."""
    import ray

    yield ray.shutdown
    ray.shutdown()


def test_odd_values_of_options_reach_workers_or_are_refused(tmp_path, monkeypatch, capsys, left):
    """What workers measure is what this process measures with the same options."""
    analyses, run = of_texts(tmp_path), tmp_path / "series"
    for step in (0, 1, 2):
        saved_gpt2(run / f"step-{step:09d}", n_layer=step + 1)
    with cluster(1) as made:
        monkeypatch.setenv("RAY_ADDRESS", made.address)
        for number, option in enumerate(REACHES):
            lines = []
            for engine in ("ray", "process"):
                root = tmp_path / engine / str(number) / "run"
                code = main(words(run, analyses, root, option, f"--engine={engine}"))
                assert code == 0, (option, capsys.readouterr().err)
                lines.append(sorted_lines(root))
            assert [line.records for line in lines[0]] == [line.records for line in lines[1]], option
            assert lines[0], option
        for option, said in REFUSED.items():
            code = main(words(run, analyses, tmp_path / "out", "--engine=ray", option))
            assert said in refusal(code, capsys.readouterr().err), option
            left()


def test_an_address_where_no_cluster_answers_is_a_sentence(run, tmp_path, monkeypatch, capsys):
    """Of the command where nobody listens; else of Ray, which asks for 40 s a time."""
    command = words(run, of_texts(tmp_path), tmp_path / "out", "--engine=ray")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    monkeypatch.setattr(ray_workers, "PATIENCE", 1)
    said = refusal(main(command), capsys.readouterr().err)
    assert "engine: no Ray cluster can be had: nobody listens at RAY_ADDRESS=127.0.0.1:9 (" in said
    assert said.endswith("RAY_ADDRESS=local starts one here")
    times = []

    def no_answer(**_: object) -> None:
        times.append(int(os.environ["RAY_NUM_REDIS_GET_RETRIES"]))
        raise ConnectionError("Failed to connect\nto Ray cluster")

    monkeypatch.setattr("ray.init", no_answer)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{silent.getsockname()[1]}")
        said = refusal(main(command), capsys.readouterr().err)
    assert said.endswith("had: Failed to connect to Ray cluster; RAY_ADDRESS=local starts one here")
    assert times == [2]
    assert not (tmp_path / "out" / "measurements.jsonl").exists()


def test_killed_workers_nodes_and_drivers_cost_nothing_but_time(run, alone, tmp_path):
    number, passes, draws = max(KILLS // 5, 3), 0, random.Random(SEED)
    with cluster(2) as made, Killer(made, number, (3, 8)) as killer:
        while killer.killed.total() < number or not passes:
            root = tmp_path / str(passes) / "run"
            driven(
                killer,
                draws,
                (12, 40),
                ["measure", made.address, str(run), str(root)],
            )
            assert sorted_lines(root) == alone
            passes += 1
    sys.stdout.write(f"seed {SEED}: killed {dict(killer.killed)}, {passes} passes of {len(alone)} measurements\n")


def test_random_kills_of_workers_nodes_and_the_driver_lose_and_double_nothing(tmp_path):
    """By work that is light, so that many can be killed: starting is most of it."""
    out, total, draws = tmp_path / "out.jsonl", 0, random.Random(SEED)
    with cluster(2) as made, Killer(made, KILLS, (1, 4)) as killer:
        while killer.killed.total() < KILLS:
            total += 60
            driven(killer, draws, (8, 25), ["square", made.address, str(out), str(total)])
    sys.stdout.write(f"seed {SEED}: killed {dict(killer.killed)}, {total} tasks\n")
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(found) == [[number, number * number] for number in range(total)]
