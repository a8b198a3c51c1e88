"""What can go wrong between here and the Hub, and how to say it in a line."""

import textwrap

from huggingface_hub.errors import EntryNotFoundError, HTTPError

# HTTPError is that of the HTTP library the installed huggingface_hub is built on: it covers a refused connection, too.
HUB_ERRORS = (OSError, ValueError, HTTPError, EntryNotFoundError)


def reason(error: Exception) -> str:
    """The kind of an error and the beginning of what it says."""
    return f"{type(error).__name__}: {textwrap.shorten(str(error), 200, placeholder='...')}"
