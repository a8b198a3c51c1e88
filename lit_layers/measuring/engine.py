"""Run a function on a Ray cluster, once per checkpoint of a series. The calling process writes the results.

Ray repeats a task if its worker or machine is lost. If the calling process ends, the pending tasks are lost.
"""

import contextlib
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from lit_layers.errors import InputError
from lit_layers.identity import refuse_other_versions, versions

RETRIES = 3  # times that a task is repeated if its worker is lost
# Environment variables that workers get from this process; secrets are not among them.
FORWARDED = r"HF_(?!.*TOKEN)|LIT_LAYERS_|OMP_NUM_THREADS|TOKENIZERS_"

# What a worker is sent about the calling process: import path, versions of the code, number of threads.
_Sender = tuple[Sequence[str], Mapping[str, str], int]


def on_ray(
    task: Callable[..., Any], calls: Mapping[str, Sequence[Any]], device: str, progress: Callable[[int, int, str], None]
) -> Iterator[tuple[str, Any]]:
    """Run `task(name, *arguments)` on Ray for each entry of `calls` (name -> arguments).

    Yields each name with its result, in the order in which the tasks finish. If a task raises an InputError, the error
    is yielded instead of a result.

    Raises:
        InputError: if Ray or its cluster is missing, or a machine has other versions of the code.
    """
    if not calls:
        return
    with cluster() as ray:
        pickled = ray.put(ray.cloudpickle.dumps(task))
        sender = [*sys.path], versions(), torch.get_num_threads()
        remote = ray.remote(max_retries=RETRIES, **_resources(ray, device))(_worker_call)
        pending = {remote.remote(pickled, sender, name, *arguments): name for name, arguments in calls.items()}
        try:
            while pending:
                progress(len(calls) - len(pending), len(calls), "measuring on Ray")
                done, _ = ray.wait([*pending], num_returns=1, timeout=1)
                for each in done:
                    yield pending.pop(each), _reply(ray, each)
        finally:
            for each in pending:
                ray.cancel(each, force=True)
    progress(len(calls), len(calls), "")


def _reply(ray: Any, task: Any) -> Any:
    try:
        reply, code = ray.get(task)
    except ray.exceptions.RayTaskError:  # the task itself raised it, so that it would occur again on any worker
        raise
    except ray.exceptions.RayError as error:
        why = f"{RETRIES + 1} workers were lost that measured it; it may need more memory than they have"
        return InputError(f"{why}: {' '.join(str(error).split())[:300]}")
    refuse_other_versions(code, "engine: a worker")
    return reply


def _worker_call(pickled: bytes, sender: _Sender, *arguments: Any) -> tuple[Any, Mapping[str, str]]:
    """Run a pickled task in a Ray worker; return its result (or InputError) and the versions of the worker's code.

    If these versions differ from those of the calling process (`sender`), the task does not run.
    """
    path, code, threads = sender
    sys.path += [each for each in path if each not in sys.path]  # at the end, so that modules of --code hide no others
    if versions() != code:  # do not run a task that was pickled by another version of the code
        return None, versions()
    torch.set_num_threads(threads)  # as in the sending process, so that sums are rounded equally
    try:
        return pickle.loads(pickled)(*arguments), code  # safe, as the process that started this worker sent it
    except InputError as error:
        return error, code


@contextlib.contextmanager
def cluster() -> Iterator[Any]:
    """Connect to the Ray cluster that RAY_ADDRESS names or that runs on this machine; yield the module `ray`.

    If RAY_ADDRESS names no cluster and none runs here, a local cluster runs until the context ends.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "2")  # fail soon if no cluster answers, not after 20 minutes
    try:
        import ray
        from ray.job_config import JobConfig
    except ImportError as error:
        raise InputError("engine: ray is not installed: pip install 'lit_layers[ray]'") from error
    if is_ours := not ray.is_initialized():
        _refuse_cluster_of_another_user(ray)
        passed = {name: value for name, value in os.environ.items() if re.match(FORWARDED, name)}
        # With `_client_job`, Ray does not put the working directory first on the import path, where a numpy.py in it
        # would run instead of NumPy.
        job = JobConfig(_client_job=True)
        quiet: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
        try:
            ray.init(job_config=job, runtime_env={"env_vars": passed}, **quiet)
        except (ConnectionError, RuntimeError, ValueError) as error:
            why = " ".join(str(error).split())[:300]
            raise InputError(f"engine: no Ray cluster can be had: {why}; RAY_ADDRESS=local starts one here") from error
    try:
        yield ray
    finally:
        if is_ours:
            ray.shutdown()


def _refuse_cluster_of_another_user(ray: Any) -> None:
    """Refuse a cluster that another user announced in /tmp.

    The results of its workers would be unpickled in this process, so they could run code here.
    """
    if os.environ.get("RAY_ADDRESS") or not hasattr(os, "getuid"):
        return
    file = ray._common.utils.get_ray_address_file(None)
    if os.path.lexists(file) and (owner := os.lstat(file).st_uid) not in (os.getuid(), 0):
        why = f"which names a Ray cluster, is of another user ({owner}), whose workers could run anything here"
        raise InputError(f"engine: {file}, {why}: name the cluster in RAY_ADDRESS, or say RAY_ADDRESS=local")


def _largest(ray: Any, resource: str) -> float:
    return max((node["Resources"].get(resource, 0) for node in ray.nodes() if node["Alive"]), default=0)


def _resources(ray: Any, device: str) -> dict[str, int]:
    """Return the resources that each task requests from Ray.

    If `device` allows a GPU and the cluster has one, a task requests one GPU and one CPU. Otherwise it requests as many
    CPUs as this process has threads, and no more than the largest machine has.
    """
    if device == "cuda" and not _largest(ray, "GPU"):
        raise InputError("device: cuda was asked for and no machine of the Ray cluster has a GPU: use cpu or auto")
    if device != "cpu" and _largest(ray, "GPU"):
        return {"num_cpus": 1, "num_gpus": 1}
    return {"num_cpus": min(torch.get_num_threads(), int(_largest(ray, "CPU"))) or 1}
