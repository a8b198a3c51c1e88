"""How far a preparation has come, on standard error."""

import contextlib
from collections.abc import Iterator
from typing import Any

from lit_layers.data.shards import ShardWriter


@contextlib.contextmanager
def bar(settings: dict[str, Any], progress: bool) -> Iterator[Any]:
    """A function (share of the work, writer) -> None that moves the bar."""
    if not progress:
        yield lambda share, writer: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    columns += (TextColumn("{task.fields[tokens]}"),)
    # Drawn after each chunk and not by a thread, which would take the Ctrl-C that is held back while workers start.
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as drawn:
        name = settings["source"].get("path") or settings["source"].get("name") or "python"
        task = drawn.add_task(f"tokens of {name}", total=None, tokens="")

        def show(share: float | None, writer: ShardWriter) -> None:
            tokens = sum(writer.count(split)[0] for split in ("train", "validation"))
            drawn.update(
                task, total=share and 1.0, completed=share or 0, tokens=f"{tokens / 1e6:.1f} M tokens", refresh=True
            )

        yield show
