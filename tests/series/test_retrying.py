"""How long is waited, for what, and what is said in the end."""

import socket
import time
from types import SimpleNamespace

import datasets
import mteb
import pytest
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HTTPError
from transformers.utils import hub as transformers_hub

from lit_layers.data.images import _hub as images_of_the_hub
from lit_layers.data.tokenization import load_tokenizer
from lit_layers.errors import InputError
from lit_layers.files import hub
from lit_layers.files.hub import Hub, is_transient
from lit_layers.series import Retry
from lit_layers.tasks.catalogue import resolve
from lit_layers.tasks.lm_eval_scorer import LmEvalScorer
from lit_layers.tasks.mteb_tasks import _load
from lit_layers.tasks.task_files import read_columns
from tests.support.labelled_texts import saved_gpt2


class Answer(HTTPError):
    """What the client raises for an answer of the server."""

    def __init__(self, status: int, headers: dict[str, str] | None = None) -> None:
        super().__init__(f"status {status}")
        self.response = SimpleNamespace(status_code=status, headers=headers or {})


def attempt(errors: list[Exception], **options) -> tuple[str, list[float]]:
    waits: list[float] = []

    def action() -> str:
        if errors:
            raise errors.pop(0)
        return "done"

    return Retry(sleep=waits.append, **options).call("cannot do it", action), waits


def test_a_server_that_says_how_long_to_wait_is_obeyed_within_reason():
    errors = [Answer(429, {"Retry-After": "30"}), Answer(429, {"Retry-After": "9999"}), Answer(503)]
    assert attempt(errors) == ("done", [30, 60, 4])


def test_waits_grow_to_a_bound():
    errors = [Answer(503) for _ in range(6)]
    assert attempt(errors, attempts=7, longest_wait=10) == ("done", [1, 2, 4, 8, 10, 10])


@pytest.mark.parametrize(
    ("status", "advice"),
    [
        (400, "check the name"),
        (401, "check the name"),
        (403, "access is refused: ask for it on the repository's page, then log in with `hf auth login`"),
        (404, "check the name"),
        (410, "check the name"),
    ],
)
def test_a_refusal_is_final(status, advice):
    with pytest.raises(InputError, match=f"cannot do it .Answer: status {status}.: {advice}"):
        attempt([Answer(status)])


def test_timeouts_and_cut_connections_pass_and_a_full_disk_does_not():
    assert is_transient(TimeoutError("late"))
    assert is_transient(ConnectionResetError("cut"))
    assert is_transient(OSError("Consistency check failed: file should be of size 5 but has size 3"))
    caused = FileNotFoundError("nothing in the cache")
    caused.__cause__ = Answer(502)
    assert is_transient(caused)
    assert not is_transient(OSError(28, "No space left on device"))
    with pytest.raises(InputError, match="No space left on device.: check the disk of the cache"):
        attempt([OSError(28, "No space left on device")])


def test_what_is_no_matter_of_the_network_is_not_caught():
    with pytest.raises(ZeroDivisionError):
        attempt([ZeroDivisionError()])
    with pytest.raises(InputError, match="^as it was$"):
        attempt([InputError("as it was")])


@pytest.fixture
def unconnected(monkeypatch):
    """A machine that knows no other: how often it is asked for one."""
    asked: list[str] = []

    def unknown(host: str, *_: object) -> None:
        asked.append(host)
        raise socket.gaierror(-2, "Name or service not known")

    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr(hub, "_found", set())
    monkeypatch.setattr(hub, "_sought", {})
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return asked


def test_without_a_network_a_hub_that_was_never_reached_is_given_up_within_seconds(unconnected, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    waits: list[float] = []
    asked = Hub(Retry(sleep=waits.append))
    for ask in (
        lambda: asked.fetch("nobody/nothing", None, "config.json", "cannot have it"),
        lambda: asked.commits("nobody/nothing"),
    ):
        with pytest.raises(
            InputError, match="cannot .*: there is no network, or no huggingface.co in it: check the na"
        ):
            ask()
    assert waits == [1, 2, 2]  # the second one knows what the first has found
    assert {*unconnected} == {"huggingface.co"}


@pytest.mark.parametrize(
    "read",
    [
        lambda: read_columns("nobody/nothing", ["train"], {"text": "text"}),
        lambda: LmEvalScorer("arc_easy", "nobody/nothing").requests(),
        lambda: _load(mteb.get_task("STSBenchmark"), resolve(["STSBenchmark"])[0]),
        lambda: images_of_the_hub("nobody/nothing", "train"),
        lambda: load_tokenizer("nobody/nothing"),
    ],
    ids=["task", "lm-eval", "mteb", "images", "tokenizer"],
)
def test_what_reads_data_tries_no_request_again_where_there_is_no_network(read, unconnected, tmp_path, monkeypatch):
    waits: list[float] = []
    for place in ("HF_HUB_CACHE", "HF_HOME"):
        monkeypatch.setattr(constants, place, str(tmp_path))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setitem(hub._sought, "huggingface.co", time.monotonic())  # a moment ago, too
    monkeypatch.setattr(time, "sleep", waits.append)
    with pytest.raises(InputError, match="there is no network, or no huggingface.co in it"):
        read()
    assert (waits, constants.HF_HUB_OFFLINE) == ([], False)
    assert {*unconnected} == {"huggingface.co"}


def test_a_file_of_the_cache_is_read_at_once_where_there_is_no_network(unconnected, tmp_path, monkeypatch):
    commit = tmp_path / "models--some--one" / "snapshots" / ("0" * 40)
    for path in (commit / "tokenizer.json", tmp_path / "models--some--one" / "refs" / "main"):
        path.parent.mkdir(parents=True)
        path.write_text("0" * 40)
    monkeypatch.setitem(hub._sought, "huggingface.co", time.monotonic())
    with hub.asking_the_hub("it cannot be had", "do it otherwise"):
        assert snapshot_download("some/one", cache_dir=tmp_path) == str(commit)
    assert {*unconnected} == {"huggingface.co"}


def test_lm_eval_takes_a_tokenizer_of_the_cache_where_there_is_no_network(unconnected, tmp_path, monkeypatch):
    """transformers lists the repository's files besides, which is in vain, for half a minute."""
    commit = tmp_path / "models--some--one" / "snapshots" / ("0" * 40)
    model = saved_gpt2(commit)
    (tmp_path / "models--some--one" / "refs").mkdir()
    (tmp_path / "models--some--one" / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(transformers_hub, "_hf_api", None)
    monkeypatch.setitem(hub._sought, "huggingface.co", time.monotonic())
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    wrapped = LmEvalScorer("arc_easy", "some/one")._wrap(model)
    assert wrapped.tokenizer.name_or_path == "some/one"
    assert waits == []


def test_a_hub_that_was_reached_or_lies_behind_a_proxy_is_waited_for(unconnected, monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    hub.refuse_without_network("cannot have it", "https://hub.example:1")
    monkeypatch.delenv("HTTPS_PROXY")
    waits: list[float] = []

    def found_at_last(host: str, *_: object) -> list[object]:
        unconnected.append(host)
        if len(unconnected) < 2:
            raise socket.gaierror(-3, "Temporary failure in name resolution")
        return []

    monkeypatch.setattr(socket, "getaddrinfo", found_at_last)
    for _ in range(2):
        hub.refuse_without_network("cannot have it", "https://hub.example:1", waits.append)
    assert (waits, unconnected) == ([1], ["hub.example"] * 2)
