"""A Python process that runs one file of the package, and imports nothing that lies in its way."""

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path


def isolated_command(program: Path, packages: Sequence[str], *arguments: str) -> list[str]:
    """The command line of a Python that finds the standard library, what is installed with it, and these packages
    where this process finds them.

    It is isolated (`-I`): the working directory, PYTHONPATH with its empty parts, and the user's own folder of packages
    are not searched, so that nothing there stands in for a module.
    """
    specs = filter(None, map(find_spec, packages))
    places = [*dict.fromkeys(str(Path(spec.origin).parents[1]) for spec in specs if spec.origin)]
    start = f"import runpy, sys; sys.path += {places}; runpy.run_path({str(program)!r}, run_name='__main__')"
    return [sys.executable, "-I", "-c", start, *arguments]
