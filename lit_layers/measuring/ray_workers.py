"""Work over machines: Ray starts the workers, places them and says when one is lost; `hand_out` says who gets what.

No file is shared and nothing is claimed: one process hands the jobs out and has every result. Whatever is under way
when a worker is lost is done again by another one; what is under way when that process ends is lost with it.
"""

import contextlib
import os
import pickle
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from lit_layers.errors import InputError
from lit_layers.identity import code_versions, refuse_other_code

ATTEMPTS = 4  # workers that a job may lose: more than bad luck, it is what ends them
LOOK = 0.5  # seconds between two looks at the clock, while no worker is done
PATIENCE = 10  # seconds in which a cluster that has just been started listens
MOST = 512  # workers that are asked for
OBJECTS = 200 * 2**20  # bytes of a cluster of this machine alone, for what is sent: results are small
PASSED_ON = ("HF_", "LIT_LAYERS_", "OMP_NUM_THREADS", "TOKENIZERS_")  # variables that workers of other machines get
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Job(Generic[T]):
    """`key` names what a worker keeps from one job to the next, such as a loaded checkpoint; `cost` is relative.

    `memory` is in bytes; 0: not known.
    """

    key: str
    task: T
    cost: float = 0.0
    memory: int = 0


class Event(NamedTuple):
    """A worker is ready, has a result, or is lost."""

    worker: int
    result: Any = None
    is_lost: bool = False


class Workers(Protocol):
    """What `hand_out` asks of workers; `memory` is of each, in bytes."""

    memory: dict[int, int]

    def start(self, memory: Sequence[int]) -> None: ...

    def send(self, worker: int, task: Any, following: Any | None) -> None: ...

    def stop(self, worker: int) -> None: ...

    def next_event(self) -> Event | None: ...


def hand_out(
    jobs: Sequence[Job[T]],
    workers: Workers,
    tell: Callable[[int, Sequence[T]], None] = lambda done, under_way: None,
) -> Iterator[tuple[T, Any]]:
    """Yields each task with its result, in the order in which they are done; None where it lost too many workers.

    A worker goes on with what it holds, then with what it was told would follow; else it takes the heaviest job of what
    is no other's, else the heaviest. It has the memory of one of the jobs, and takes those that need no more; where
    none is left, it ends, and another one has its room. With a GPU of its own it takes any.
    `tell` hears how many are done, and what is under way.
    """
    left = sorted(jobs, key=lambda job: -job.cost)
    losses: Counter[Job[T]] = Counter()
    under_way: dict[int, Job[T]] = {}
    held: dict[int, tuple[str, str | None]] = {}  # by each worker, and what it was told would follow
    idle: list[int] = []
    done = 0
    memory = sorted((job.memory for job in jobs), reverse=True)
    workers.start(memory[:: -(-len(memory) // MOST) or 1])  # the largest among them
    tell(done, ())
    while done < len(jobs):
        event = workers.next_event()
        if event is not None:
            job = under_way.pop(event.worker, None)
            if event.is_lost:
                held.pop(event.worker, None)
                idle = [worker for worker in idle if worker != event.worker]
                workers.start([workers.memory[event.worker]])
                if job is not None:
                    losses[job] += 1
                    if losses[job] < ATTEMPTS:
                        left.insert(0, job)
                        job = None
            else:
                idle.append(event.worker)
            if job is not None:
                done += 1
                yield job.task, event.result
        while idle and left:
            worker = idle.pop(0)
            fitting = [each for each in left if each.memory <= workers.memory[worker]]
            if not fitting:
                held.pop(worker, None)
                workers.stop(worker)
                continue
            job = _choice(fitting, worker, held)
            left.remove(job)
            rest = [each for each in fitting if each.key != job.key]
            held[worker] = job.key, None
            following = _choice(rest, worker, held) if rest else None
            held[worker] = job.key, None if following is None else following.key
            under_way[worker] = job
            workers.send(worker, job.task, None if following is None else following.task)
        tell(done, [job.task for job in under_way.values()])


def _choice(left: Sequence[Job[T]], worker: int, held: dict[int, tuple[str, str | None]]) -> Job[T]:
    """Which of the jobs, the heaviest first, a worker takes."""
    mine, following = held.get(worker, (None, None))
    taken = {key for other, keys in held.items() if other != worker for key in keys}
    for fits in (lambda key: key == mine, lambda key: key == following, lambda key: key not in taken):
        for job in left:
            if fits(job.key):
                return job
    return left[0]


class RayWorkers:
    """Workers of the Ray cluster that RAY_ADDRESS names or that runs on this machine; else of this machine alone.

    Args:
        carried: what each worker gets: called with a task and the one that follows.
        threads: CPUs that a worker computes with; with a GPU one.
        gpu: cuda, cpu, or auto: a GPU each where the cluster has any.
        most: bytes of memory that some worker needs; 0: not known.

    Raises:
        InputError: Ray is not installed, or no cluster can be had, or none of its machines has so much memory.
    """

    def __init__(self, carried: Any, *, threads: int, gpu: str, most: int = 0) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nobody is told what is computed here
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "2")  # 20 minutes of silence where no cluster answers, else
        try:
            import ray
        except ImportError as error:
            raise InputError("engine: ray is not installed: pip install 'lit_layers[ray]'") from error
        self.ray: Any = ray
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            self._join()
        self._options = self._resources(threads, gpu, most)
        self._carried = ray.put(self.ray.cloudpickle.dumps(carried))
        self.memory: dict[int, int] = {}  # of each worker, in bytes; with a GPU without limit
        self._places: dict[int, Any] = {}  # of each worker that asked for memory
        self._actors: dict[int, Any] = {}
        self._expected: dict[Any, int] = {}  # references to results: which worker's
        self._starting: set[int] = set()
        self._number = self._lost_in_a_row = 0

    def _refuse_cluster_of_another_user(self) -> None:
        """Whoever may write to /tmp can say there which cluster this machine has, and what its workers send back is
        unpickled, which runs what it says.
        """
        if os.environ.get("RAY_ADDRESS") or not hasattr(os, "getuid"):
            return
        file = self.ray._common.utils.get_ray_address_file(None)
        with contextlib.suppress(FileNotFoundError):
            if (owner := os.lstat(file).st_uid) not in (os.getuid(), 0):
                raise InputError(
                    f"engine: {file}, which names the Ray cluster of this machine, is of another user ({owner}), whose "
                    "workers could run anything here: name the cluster in RAY_ADDRESS, or say RAY_ADDRESS=local"
                )

    def _join(self) -> None:
        self._refuse_cluster_of_another_user()
        environment = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
        secret = {name for name in environment if "TOKEN" in name and not name.startswith("TOKENIZERS_")}
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        # Else the working directory comes first on the workers' import path, and a downloaded folder's numpy.py runs.
        options["job_config"] = self.ray.job_config.JobConfig(_client_job=True)
        options["runtime_env"] = {"env_vars": {n: value for n, value in environment.items() if n not in secret}}
        of_this_machine: dict[str, Any] = {"include_dashboard": False, "object_store_memory": OBJECTS}
        _await_answer(os.environ.get("RAY_ADDRESS", ""))
        try:
            try:
                self.ray.init(**of_this_machine, **options)
            except ValueError as error:
                if "existing cluster" not in str(error):
                    raise
                self.ray.init(**options)
        except (ConnectionError, RuntimeError, ValueError) as error:
            why = " ".join(str(error).split())[:300]
            raise InputError(f"engine: no Ray cluster can be had: {why}; RAY_ADDRESS=local starts one here") from error

    def _resources(self, threads: int, gpu: str, memory: int) -> dict[str, Any]:
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]

        def most(name: str) -> float:
            return max((node.get(name, 0) for node in nodes), default=0)

        if gpu == "cuda" and not most("GPU"):
            raise InputError("device: cuda was asked for and no machine of the Ray cluster has a GPU: use cpu or auto")
        if gpu != "cpu" and most("GPU"):  # device memory is not among Ray's resources: a GPU each
            return {"num_cpus": 1, "num_gpus": 1}
        if memory > most("memory"):
            raise InputError(
                f"engine: a worker needs {memory / 2**30:.1f} GiB of memory, and no machine of the Ray cluster has "
                f"more than {most('memory') / 2**30:.1f} GiB for it: ask for fewer or shorter texts, or --stream-blocks"
            )
        return {"num_cpus": min(threads, int(most("CPU"))) or 1}

    @property
    def description(self) -> str:
        """How many workers are there."""
        number = len(self._actors) - len(self._starting)
        return f"{number} worker{'' if number == 1 else 's'}" if number else "waiting for workers"

    def start(self, memory: Sequence[int]) -> None:
        """Asks for a worker more with each of these bytes of memory: each says that it is ready, sooner or later."""
        remote = self.ray.remote(max_restarts=0, max_task_retries=0, **self._options)(_Host)
        has_gpu = "num_gpus" in self._options
        for each in memory:
            self._number += 1
            self.memory[self._number] = sys.maxsize if has_gpu else each  # any GPU may hold any job: none ends for less
            where = self._placed(each) if each and not has_gpu else {}
            known = [*sys.path], code_versions(), self._carried
            actor = self._actors[self._number] = remote.options(**where).remote(*known)
            self._starting.add(self._number)
            self._expected[actor.ready.remote()] = self._number

    def send(self, worker: int, task: Any, following: Any | None) -> None:
        self._expected[self._actors[worker].do.remote(task, following)] = worker

    def stop(self, worker: int) -> None:
        """Ends a worker that has nothing to do."""
        self.ray.kill(self._actors.pop(worker))
        self._give_back(worker)

    def _placed(self, memory: int) -> dict[str, Any]:
        """A place for the next worker: Ray finds them in the order in which they are asked for, as it does not with
        workers, of which small ones would fill a machine before a large one comes.
        """
        group = self.ray.util.placement_group([{"CPU": self._options["num_cpus"], "memory": memory}])
        self._places[self._number] = group
        strategy = self.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group)
        return {"memory": memory, "scheduling_strategy": strategy}

    def _give_back(self, worker: int) -> None:
        if (group := self._places.pop(worker, None)) is not None:
            with contextlib.suppress(Exception):  # of a machine that is out of reach
                self.ray.util.remove_placement_group(group)

    def next_event(self) -> Event | None:
        """Waits for one, for a moment.

        Raises:
            InputError: workers cannot be started, or have another version of the package or of a library.
        """
        ready, _ = self.ray.wait([*self._expected], num_returns=1, timeout=LOOK)
        if not ready:
            return None
        worker = self._expected.pop(ready[0])
        errors = self.ray.exceptions
        try:
            result = self.ray.get(ready[0])
        except errors.RayTaskError:  # a fault of ours: it would come again
            raise
        except errors.RayError as error:
            return self._lost(worker, error)
        self._lost_in_a_row = 0
        if worker in self._starting:
            self._starting.discard(worker)
            refuse_other_code(result, "engine: a worker")
            result = None
        return Event(worker, result)

    def _lost(self, worker: int, error: Exception) -> Event:
        with contextlib.suppress(Exception):  # it may be out of reach, and come back
            self.ray.kill(self._actors[worker])
        self._give_back(worker)
        self._starting.discard(worker)
        del self._actors[worker]
        self._lost_in_a_row += 1
        # A machine takes all of its workers with it, which says nothing of the others.
        if self._lost_in_a_row > 10 * ATTEMPTS + 2 * len(self._actors) or getattr(error, "actor_init_failed", False):
            why = " ".join(str(error).split())[:300]
            raise InputError(f"engine: workers cannot be started: {why}") from error
        time.sleep(0.1)
        return Event(worker, is_lost=True)

    def __enter__(self) -> "RayWorkers":
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the workers, and the cluster where it is of this process alone."""
        for actor in self._actors.values():
            with contextlib.suppress(Exception):
                self.ray.kill(actor)
        for worker in [*self._places]:
            self._give_back(worker)
        if self._is_ours:
            self.ray.shutdown()


def _await_answer(address: str) -> None:
    """Ray itself is silent for a minute and a half where nobody listens at HOST:PORT; other addresses are left to it.

    Raises:
        InputError: nobody did for some seconds.
    """
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or "/" in host:
        return
    until = time.monotonic() + PATIENCE
    while True:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=PATIENCE):
                return
        except (OSError, OverflowError) as error:  # no such host, port, or answer
            if time.monotonic() >= until:
                raise InputError(
                    f"engine: no Ray cluster can be had: nobody listens at RAY_ADDRESS={address} ({error}); "
                    "RAY_ADDRESS=local starts one here"
                ) from error
        time.sleep(LOOK)


class _Host:
    """The process of a worker, which finds modules where this one does: a folder of --code after all others."""

    def __init__(self, path: list[str], computes: Mapping[str, str], carried: bytes) -> None:
        sys.path += [folder for folder in path if folder not in sys.path]
        if code_versions() == computes:  # else it is of other classes, and refused
            self.carried = pickle.loads(carried)  # from the process that started this one

    def ready(self) -> Mapping[str, str]:
        """Answers once the worker has started: what it computes by."""
        return code_versions()

    def do(self, task: Any, following: Any | None) -> Any:
        return self.carried(task, following)
