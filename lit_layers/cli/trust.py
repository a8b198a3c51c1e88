"""What a recipe may name: classes of a few packages and of the user's own code, where a field asks for such a class.

And what these may reach: they write to the recipe's root and to folders that the command line names, and to no address.
"""

import argparse
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args, get_origin

from jsonargparse import ArgumentParser, Namespace, add_instantiator, set_parsing_settings
from omegaconf import OmegaConf
from omegaconf.resolvers import oc

from lit_layers.cli.messages import REFUSED, one_sentence
from lit_layers.errors import InputError

PACKAGES = ("lit_layers", "torch", "lightning", "transformers", "timm", "torchmetrics")
HELP = "command line only, repeatable: a recipe may name the classes of this package, or of all modules of this folder"
_OF_LIGHTNING = (  # its demonstrations fetch data, and its server starts a process
    *(f"lightning.pytorch.{part}" for part in ("accelerators", "callbacks", "loggers", "plugins", "profilers")),
    *("lightning.pytorch.strategies", "lightning.fabric.plugins"),
)
_OWN_PLACES = (".cache", ".results", ".root", ".store.folder")  # where classes of lit_layers write to
_PLACES = {"default_root_dir", "dir", "dirpath", "exclude_batches_path", "nvme_path", "save_dir"}
_ADDRESSES = {"api_key", "host", "settings", "tracking_uri"}
_SECRET = re.compile("key|token|secret|passw|credential", re.IGNORECASE)
_own_code: set[str] = set()  # its functions may be named, too: of the others some load or start whatever they are given
_PURE = "lit_layers.functional"  # and these, from tensors to tensors


def trust_code(argv: list[str]) -> list[str]:
    """Takes every `--code PACKAGE` out of a command line: recipes may then name the classes of that package.

    It is no option of a parser: a recipe could set that. A folder goes behind the installed packages on the import
    path, so that its `yaml.py` replaces none of them.

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
        _own_code.update(packages)
    return rest


def _packages(named: str) -> list[str]:
    folder = Path(named)
    if folder.is_dir() and not named.isidentifier():
        sys.path.append(str(folder.resolve()))
        return [name for name in map(_module_name, sorted(folder.iterdir())) if name and _is_in(name, folder)]
    if all(part.isidentifier() for part in named.split(".")) and find_spec(named.split(".")[0]) is not None:
        return [named]
    near = f"; for the folder say --code ./{named}" if folder.is_dir() else ""
    raise InputError(f"--code: expected an importable package or module, or a folder such as ., got {named!r}{near}")


class RecipeParser(ArgumentParser):
    """Reads recipes as data, and says what is wrong in one sentence, not after fifty lines of usage.

    A recipe names classes, and each is made only where it is a kind of the class that the field asks for: nothing in a
    field that takes any value, and no function but of the user's own code.
    """

    def error(self, message: str, ex: Exception | None = None) -> Any:
        sentence = one_sentence(message, self.get_defaults(skip_validation=True).keys(branches=True))
        told = "did you mean" in sentence or not sentence.startswith("un")  # unknown, unrecognized
        raise InputError(sentence if told else f"{sentence}; see `{self.prog} --help`") from None

    def _check_value_key(self, action: Any, value: Any, key: str, *args: Any, **kwargs: Any) -> Any:
        if action.nargs == "*" and not isinstance(value, list):  # jsonargparse would take a text's letters
            raise TypeError(f"{key}: expected a list, got {value}")
        return super()._check_value_key(action, value, key, *args, **kwargs)

    def _get_values(self, action: Any, arg_strings: list[str]) -> Any:
        if action.nargs in ("*", "?") and not action.option_strings and not arg_strings:
            return argparse.SUPPRESS  # no word is no value, which would take that of a recipe away
        return super()._get_values(action, arg_strings)

    def validate(self, namespace: Namespace, *args: Any, **kwargs: Any) -> None:
        """Checks the options of one class; those of the classes inside are checked by parsers of their own."""
        super().validate(namespace, *args, **kwargs)
        for action in self._actions:
            if action.nargs == 0 and not isinstance(flag := namespace.get(action.dest, False), bool):
                raise TypeError(f"{action.dest}: expected true or false, got {flag!r}")
            hint = getattr(action, "_typehint", None)
            if hint is not None and not _is_default(value := namespace.get(action.dest), action.default):
                for where, given in _named(action.dest, value):
                    _refuse_foreign(where, given, hint)


def _named(where: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields every class, by its path, and every function that a field's value holds."""
    if isinstance(value, Namespace):
        value = vars(value)
    if isinstance(value, Mapping) and "class_path" in value:
        yield where, value["class_path"]
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _named(f"{where}.{key}", part)
    elif isinstance(value, list | tuple | set):
        for part in value:
            yield from _named(where, part)
    elif callable(value) and not isinstance(value, type):
        yield where, value


def _is_default(value: Any, default: Any) -> bool:
    if callable(value) and isinstance(default, str):  # the path that stands for a function in a signature
        return value is pkgutil.resolve_name(default)
    return value == default


def _refuse_foreign(where: str, given: Any, hint: Any) -> None:
    """Refuses a class that is not of a kind the field names, and a function of somebody else's."""
    kinds, is_class = tuple(_kinds(hint)), isinstance(given, str)
    if is_class and not kinds and not _takes_callables(hint):
        raise TypeError(f"{where}: {REFUSED} class in a field of plain values, got {given}")
    made = given
    if is_class:
        made = pkgutil.resolve_name(given) if _is_under(given, {*PACKAGES, *_own_code}) else None
    if isinstance(made, type) and issubclass(made, kinds):
        return
    if _takes_callables(hint) and _is_under(getattr(made, "__module__", None) or "", {_PURE, *_own_code}):
        return
    expected = " or ".join(kind.__name__ for kind in kinds) or f"what {_PURE} or --code PACKAGE defines"
    path = given if is_class else f"{getattr(given, '__module__', '')}.{getattr(given, '__name__', given)}"
    raise TypeError(f"{where}: {REFUSED} {'class' if is_class else 'function'} here but {expected}, got {path}")


def _kinds(hint: Any) -> Iterator[type]:
    """Yields the classes that an annotation names, without those of Python itself, such as `dict` or `Callable`."""
    if isinstance(hint, type) and _is_under(hint.__module__, {*PACKAGES, *_own_code}):
        yield hint
    for part in get_args(hint):  # of a Callable what it takes is a list, and is not looked at
        yield from _kinds(part)


def _takes_callables(hint: Any) -> bool:
    return Callable in (hint, get_origin(hint)) or any(map(_takes_callables, get_args(hint)))


def _is_under(path: str, packages: Any) -> bool:
    return any(path == package or path.startswith(f"{package}.") for package in packages)


def _module_name(path: Path) -> str | None:
    is_package = path.is_dir() and ((path / "__init__.py").is_file() or any(path.glob("*.py")))
    return path.stem if (path.suffix == ".py" or is_package) and path.stem.isidentifier() else None


def _is_in(name: str, folder: Path) -> bool:
    """Whether a module is imported from this folder, not from an installed package of the same name."""
    spec = find_spec(name)
    places = spec and ([spec.origin] if spec.origin else spec.submodule_search_locations)
    return any(Path(place).is_relative_to(folder.resolve()) for place in places or ())


def refuse_reach(options: Mapping[str, Any], root: str | Path, argv: list[str]) -> None:
    """Refuses what a recipe would write elsewhere than in `root` or in a folder that the command line names, and
    classes that fetch or start something when they are made or used.

    Raises:
        InputError: naming the option and its value.
    """
    allowed = _allowed(root, argv)
    if trainer := options.get("trainer"):
        options = {**options, "trainer": {"class_path": "lightning.pytorch.callbacks.Callback", "init_args": trainer}}
    for where, path, given, holder in _classes("", options, "lit_layers"):
        if _is_under(path, _own_code):
            continue
        module = pkgutil.resolve_name(path).__module__
        if not _is_under(module, ("lit_layers", *_OF_LIGHTNING, "torch.distributed")) and not _is_under(
            holder, _own_code
        ):
            raise InputError(
                f"{where}: {REFUSED} {path}, which could fetch or start something; --code {path} allows it"
            )
        for place, value in _texts(where, given):
            if not _is_harmless(place, value, module) and not _lies_in(value, allowed):
                raise _out_of_reach(place, value)


def refuse_place(name: str, value: str, root: str | Path | None, argv: list[str]) -> None:
    """Refuses a file or folder to write that a recipe names elsewhere than in `root` or where the command line says.

    Raises:
        InputError: naming the option and its value.
    """
    if not _lies_in(value, _allowed(root, argv)):
        raise _out_of_reach(name, value)


def _allowed(root: str | Path | None, argv: list[str]) -> list[Path]:
    words = [part for word in argv for part in (word, word.partition("=")[2]) if part]
    return [Path(folder).resolve() for folder in (*([] if root is None else [root]), *words) if "\0" not in str(folder)]


def _out_of_reach(place: str, value: str) -> InputError:
    return InputError(f"{place}: a recipe reaches only its root and folders that the command line names, got {value!r}")


def _classes(where: str, value: Any, holder: str) -> Iterator[tuple[str, str, Any, str]]:
    """Yields every class: where it is named, its path, its options, and the class that holds it."""
    value = vars(value) if isinstance(value, Namespace) else value
    if isinstance(value, Mapping) and isinstance(path := value.get("class_path"), str):
        value = {**_plain(value.get("init_args")), **_plain(value.get("dict_kwargs"))}
        yield where, path, value, holder
        holder = path
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _classes(f"{where}.{name}".lstrip("."), part, holder)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _classes(where, part, holder)


def _plain(options: Any) -> dict[str, Any]:
    return dict(vars(options) if isinstance(options, Namespace) else options or {})


def _texts(where: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yields the texts among a class's options, without those of the classes inside."""
    value = vars(value) if isinstance(value, Namespace) else value
    if isinstance(value, Mapping) and "class_path" not in value:
        for name, part in value.items():
            yield from _texts(f"{where}.{name}", part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts(where, part)
    elif isinstance(value, str | Path):
        yield where, str(value)


def _is_harmless(where: str, value: str, module: str) -> bool:
    if module.startswith("lit_layers."):
        return where == "series.root" or not where.endswith(_OWN_PLACES)  # a series is read
    parts, name = Path(value).parts, where.rpartition(".")[2]
    leaves = Path(value).is_absolute() or ".." in parts or value.startswith("~") or "://" in value
    return not leaves and name not in _PLACES and not _ADDRESSES & set(where.split("."))


def _lies_in(value: str, allowed: list[Path]) -> bool:
    if "://" in value or "\0" in value:
        return False
    return any(Path(value).expanduser().resolve().is_relative_to(place) for place in allowed)


def _variable(name: str, *default: Any) -> Any:
    """What `${oc.env:NAME}` stands for in a recipe, whose options are written down with the run."""
    if _SECRET.search(name):
        raise InputError(f"a recipe reads no variable that may hold a secret, got ${{oc.env:{name}}}")
    return oc.env(name, *default)


def _without_code(class_type: Any, *args: Any, **kwargs: Any) -> Any:
    made = class_type(*args, **kwargs)
    if (file := getattr(made, "code_file", None)) is not None:
        raise InputError(
            f"task: a recipe names no task file, which is code, got {file}: score it with lit-layers intervene"
        )
    return made


add_instantiator(_without_code, object)  # of every class: to name Analysis would import torch for every `--help`
OmegaConf.register_resolver("oc.env", _variable, replace=True)
set_parsing_settings(
    import_path_denylist=["*"],
    import_path_allowlist=[*PACKAGES],
    instantiate_subclass_spec_in_any=False,
)
