"""Small checkpoint series as the Hub holds them, and a client in this process that talks to the fake one."""

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
    """A fake Hub that this process takes for the real one: huggingface_hub read its address when it was imported."""
    with FakeHub(root) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(hf_api.api, "endpoint", hub.url)  # of the functions that are methods of one HfApi
        # transformers keeps one of its own: that of the first fake Hub, which was asked in vain for half a minute
        monkeypatch.setattr(transformers_hub, "_hf_api", None, raising=False)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        for name in ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"):  # 10 s pass quickly on a machine under load
            monkeypatch.setattr(constants, name, 120)
        for name, value in hub.env(cache.parent).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        close_session()  # a client keeps the proxies of the environment that it was made in
        yield hub
        hub.closing.set()
        let_downloads_end()
        close_session()


def let_downloads_end() -> None:
    """Waits for what a command that ended early left to a daemon: in this process it does not end with the command."""
    for thread in threading.enumerate():
        if thread.name == checkpoints.THREAD:
            thread.join(120)


def template(folder: Path, *, shard: str = "1GB", **options: Any) -> Path:
    """A model folder from which steps are made: config and weights, in one file or in shards."""
    saved(folder, "gpt_neox", shard=shard, **options)
    return folder


def make_step(model: Path, folder: Path, value: float) -> None:
    """Writes `model` with every weight moved by `value`: another value is another file, in every shard."""
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
    """Writes one branch a step; `values` are those that do not move with their step; `main` is the last by default."""
    steps, values = list(steps), values or {}
    moved = {step: values.get(step, (1 + index) / 64) for index, step in enumerate(steps)}
    for step, value in moved.items():
        make_step(model, repository / name.format(step), value)
    make_step(model, repository / "main", moved[steps[-1]] if main is None else main)
    return repository
