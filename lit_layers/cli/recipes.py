"""What a recipe may name: classes of some modules and of the user's code, places below its root, shipped recipes."""

import argparse
import functools
import inspect
import os
import pkgutil
import re
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace, add_instantiator, set_parsing_settings
from omegaconf import OmegaConf
from omegaconf.resolvers import oc

from lit_layers.errors import InputError, did_you_mean

own_code: set[str] = set()  # packages of --code
MODULES = (  # Lightning's demonstrations fetch data, its server starts a process, and torch.hub and torch.load run code
    *("lit_layers", "torch.nn", "torch.optim", "torch.distributed.fsdp", "transformers.models", "timm.models"),
    *(f"lightning.pytorch.{part}" for part in ("accelerators", "callbacks", "loggers", "plugins", "profilers")),
    *("lightning.pytorch.strategies", "lightning.pytorch.cli.ReduceLROnPlateau", "lightning.fabric.plugins"),
)
CLASSES = (
    "only lit_layers, torch.optim, torch.nn, lightning's callbacks, loggers, plugins, profilers and strategies, "
    + ("models of transformers and timm, and your own code, with --code PACKAGE")
)
_SECRET = re.compile("key|token|secret|passw|credential", re.IGNORECASE)
_PACKAGE = Path(__file__).parents[1]
_OWN_PLACES = (".cache", ".results", ".root", ".store.folder")  # where classes of lit_layers write to
_PLACES = {"default_root_dir", "dir", "dirpath", "root_dir", "save_dir", "staging_dir"}  # and classes of libraries
_LEAVES = re.compile(r"^~|://|^/|(^|/)\.\.(/|$)")


def trust_code(argv: list[str]) -> list[str]:
    """Take every `--code PACKAGE` out of a command line: recipes may then name the classes of that package.

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
        own_code.update(_packages(named))
    set_parsing_settings(import_path_allowlist=[*own_code])
    return rest


def _packages(named: str) -> list[str]:
    """Return the package that a word names, or the modules of a folder that no installed package takes the place of."""
    folder, name = Path(named).resolve(), named.strip()
    if name and folder.is_dir() and not name.isidentifier():
        sys.path.append(str(folder))
        found = {path.stem: find_spec(path.stem) for path in folder.iterdir() if path.stem.isidentifier()}
        places = {name: [spec.origin, *(spec.submodule_search_locations or ())] for name, spec in found.items() if spec}
        return [name for name, there in places.items() if any(each and folder in Path(each).parents for each in there)]
    try:
        if all(map(str.isidentifier, named.split("."))) and find_spec(named) is not None:
            return [named]
    except (ImportError, ValueError):
        pass
    raise InputError(f"--code: expected an importable package or module, or a folder such as ., got {named!r}")


def placed(options: Namespace, root: str | Path, argv: list[str]) -> Namespace:
    """Return the options with the relative places of the classes that they name below `root`.

    Places and addresses of the command line, and defaults of a class, stay as they are. The user's own code is trusted.

    Raises:
        InputError: a place outside of `root`, or an address, that a recipe names.
    """
    options = options.clone()
    typed = {part for word in argv for part in (word, word.partition("=")[2]) if part}
    allowed = [Path(folder).resolve() for folder in (root, *typed)]

    def is_within(value: str) -> bool:
        return not re.search("^~|://", value) and any(Path(value).resolve().is_relative_to(each) for each in allowed)

    for where, within, name, holder in _values(options):
        value = str(within[name])
        if _is_function(within[name]):
            path = f"{getattr(within[name], '__module__', '')}.{getattr(within[name], '__name__', '')}"
            allowed_code = {"lit_layers.functional", *own_code}
            if not _is_under(path, allowed_code) and not _is_default(holder, name, within[name]):
                pure = "what lit_layers.functional or --code PACKAGE defines"
                raise InputError(f"{where}: a recipe names no function but {pure}, got {path}")
            continue
        if value in typed or _is_under(holder, own_code):
            continue
        is_ours = holder.startswith("lit_layers.")
        is_place = where.endswith(_OWN_PLACES) and where != "series.root" if is_ours else name in _PLACES
        leaves = _LEAVES.search(value)
        found = next(filter(is_within, [value] if leaves else [value, str(Path(root) / value)]), None)
        if is_place and found is not None:
            within[name] = type(within[name])(found)
        elif found is None and (is_place or (leaves and not is_ours)) and not _is_default(holder, name, within[name]):
            raise InputError(
                f"{where}: a recipe reaches only its root and folders that the command line names, got {value!r}: "
                "write it relative to the root, or type it"
            )
    return options


def _values(within: Any, where: str = "", holder: str = "") -> Iterator[tuple[str, Any, Any, str]]:
    """Yield where each text, path or function among options of classes stands, what holds it, its name, the class."""
    within = vars(within) if isinstance(within, Namespace) else within
    is_class = isinstance(within, Mapping) and isinstance(within.get("class_path"), str)
    holder = within["class_path"] if is_class else holder
    for name, part in list(within.items()) if isinstance(within, Mapping) else enumerate(within):
        is_inner = isinstance(name, int) or (is_class and name in ("init_args", "dict_kwargs"))
        at = where if is_inner else f"{where}.{name}"
        if isinstance(part, Namespace | Mapping | list | tuple):
            yield from _values(part, at.lstrip("."), "lightning.Trainer" if at == ".trainer" else holder)
        elif holder and name != "class_path" and (isinstance(part, str | Path) or _is_function(part)):
            yield at.lstrip("."), within, name, holder


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, type | Namespace)


def _is_under(path: str, packages: set[str]) -> bool:
    return any(path.startswith(f"{package}.") for package in packages)


def _is_default(class_path: str, name: str, value: Any) -> bool:
    kinds = getattr(pkgutil.resolve_name(class_path), "__mro__", ())
    options = [inspect.signature(kind.__init__).parameters for kind in kinds]
    return any(name in each and each[name].default == value for each in options)


def _variable(name: str, *default: Any) -> Any:
    """Return what `${oc.env:NAME}` stands for in a recipe, whose options are written down with the run."""
    if _SECRET.search(name):
        raise InputError(f"a recipe reads no variable that may hold a secret, got ${{oc.env:{name}}}")
    return oc.env(name, *default)


def _made(class_type: Any, *args: Any, **kwargs: Any) -> Any:
    name = next((each for each in ("api_key", "host", "settings") if kwargs.get(each)), None)
    if name and class_type.__module__.startswith("lightning."):  # a key that a stranger's address would be sent
        raise InputError(f"{name}: a recipe names no address and no key: set a variable of {class_type.__name__}")
    made = class_type(*args, **kwargs)
    if (file := getattr(made, "code_file", None)) is not None:
        raise InputError(f"task: a recipe names no task file, which is code, got {file}: use lit-layers intervene")
    return made


add_instantiator(_made, object)  # of every class: to name Analysis would import torch for every `--help`
# Options whose defaults are no plain values, such as an enumeration of Timer and the device of weight averaging.
yaml.SafeDumper.add_multi_representer(object, lambda dumper, it: dumper.represent_str(str(getattr(it, "value", it))))
OmegaConf.register_resolver("oc.env", _variable, replace=True)
# A class is made only where a field asks for one of its kind, and nothing is made in a field that takes any value.
set_parsing_settings(
    import_path_denylist=["*"], import_path_allowlist=[*MODULES], instantiate_subclass_spec_in_any=False
)


def find_recipe(name: str | Path) -> Path:
    """Return the file that a name stands for: itself where it exists, else the shipped recipe, e.g. quickstart/gpt2.

    Raises:
        InputError: there is neither.
    """
    if os.path.isfile(name):
        return Path(name)
    plain = _name(name)
    if plain in shipped_recipes():
        return shipped_recipes()[plain]
    hint = did_you_mean(plain, shipped_recipes(), "of the package's recipes one is quickstart/gpt2", most=1)
    raise InputError(f"no recipe {str(name)[:200]!r}, neither a file nor one that comes with the package; {hint}")


@functools.cache
def shipped_recipes() -> dict[str, Path]:
    """Return all recipes of the package, each by a name such as `quickstart/gpt2` or `wandb_configs/default`."""
    base = _PACKAGE / "shipped"  # of a wheel; a checkout has them beside the package
    base = base if base.is_dir() else _PACKAGE.parent
    files = [file for folder in ("recipes", "wandb_configs") for file in sorted((base / folder).rglob("*.yaml"))]
    return {_name(file.relative_to(base)): file for file in files}


def _name(file: str | Path) -> str:
    return Path(file).as_posix().removesuffix(".yaml").removeprefix("recipes/")
