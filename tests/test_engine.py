"""Who gets which job next, whatever workers are lost, and the tasks of a series on workers that are pretended."""

import math
import pickle
import random
import re
import shutil
import sys
from collections import deque

import pytest

from lit_layers import identity
from lit_layers.analyses import Trajectory
from lit_layers.cli.main import main
from lit_layers.errors import InputError
from lit_layers.measuring import one_checkpoint, ray_workers
from lit_layers.measuring.offline import analyze_series
from lit_layers.measuring.ray_workers import ATTEMPTS, Event, Job, hand_out
from lit_layers.models.saved import load
from lit_layers.series import HubRevisions, OneModel, StepFolders
from tests.support.every_analysis import of_images, of_prompts, of_text, prompts, save_inputs
from tests.support.measured_series import of_texts, sorted_lines, trained, two_groups
from tests.support.random_text import RandomText
from tests.support.series_hub import make_series, served, template


class Pretended:
    """Workers in this process: `limit` at a time, each ends its job before the next event; `loses` says which die."""

    def __init__(self, work=lambda task, following: task, *, limit: int = 2, loses=lambda worker, task: False) -> None:
        self.work, self.limit, self.loses = work, limit, loses
        self.waiting, self.ready, self.running, self.sent = deque(), deque(), deque(), []
        self.alive, self.number, self.memory, self.asked = set(), 0, {}, []

    def start(self, memory) -> None:
        self.waiting.extend(memory)
        self.asked.extend(memory)

    def stop(self, worker) -> None:
        self.alive.remove(worker)

    def send(self, worker, task, following) -> None:
        assert worker in self.alive
        assert worker not in [each for each, *_ in self.running]
        self.sent.append((worker, task, following))
        self.running.append((worker, task, following))

    def next_event(self) -> Event | None:
        if self.waiting and len(self.alive) < self.limit:
            self.number += 1
            self.alive.add(self.number)
            self.memory[self.number] = self.waiting.popleft()
            return Event(self.number)
        if not self.running:
            return None
        worker, task, following = self.running.popleft()
        if self.loses(worker, task):
            self.alive.remove(worker)
            return Event(worker, is_lost=True)
        return Event(worker, self.work(task, following))


def jobs(*tasks: str) -> list[Job[str]]:
    """Of `a1`, `a2`, `b1`: by their letter what is kept, by their place how heavy."""
    return [Job(task[0], task, cost=-number) for number, task in enumerate(tasks)]


def test_the_heaviest_job_is_first_and_a_worker_goes_on_with_what_it_holds():
    workers = Pretended(limit=1)
    done = [task for task, _ in hand_out([Job("a", "a1", 1), Job("b", "b1", 5), Job("a", "a2", 3)], workers)]
    assert done == ["b1", "a2", "a1"]
    workers = Pretended(limit=1)
    assert [task for task, _ in hand_out(jobs("a1", "b1", "a2", "b2"), workers)] == ["a1", "a2", "b1", "b2"]


def test_two_workers_hold_two_things_and_help_each_other_at_the_end():
    workers = Pretended(limit=2)
    list(hand_out(jobs("a1", "b1", "a2", "a3", "a4", "c1"), workers))
    assert [(worker, task) for worker, task, _ in workers.sent] == [
        *((1, "a1"), (2, "c1"), (1, "a2"), (2, "b1")),
        *((1, "a3"), (2, "a4")),
    ]


def test_what_follows_is_of_another_thing_and_kept_for_the_worker_that_was_told():
    workers = Pretended(limit=2)
    list(hand_out(jobs("a1", "b1", "c1", "d1", "a2"), workers))
    assert workers.sent == [(1, "a1", "b1"), (2, "c1", "d1"), (1, "a2", "b1"), (2, "d1", "b1"), (1, "b1", None)]


def test_every_result_comes_once_whatever_workers_are_lost():
    draws = random.Random(0)
    for _ in range(200):
        workers = Pretended(limit=draws.randint(1, 8), loses=lambda *_: draws.random() < 0.3)
        tasks = [f"{key}{number}" for key in "abcde" for number in range(draws.randint(1, 4))]
        found = list(hand_out(jobs(*tasks), workers))
        assert sorted(task for task, _ in found) == sorted(tasks)
        assert all(result in (task, None) for task, result in found)


def test_a_job_that_ends_each_of_its_workers_is_given_up_and_the_others_are_done():
    workers = Pretended(limit=2, loses=lambda worker, task: task == "b1")
    found = dict(hand_out(jobs("a1", "b1", "c1"), workers))
    assert found == {"a1": "a1", "b1": None, "c1": "c1"}
    assert [task for _, task, _ in workers.sent].count("b1") == ATTEMPTS


class Machine(Pretended):
    """Workers that have as much memory between them as there is, the first that fits first."""

    def __init__(self, room: int, **options) -> None:
        super().__init__(**options)
        self.room, self.most = room, 0

    def next_event(self) -> Event | None:
        free = self.room - sum(self.memory[each] for each in self.alive)
        if fitting := [each for each in self.waiting if each <= free]:
            self.waiting.remove(fitting[0])
            self.waiting.appendleft(fitting[0])
            self.limit = len(self.alive) + 1
        else:
            self.limit = 0
        self.most = max(self.most, len(self.running))
        return super().next_event()


def test_small_jobs_are_not_held_back_by_the_memory_of_a_large_one():
    large, small = Job("a", "large", 100, memory=8), [Job("b", f"small{n}", 1, memory=1) for n in range(12)]
    machine = Machine(10)
    found = [task for task, _ in hand_out([*small, large], machine)]
    assert sorted(found) == sorted(["large", *(job.task for job in small)])
    assert machine.most == 3, "the large one and two small ones at a time"
    needed = {job.task: job.memory for job in [*small, large]}
    assert all(machine.memory[worker] >= needed[task] for worker, task, _ in machine.sent)


def test_a_worker_that_is_too_small_for_what_is_left_makes_room():
    """The large job's worker is lost, and small ones have its room by then."""
    machine = Machine(10, loses=lambda worker, task: task == "large" and worker == 1)
    jobs = [Job("a", "large", 100, memory=8), *(Job("b", f"small{n}", 1, memory=3) for n in range(8))]
    assert dict(hand_out(jobs, machine)) == {job.task: job.task for job in jobs}


def test_every_job_is_done_whatever_memory_each_needs_and_whatever_workers_are_lost():
    draws = random.Random(1)
    for _ in range(200):
        jobs = [
            Job(draws.choice("abc"), str(n), draws.random(), draws.randint(0, 9)) for n in range(draws.randint(1, 30))
        ]
        machine = Machine(draws.randint(9, 30), loses=lambda *_: draws.random() < 0.1)
        assert sorted(task for task, _ in hand_out(jobs, machine)) == sorted(job.task for job in jobs)
        needed = {job.task: job.memory for job in jobs}
        assert all(machine.memory[worker] >= needed[task] for worker, task, _ in machine.sent)


def test_of_more_jobs_than_workers_are_asked_for_the_most_demanding_has_one(monkeypatch):
    monkeypatch.setattr(ray_workers, "MOST", 5)
    jobs = [Job("a", str(n), 1, memory=n) for n in range(23)]
    machine = Machine(100)
    assert len([*hand_out(jobs, machine)]) == 23
    assert len(machine.memory) <= 5


def test_progress_counts_what_is_done_and_names_what_is_under_way():
    heard = []
    list(hand_out(jobs("a1", "b1"), Pretended(limit=2), lambda done, under_way: heard.append((done, [*under_way]))))
    assert heard[0] == (0, [])
    assert (0, ["a1", "b1"]) in heard
    assert heard[-1] == (2, [])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture
def pretended(monkeypatch):
    """Workers as Ray would have them, but in this process: what they get and give is pickled."""
    made = []

    class Here(Pretended):
        description = "2 workers"

        def __init__(self, carried, *, threads: int, gpu: str, most: int) -> None:
            content, copies = pickle.dumps(carried), {}

            def work(task, following):
                worker = copies.setdefault(self.running_on, pickle.loads(content))
                return pickle.loads(pickle.dumps(worker(*pickle.loads(pickle.dumps((task, following))))))

            super().__init__(work)
            made.append(self)

        def next_event(self):
            self.running_on = self.running[0][0] if self.running else None
            return super().next_event()

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(ray_workers, "RayWorkers", Here)
    return made


def test_the_record_is_that_of_one_process(run, tmp_path, pretended):
    alone = analyze_series(StepFolders(run), two_groups(), root=tmp_path / "alone" / "run")
    carried = analyze_series(StepFolders(run), two_groups(), root=tmp_path / "carried" / "run", engine="ray")
    assert sorted_lines(tmp_path / "carried" / "run") == sorted_lines(tmp_path / "alone" / "run")
    assert (carried.num_known, carried.failures, len(carried.measurements)) == (0, [], 9)
    assert (carried.settings, carried.audit) == (alone.settings, alone.audit)
    (workers,) = pretended
    assert sorted(task.analyses for _, task, _ in workers.sent) == [("other",)] * 3 + [("trajectory", "coupling")] * 3
    assert min(workers.memory.values()) > one_checkpoint.OF_A_PROCESS


def test_a_worker_of_another_version_says_so_before_it_reads_what_it_is_sent():
    """What is sent names classes of the version that sent it."""
    here = identity.code_versions()
    host = ray_workers._Host([], {**here, "torch": "1.0"}, b"no pickle")
    assert host.ready() == here
    assert set(here) >= {"lit_layers", "torch", "transformers"}
    for name, version in (("transformers", "99.1.0"), ("lit_layers", "0.2.0 (code 01234567)")):
        with pytest.raises(InputError, match=rf"^engine: a worker has {re.escape(f'{name} {version}')}, and this comm"):
            identity.refuse_other_code({**here, name: version}, "engine: a worker")
    identity.refuse_other_code(here, "engine: a worker")


def test_each_task_asks_for_its_own_memory_and_one_that_nobody_knows_for_the_most(
    run, tmp_path, pretended, monkeypatch
):
    held = {"light": (1.0, 4000.0), "heavy": (2.0, 80000.0), "unknown": (math.inf, 0.0)}
    monkeypatch.setattr(one_checkpoint, "counted", lambda model, analyses: held[analyses[0].name])
    monkeypatch.setattr(one_checkpoint, "OF_A_PROCESS", 0)
    monkeypatch.setattr(one_checkpoint, "STEP", 1)
    analyses = [Trajectory(batches=RandomText(n + 1), name=name) for n, name in enumerate(held)]
    analyze_series(StepFolders(run, steps=[0]), analyses, root=tmp_path / "run", engine="ray", kept_mb=0)
    (workers,) = pretended
    weights = sum(tensor.nbytes for tensor in load(run / "step-000000000").parameters())
    assert workers.asked == [1.25 * (80000 + weights)] * 2 + [1.25 * (4000 + weights)]


def test_what_is_done_is_not_carried_again(run, tmp_path, pretended):
    root = tmp_path / "run"
    analyze_series(StepFolders(run), two_groups()[:2], root=root)
    again = analyze_series(StepFolders(run), two_groups(), root=root, engine="ray")
    assert sorted((each.step, each.analysis) for each in again.measurements) == [
        (step, "coupling") for step in (0, 2, 4)
    ]
    assert again.num_known == 6
    assert analyze_series(StepFolders(run), two_groups(), root=root, engine="ray").num_known == 9
    assert len(pretended) == 1


def test_a_checkpoint_that_cannot_be_loaded_is_named_once_and_the_others_are_measured(run, tmp_path, pretended):
    series = tmp_path / "series"
    shutil.copytree(run, series)
    (series / "step-000000002" / "config.json").write_text('{"model_type": "gpt2",')
    result = analyze_series(StepFolders(series), two_groups(), root=tmp_path / "out", engine="ray")
    assert {each.step for each in sorted_lines(tmp_path / "out")} == {0, 4}
    (sentence,) = result.failures
    assert "step-000000002 cannot be loaded" in sentence


def test_one_process_hands_out_so_there_are_no_shards(run, tmp_path):
    with pytest.raises(InputError, match="shard: with engine ray one process hands out all, and 0/2 was given"):
        analyze_series(StepFolders(run), two_groups(), root=tmp_path / "out", shard=(0, 2), engine="ray")


def test_without_ray_it_says_what_to_install(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"engine: ray is not installed: pip install 'lit_layers\[ray\]'"):
        analyze_series(StepFolders(run), two_groups(), root=tmp_path / "out", engine="ray")


def test_a_task_that_loses_all_its_workers_is_a_failure_with_a_reason(run, tmp_path, pretended, monkeypatch):
    monkeypatch.setattr(Pretended, "next_event", losing(Pretended.next_event, "step-000000002"))
    result = analyze_series(StepFolders(run), two_groups(), root=tmp_path / "out", engine="ray")
    assert {each.step for each in sorted_lines(tmp_path / "out")} == {0, 4}
    assert [sentence[:15] for sentence in result.failures] == ["step-000000002:"] * 2
    assert "workers were lost" in result.failures[0]


def losing(next_event, name: str):
    def changed(self):
        self.loses = lambda worker, task: task.checkpoint == name
        return next_event(self)

    return changed


def test_values_of_prompts_come_with_the_measurements(run, tmp_path, pretended):
    for place, how in (("alone", "process"), ("carried", "ray")):
        analyze_series(StepFolders(run), two_groups(), root=tmp_path / place / "run", engine=how)
    alone, carried = (
        {path.relative_to(tmp_path / place): path for path in (tmp_path / place).rglob("*.parquet")}
        for place in ("alone", "carried")
    )
    assert len(alone) > 3
    assert {name: path.read_bytes() for name, path in carried.items()} == {
        name: path.read_bytes() for name, path in alone.items()
    }


def test_one_model_is_divided_by_its_analyses_whole_and_block_by_block(run, tmp_path, pretended):
    for how in ("process", "ray"):
        model = OneModel(run / "step-000000004")
        analyze_series(model, two_groups(), root=tmp_path / how / "run", engine=how)
        analyze_series(model, two_groups(), root=tmp_path / how / "streamed", engine=how, stream_blocks=True)
    for name in ("run", "streamed"):
        assert sorted_lines(tmp_path / "ray" / name) == sorted_lines(tmp_path / "process" / name)
    assert [len(workers.sent) for workers in pretended] == [2, 1]


@pytest.mark.soak
def test_a_series_of_the_hub_is_fetched_by_the_workers_and_judged_by_what_they_read(tmp_path, monkeypatch, pretended):
    make_series(template(tmp_path / "model"), tmp_path / "hub" / "lab" / "tiny", (0, 1, 2, 4))
    results = {}
    for how in ("process", "ray"):
        with served(tmp_path / "hub", tmp_path / how / "cache", monkeypatch):
            series, root = HubRevisions("lab/tiny"), tmp_path / how / "run"
            results[how] = analyze_series(series, two_groups(), root=root, engine=how, keep_downloads=False)
        assert not [path for path in (tmp_path / how / "cache").rglob("*.safetensors") if path.exists()]
    assert sorted_lines(tmp_path / "ray" / "run") == sorted_lines(tmp_path / "process" / "run")
    assert results["ray"].audit == results["process"].audit
    assert results["ray"].audit.level == "weights"


def test_every_analysis_can_be_sent_to_a_worker(tmp_path):
    analyses = [*of_prompts(prompts()), *of_images(), *of_text(save_inputs(tmp_path / "inputs"))]
    assert len(analyses) > 40
    for one in analyses:
        there = pickle.loads(pickle.dumps(one))
        assert (there.name, there.config_hash(), there.data_hash()) == (one.name, one.config_hash(), one.data_hash())


def test_the_option_is_one_of_the_commands_that_measure(tmp_path, pretended, capsys):
    run = make_series(template(tmp_path / "model", vocab_size=300), tmp_path / "run", (0, 4), name="step-{:09d}")
    shutil.rmtree(run / "main")
    recipe_of_texts = of_texts(tmp_path)
    command = ["analyze", str(run), "--steps", "[0, 4]", "--config", str(recipe_of_texts)]
    recipe = tmp_path / "engine.yaml"
    recipe.write_text("engine: ray\n")
    assert main([*command, "--root", str(tmp_path / "out" / "run"), "--config", str(recipe)]) == 0
    assert "2 measured" in capsys.readouterr().out
    assert main([*command, "--root", str(tmp_path / "alone" / "run")]) == 0
    assert sorted_lines(tmp_path / "out" / "run") == sorted_lines(tmp_path / "alone" / "run")
    assert len(pretended) == 1
