"""How far a measurement has come, on standard error."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def bar(opening: str, *, hidden: bool = False) -> Iterator[Callable[[int, int, str], None]]:
    """A function of what is done, of how much, and what is next, which draws it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Drawn after each block and not by a thread of its own.
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False, disable=hidden) as drawn:
        task = drawn.add_task(opening, total=None)

        def show(done: int, total: int, what: str) -> None:
            changes: dict[str, Any] = {"description": what} if what else {}
            drawn.update(task, total=total, completed=done, refresh=True, **changes)

        yield show
