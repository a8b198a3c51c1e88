"""How long is waited, for what, and what is said in the end."""

from types import SimpleNamespace

import pytest
from huggingface_hub.errors import HTTPError

from lit_layers.errors import InputError
from lit_layers.files.hub import is_transient
from lit_layers.series import Retry


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
