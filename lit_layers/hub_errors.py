"""What can go wrong between here and the Hub, and how to say it in a line."""

import textwrap

from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HTTPError

# HTTPError is that of the HTTP library the installed huggingface_hub is built on: it covers a refused connection, too.
HUB_ERRORS = (OSError, ValueError, HTTPError, EntryNotFoundError)


LOG_IN = "access is refused: ask for it on the repository's page, then log in with `hf auth login` or set HF_TOKEN"


def is_refused(error: BaseException) -> bool:
    """Whether the Hub answered that this user may not have it: a gated repository, or status 403."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return isinstance(error, GatedRepoError) or status == 403


def reason(error: Exception) -> str:
    """The kind of an error and the beginning of what it says."""
    return f"{type(error).__name__}: {textwrap.shorten(str(error), 200, placeholder='...')}"
