"""Sentences for errors of the Hub."""

from types import SimpleNamespace

import pytest
from huggingface_hub.errors import HTTPError

from lit_layers.errors import InputError
from lit_layers.files.hub import hub_errors


class Answer(HTTPError):
    """An error that the client raises for an answer of the server."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.response = SimpleNamespace(status_code=status)


def test_an_error_of_the_hub_is_reported_with_advice():
    for error, advice in (
        (Answer(403), "access is refused: ask for it on the repository's page, then log in with `hf auth login`"),
        (Answer(404), "check the name, the revision and the network"),
        (TimeoutError("late"), "check the name, the revision and the network"),
    ):
        with (
            pytest.raises(InputError, match=f"^cannot do it .{type(error).__name__}: .*: {advice}"),
            hub_errors("cannot do it"),
        ):
            raise error


def test_other_errors_are_not_changed():
    for error in (ZeroDivisionError(), InputError("as it was")):
        with pytest.raises(type(error), match=f"^{error}$"), hub_errors("cannot do it"):
            raise error
