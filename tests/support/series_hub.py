"""Write small checkpoint series in the layout of the fake Hub, and connect this process to it."""

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants, hf_api
from huggingface_hub.utils import close_session
from safetensors.torch import load_file, save_file
from transformers.utils import hub as transformers_hub

from lit_layers.series import checkpoint as checkpoints
from tests.support.fake_hub import FakeHub
from tests.support.saved_models import saved

TWELVE = (0, *(2**power for power in range(10)), 1000)


@contextlib.contextmanager
def served(root: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Serve a fake Hub that this process uses as the real one.

    Environment variables do not suffice, because huggingface_hub reads the address when it is imported.
    """
    with FakeHub(root) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(hf_api.api, "endpoint", hub.url)  # module functions are methods of this HfApi
        # transformers caches an HfApi, which would retry the first fake Hub for half a minute after its end
        monkeypatch.setattr(transformers_hub, "_hf_api", None, raising=False)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        for name in ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"):  # the default of 10 s is too short under load
            monkeypatch.setattr(constants, name, 120)
        for name, value in hub.env(cache.parent).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        close_session()  # an open client keeps the proxies of the environment in which it was created
        yield hub
        hub.closing.set()
        let_downloads_end()
        close_session()


def let_downloads_end() -> None:
    """Wait for the download threads of a command that ended early: in this process, they outlive it."""
    for thread in threading.enumerate():
        if thread.name == checkpoints.THREAD:
            thread.join(120)


def template(folder: Path, *, shard: str = "1GB", **options: Any) -> Path:
    """Save a model folder, config and weights in one file or in shards, from which `make_step` makes steps."""
    saved(folder, "gpt_neox", shard=shard, **options)
    return folder


def make_step(model: Path, folder: Path, value: float) -> None:
    """Copy a model folder with `value` added to every weight, so that each value gives different files."""
    folder.mkdir(parents=True)
    for path in sorted(model.iterdir()):
        if path.suffix == ".safetensors":
            moved = {name: tensor + value for name, tensor in load_file(path).items()}
            save_file(moved, folder / path.name, metadata={"format": "pt"})
        else:
            (folder / path.name).write_bytes(path.read_bytes())


def make_series(
    model: Path,
    repository: Path,
    steps: Iterable[int] = TWELVE,
    *,
    name: str = "step{}",
    values: Mapping[int, float] | None = None,
    main: float | None = None,
) -> Path:
    """Write a repository with a branch per step, and return it.

    Args:
        values: Value that `make_step` adds at a step, if it is not the default (1 + index) / 64.
        main: Value of the branch main; by default, that of the last step.
    """
    steps, values = list(steps), values or {}
    moved = {step: values.get(step, (1 + index) / 64) for index, step in enumerate(steps)}
    for step, value in moved.items():
        make_step(model, repository / name.format(step), value)
    make_step(model, repository / "main", moved[steps[-1]] if main is None else main)
    return repository
