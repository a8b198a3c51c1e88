"""Measure the checkpoints of a series on a Ray cluster: a task per checkpoint, whose results this process writes.

Ray repeats a task if it loses the worker or the machine. If this process ends, the tasks under way are lost with it.
"""

import contextlib
import copy
import functools
import os
import pickle
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lit_layers.analyses.base import Analysis
from lit_layers.errors import InputError
from lit_layers.identity import code_versions, refuse_other_code
from lit_layers.measuring.one_checkpoint import Measurer, Tell, device_of, silent
from lit_layers.models.saved import outline
from lit_layers.records import Measurement, UnwrittenStore
from lit_layers.series import Checkpoint
from lit_layers.series.auditing import read_weights
from lit_layers.series.checkpoint import fetched_ahead
from lit_layers.series.weight_files import Fingerprint

RETRIES = 3  # of a task that loses its worker
OF_A_PROCESS = 2**30  # bytes of torch and the other libraries
COPIES = 3  # of the weights: a checkpoint, and what analyses hold beside it
PASSED_ON = r"HF_(?!.*TOKEN)|LIT_LAYERS_|OMP_NUM_THREADS|TOKENIZERS_"  # variables for workers, without secrets


_Sender = tuple[Sequence[str], Mapping[str, str], int]  # import path, versions of the code, number of threads


@dataclass(frozen=True)
class Outcome:
    """The measurements of a task, or its failure; `weights` are read for the audit; `code`: the worker's versions."""

    measurements: tuple[Measurement, ...] = ()
    failure: InputError | None = None
    weights: Fingerprint | None = None
    code: Mapping[str, str] | None = None


def measured_on_ray(
    measurer: Measurer, due: Sequence[tuple[Checkpoint, Sequence[Analysis]]], tell: Tell, unread: set[str]
) -> Iterator[tuple[Checkpoint, Outcome]]:
    """Yield each checkpoint with its outcome, in the order in which they end.

    Args:
        unread: the names of the checkpoints whose weights the audit needs.

    Raises:
        InputError: Ray or its cluster is missing, a machine is too small or has other versions of the code.
    """
    if not due:
        return
    with cluster() as ray:
        earlier = copy.copy(measurer.earlier)
        earlier.store = UnwrittenStore(earlier.store.path, [])
        carried = ray.put(ray.cloudpickle.dumps(replace(measurer, earlier=earlier, tell=silent, fitting=set())))
        sender = [*sys.path], code_versions(), torch.get_num_threads()
        resources = _resources(ray, measurer.options.device)
        remote = ray.remote(max_retries=RETRIES, **resources)(_measured_by_worker)
        pending: dict[Any, Checkpoint] = {}
        for checkpoint, analyses in due:
            room = {} if "num_gpus" in resources else {"memory": _memory(ray, measurer, checkpoint)}
            of_run = [each for each in measurer.earlier.store if each.run == measurer.earlier.run_of(checkpoint)]
            known = [each for each in of_run if each.step == checkpoint.step or measurer.series.is_alone]
            what = [each.name for each in analyses], known, checkpoint.name in unread
            pending[remote.options(**room).remote(carried, sender, checkpoint.name, *what)] = checkpoint
        try:
            while pending:
                tell(len(due) - len(pending), len(due), "measuring on Ray")
                done, _ = ray.wait([*pending], num_returns=1, timeout=1)
                for task in done:
                    yield pending.pop(task), _outcome(ray, task)
        finally:
            for task in pending:
                ray.cancel(task, force=True)
    tell(len(due), len(due), "")


def _outcome(ray: Any, task: Any) -> Outcome:
    try:
        outcome: Outcome = ray.get(task)
    except ray.exceptions.RayTaskError:  # a fault of ours: it would come again
        raise
    except ray.exceptions.RayError as error:
        why = f"{RETRIES + 1} workers were lost that measured it; it may need more memory than they have"
        return Outcome(failure=InputError(f"{why}: {' '.join(str(error).split())[:300]}"))
    refuse_other_code(outcome.code or {}, "engine: a worker")
    return outcome


def _measured_by_worker(
    carried: bytes, where: _Sender, name: str, analyses: Sequence[str], known: Sequence[Measurement], is_unread: bool
) -> Outcome:
    """Measure one checkpoint in a worker of Ray, and write nothing."""
    path, code, threads = where
    sys.path += [each for each in path if each not in sys.path]  # after all others: modules of --code
    if code_versions() != code:  # what was sent is of other classes
        return Outcome(code=code_versions())
    measurer = _unpickled(carried)
    checkpoint = next(one for one in measurer.series.checkpoints if one.name == name)
    try:
        torch.set_num_threads(threads)  # as in the process that writes, so that sums are rounded alike
        measurer.device = device_of(measurer.options.device)
        measurer.earlier.store = UnwrittenStore(measurer.earlier.store.path, known)
        mine = [one for one in measurer.analyses[name] if one.name in analyses]
        _, fetched = next(_held := fetched_ahead([checkpoint]))  # a download stops if nothing holds it
        measured = measurer.measure(checkpoint, fetched, mine)
        return Outcome(tuple(measured), weights=read_weights(checkpoint) if is_unread else None, code=code)
    except InputError as error:
        return Outcome(failure=error, code=code)
    finally:
        measurer.release()
        if checkpoint.source.is_copied or not measurer.options.keep_downloads:
            checkpoint.source.drop()


@functools.lru_cache(maxsize=1)
def _unpickled(carried: bytes) -> Measurer:
    return pickle.loads(carried)  # from the process that started this one


@contextlib.contextmanager
def cluster() -> Iterator[Any]:
    """Join the cluster that RAY_ADDRESS names or that runs on this machine, or start one for as long as this lasts."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "2")  # else 20 minutes of silence if no cluster answers
    try:
        import ray
        from ray.job_config import JobConfig
    except ImportError as error:
        raise InputError("engine: ray is not installed: pip install 'lit_layers[ray]'") from error
    if is_ours := not ray.is_initialized():
        _refuse_cluster_of_another_user(ray)
        passed = {name: value for name, value in os.environ.items() if re.match(PASSED_ON, name)}
        # Without _client_job the working directory comes first on the import path, and a numpy.py in it would run.
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
    """Refuse a cluster that another user announced in /tmp: what its workers send back is unpickled here."""
    if os.environ.get("RAY_ADDRESS") or not hasattr(os, "getuid"):
        return
    file = ray._common.utils.get_ray_address_file(None)
    if os.path.lexists(file) and (owner := os.lstat(file).st_uid) not in (os.getuid(), 0):
        raise InputError(
            f"engine: {file}, which names the Ray cluster of this machine, is of another user ({owner}), whose "
            "workers could run anything here: name the cluster in RAY_ADDRESS, or say RAY_ADDRESS=local"
        )


def _most(ray: Any, resource: str) -> float:
    return max((node["Resources"].get(resource, 0) for node in ray.nodes() if node["Alive"]), default=0)


def _resources(ray: Any, device: str) -> dict[str, int]:
    """Return what each task asks for: a GPU if the cluster has any, else as many CPUs as this process has threads."""
    if device == "cuda" and not _most(ray, "GPU"):
        raise InputError("device: cuda was asked for and no machine of the Ray cluster has a GPU: use cpu or auto")
    if device != "cpu" and _most(ray, "GPU"):
        return {"num_cpus": 1, "num_gpus": 1}
    return {"num_cpus": min(torch.get_num_threads(), int(_most(ray, "CPU"))) or 1}


def _memory(ray: Any, measurer: Measurer, checkpoint: Checkpoint) -> int:
    """Return the bytes of memory that a task on CPUs asks for."""
    weights = 0
    with contextlib.suppress(InputError):  # loading it says why
        if measurer.options.offload is None and (config := checkpoint.config()):
            weights = sum(4 * each.numel() for each in outline(config, checkpoint.name).parameters())
    asked = OF_A_PROCESS + COPIES * weights
    if asked > (most := _most(ray, "memory")):
        gib = f"some {asked / 2**30:.1f} GiB of memory, and no machine of Ray has more than {most / 2**30:.1f} GiB"
        raise InputError(f"engine: {checkpoint.name} needs {gib} for it")
    return asked
