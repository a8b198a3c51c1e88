"""The recipes that come with the package, found by name where the working directory has no such file."""

import functools
from pathlib import Path

from lit_layers.errors import InputError, did_you_mean

_PACKAGE = Path(__file__).parents[1]
_FOLDERS = ("recipes", "wandb_configs")


def find_recipe(name: str | Path) -> Path:
    """The file that a name stands for: itself where it exists, else the shipped recipe, e.g. of `quickstart/gpt2`.

    Raises:
        InputError: there is neither.
    """
    if _is_file(name):
        return Path(name)
    if (shipped := shipped_recipe(name)) is not None:
        return shipped
    otherwise = "of the package's recipes one is quickstart/gpt2"
    hint = did_you_mean(_name(name)[:200], shipped_recipes(), otherwise, most=1)
    raise InputError(f"no recipe {str(name)[:200]!r}, neither a file nor one that comes with the package; {hint}")


def shipped_recipe(name: str | Path) -> Path | None:
    """The recipe of the package that a name stands for, with or without `recipes/` before it and `.yaml` behind it."""
    return None if Path(name).is_absolute() else shipped_recipes().get(_name(name))


@functools.cache
def shipped_recipes() -> dict[str, Path]:
    """All recipes of the package, each by a name such as `quickstart/gpt2` or `wandb_configs/default`."""
    base = _PACKAGE / "shipped"  # of a wheel; a checkout has them beside the package
    base = base if base.is_dir() else _PACKAGE.parent
    files = [file for folder in _FOLDERS for file in sorted((base / folder).rglob("*.yaml"))]
    return {_name(file.relative_to(base)): file for file in files}


def recipe_file(name: str | Path) -> str:
    """A recipe's file; a name that is none stays, to be refused where it is read."""
    return str(name if _is_file(name) else shipped_recipe(name) or name)


def _is_file(name: str | Path) -> bool:
    """Whether there is such a file; a name that is too long for one is none."""
    try:
        return Path(name).is_file()
    except OSError:
        return False


def _name(file: str | Path) -> str:
    return Path(file).as_posix().removesuffix(".yaml").removeprefix("recipes/")
