"""`lit-layers publish`: the numbers of runs as a data set that `datasets` loads, with a card."""

import re
from pathlib import Path

from lit_layers.errors import InputError


def publish(
    roots: list[Path], *, out: Path = Path("published"), title: str | None = None, hub: str | None = None
) -> int:
    """Write the numbers of runs to a folder, as a data set of Hugging Face with a card; send it to the Hub if asked to.

    Args:
        roots: folders of runs; the data set names each run as its folder
        out: the folder of the data set: a new one, or one that this command made
        title: title of the card (default: the name of the folder)
        hub: also send it to this data set of the Hub, ORGANIZATION/NAME, with the token of `hf auth login`. A new one
            is private until you make it public
    """
    from lit_layers.report.published_data import send, write_data_set

    if not roots:
        raise InputError("missing: roots: expected a run's folder, or several")
    if hub is not None and not re.fullmatch(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}", hub, re.ASCII):
        raise InputError(f"hub: expected ORGANIZATION/NAME, got {hub!r}")
    numbers = write_data_set(roots, out, title=title or out.resolve().name)
    print(f"Wrote {numbers:,} numbers of {len(roots)} run{'s' * (len(roots) > 1)} to {out}")
    if hub is not None:
        print(f"Sent to {send(out, hub)}")
    return 0
