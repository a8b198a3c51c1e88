"""The user's own code, which `--code` names: what recipes may say of it, and where it fails."""

import argparse
import contextlib
import sys
import traceback
import types
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jsonargparse import set_parsing_settings

from lit_layers.cli import TERMINATED
from lit_layers.errors import InputError

own_code: set[str] = set()  # its functions may be named, too: of the others some load or start whatever they are given


def trust_code(argv: list[str]) -> list[str]:
    """Takes every `--code PACKAGE` out of a command line: recipes may then name the classes of that package.

    It is no option of a parser: a recipe could set that. A folder goes behind the installed packages on the import
    path, so that no file of its replaces one of them.

    Raises:
        InputError: a word that is neither an importable package or module nor a folder.
    """
    options = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    options.add_argument("--code", action="append", default=[])
    try:
        given, rest = options.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise InputError("--code: expected an importable package or module, or a folder such as .") from error
    for named in given.code:
        packages = _packages(named)
        set_parsing_settings(import_path_allowlist=packages)
        own_code.update(packages)
    return rest


def _packages(named: str) -> list[str]:
    folder = Path(named)
    is_folder = folder.is_dir() and bool(named.strip())  # no word at all would be this folder
    if is_folder and not named.isidentifier():
        sys.path.append(str(folder.resolve()))
        return [name for name in map(_module_name, sorted(folder.iterdir())) if name and _is_in(name, folder)]
    parts = named.split(".")
    if all(part.isidentifier() for part in parts) and parts[0] != "__main__" and _is_there(named):
        return [named]
    near = f"; for the folder say --code ./{named}" if is_folder else ""
    raise InputError(f"--code: expected an importable package or module, or a folder such as ., got {named!r}{near}")


def _is_there(named: str) -> bool:
    """Whether there is such a module; of one inside of a package, the package is imported."""
    try:
        return find_spec(named) is not None
    except ModuleNotFoundError as error:
        if named == error.name or named.startswith(f"{error.name}."):
            return False
        raise InputError(f"--code: {named.rpartition('.')[0]} cannot be imported: {error}") from error
    except (Exception, SystemExit) as error:
        raise InputError(f"--code: {named.rpartition('.')[0]} cannot be imported: {_said(error)}") from error


@contextlib.contextmanager
def blaming_classes(*, made: bool) -> Iterator[None]:
    """Turns what goes wrong in the user's own code, or, where they are `made`, in any class that a recipe names, into
    one sentence that says where.

    Raises:
        InputError: in place of any other error, also of an end of the process.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and error.code == TERMINATED:
            raise
        chain: list[BaseException] = [error]  # jsonargparse wraps what a module or a constructor says
        while (inner := chain[-1].__cause__ or chain[-1].__context__) is not None:
            chain.append(inner)
        wrong = [each for each in chain if not isinstance(each, InputError)]
        for raised in wrong:
            for frame, line in _frames(raised):
                if frame is not None and is_under(_module(frame), own_code):
                    said = f"{frame.f_code.co_filename}, line {line}: {_said(raised)}"
                    raise InputError(f"{said}: mend it, or leave its class out of the recipe") from error
        if not made:  # the parser names the field
            raise
        if len(wrong) < len(chain):
            raise next(each for each in chain if isinstance(each, InputError)) from None
        if isinstance(error, SystemExit | OSError):
            raise
        first = next((each for each in wrong if not is_under(_module(*_frames(each)[0]), {"jsonargparse"})), error)
        frames = [frame for frame, _ in _frames(first) if frame is not None]
        maker = next((frame.f_locals.get("self") for frame in frames if frame.f_code.co_name == "__init__"), None)
        sentence = " ".join(str(first).split()) or type(first).__name__
        raise InputError(sentence if maker is None else f"{type(maker).__name__}: {sentence}") from error


def _frames(error: BaseException) -> Sequence[tuple[types.FrameType | None, int]]:
    """Where an error came by, with the lines, its own place first; one that was never raised came by nowhere."""
    return [*traceback.walk_tb(error.__traceback__)][::-1] or [(None, 0)]


def _module(frame: types.FrameType | None, _: int = 0) -> str:
    return "" if frame is None else frame.f_globals.get("__name__", "")


def _said(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"it ends the process (SystemExit: {error.code})"
    return " ".join(f"{type(error).__name__}: {error}".split())


def _module_name(path: Path) -> str | None:
    is_package = path.is_dir() and ((path / "__init__.py").is_file() or any(path.glob("*.py")))
    return path.stem if (path.suffix == ".py" or is_package) and path.stem.isidentifier() else None


def _is_in(name: str, folder: Path) -> bool:
    """Whether a module is imported from this folder, not from an installed package of the same name."""
    spec = find_spec(name)
    places = spec and ([spec.origin] if spec.origin else spec.submodule_search_locations)
    return any(Path(place).is_relative_to(folder.resolve()) for place in places or ())


def is_under(path: str, packages: Any) -> bool:
    return any(path == package or path.startswith(f"{package}.") for package in packages)
