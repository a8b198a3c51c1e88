"""Trying again where the network failed, and one sentence where it keeps failing."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled

from lit_layers.errors import InputError
from lit_layers.hub_errors import HUB_ERRORS, LOG_IN, is_refused, reason

Result = TypeVar("Result")
WORTH_ANOTHER_TRY = {408, 425, 429, *range(500, 600)}


class DamagedDownload(OSError):
    """What arrived is not what the Hub lists."""


class MovedCommit(OSError):
    """A commit that the Hub listed is no longer there."""


@dataclass(frozen=True)
class Retry:
    """How often and how patiently: waits of 1, 2, 4, ... seconds, or what the server asks for."""

    attempts: int = 5
    first_wait: float = 1.0
    longest_wait: float = 60.0
    sleep: Callable[[float], None] = time.sleep

    def call(self, what: str, action: Callable[[], Result]) -> Result:
        """Returns what `action` does in the end.

        Raises:
            InputError: `what`, the last reason and the number of attempts, in one sentence.
        """
        for attempt in range(self.attempts):
            try:
                return action()
            except InputError:
                raise
            except HUB_ERRORS as error:
                if not is_transient(error):
                    raise InputError(f"{what} ({reason(error)}): {_advice(error)}") from error
                if attempt == self.attempts - 1:
                    raise InputError(
                        f"{what} after {self.attempts} attempts ({reason(error)}): run the same command again later"
                    ) from error
                wait = min(self.longest_wait, self.first_wait * 2**attempt)
                self.sleep(max(wait, min(_asked_for(error), self.longest_wait)))
        raise AssertionError("unreachable: attempts is at least 1")


def is_transient(error: BaseException | None) -> bool:
    """Whether the same request may succeed later: timeouts, cut connections, 429, 5xx, damaged or moved content."""
    while error is not None:
        if isinstance(error, OfflineModeIsEnabled):
            return False
        if isinstance(error, DamagedDownload | MovedCommit | TimeoutError | ConnectionError):
            return True
        if isinstance(error, HTTPError):
            status = getattr(getattr(error, "response", None), "status_code", None)
            return status is None or status in WORTH_ANOTHER_TRY
        if isinstance(error, OSError) and "Consistency check failed" in str(error):
            return True
        error = error.__cause__
    return False


def _advice(error: BaseException) -> str:
    if is_refused(error):
        return LOG_IN

    if isinstance(error, OfflineModeIsEnabled) or isinstance(error.__cause__, OfflineModeIsEnabled):
        return "unset HF_HUB_OFFLINE"
    if isinstance(error, HTTPError | ValueError):
        return "check the name, the revision and your access to it"
    return "check the disk of the cache (HF_HOME)"


def _asked_for(error: BaseException) -> float:
    """Seconds that the server asks us to wait."""
    headers = getattr(getattr(error, "response", None), "headers", {})
    text = headers.get("Retry-After", "")
    return float(text) if text.isdigit() else 0.0
