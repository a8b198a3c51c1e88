"""A file in another's place that a look at size and time does not tell from it."""

import os
from pathlib import Path


def exchange(path: Path, content: bytes) -> None:
    """As `cp --preserve` or an archive puts it there; or any writer within one tick of the clock of a file system."""
    before, other = path.stat(), path.with_name("other")
    other.write_bytes(content)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(path)
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
