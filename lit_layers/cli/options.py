"""Command line options of a verb (a command such as `fit`), derived from the signature of its function.

Options are read from the command line and from YAML recipes, and are checked against their types. A parameter without a
default is required. Its help text comes from the docstring, its range from `Annotated[int, COUNT]`. A parameter whose
type is a dataclass is replaced by the fields of that dataclass; functions share options this way.

jsonargparse parses and validates. `one_sentence` rewords its messages for common mistakes: unknown options and recipe
keys, missing options, wrong types, misspelt classes, and classes that a recipe may not name.

A recipe may name classes of the modules in MODULES and of the user's code (`--code`). It may also be one of the recipes
in this package.
"""

import argparse
import contextlib
import dataclasses
import difflib
import functools
import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import docstring_parser
import yaml
from jsonargparse import ActionConfigFile, ArgumentParser, Namespace, add_instantiator, set_parsing_settings
from jsonargparse.typing import register_type
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from lit_layers.cli.process import VERBOSE
from lit_layers.errors import InputError, did_you_mean
from lit_layers.schema import refuse_outside

trusted_modules: set[str] = set()  # modules named with --code
# Modules whose classes a recipe may name. Lightning's demos and server and the rest of torch are left out: they
# download data, start processes or run code.
MODULES = (
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
_PLAIN = (str, int, float, tuple, Path)  # types with values written directly; other classes are named by class_path
Steps = list[int] | dict[str, int | list[int]] | str
_HOMES = ("lit_layers.analyses", "lit_layers.data", "lit_layers.series", "lit_layers.training")
_REWORDED = (
    (r"^unrecognized arguments: (--[^\s=]+).*", r"unknown option \1"),
    (r"^Group '(.+?)' does not accept option '(.+?)'.*", r"unknown key \1.\2 in the recipe"),
    (r"^Option '(.+?)' is not accepted.*", r"unknown key \1 in the recipe"),
    (r"^Unexpected config: ?(.*)", r"expected a recipe of KEY: VALUE lines, got \1"),
    (r"Key must be a string, got: None", 'the key null is written with quotes in a recipe: "null": blocks'),
    (r"^the following arguments are required: (.*)", r"missing: \1; give it in the recipe or on the command line"),
    (r"Parser key \"([^\"]+)\"(?: element \d+)?: ?", r"\1: "),
    (r"^((?:[\w.]+: )*).*Importing '([^']+)' is not allowed.*", rf"\1a recipe names no \2: {CLASSES}"),
    (r"<class '(?:[\w.]+\.)?(\w+)'>", r"\1"),
    (r"(?:- Expected a path .*)?Does not validate .*?\[(.*?)\] Err.* value: ?(.*)", r"expected one of \1, got \2"),
)


class Names(tuple[str, ...]):
    """A tuple of names: a list in a recipe, comma-separated on the command line."""

    def __str__(self) -> str:
        return ",".join(map(str, self))


class Numbers(Names):
    """A tuple of whole numbers >= 0, written like `Names`."""


def _parse_list(kind: type, convert: Callable[[str], Any], value: Any) -> Any:
    parts = value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else [value]
    read = dict.fromkeys(convert(text) for part in parts if (text := str(part).strip()))
    if not read or isinstance(value, Mapping) or any(isinstance(each, int) and each < 0 for each in read):
        raise ValueError(f"expected {kind.__name__.lower()} with commas between, got {value}")
    return kind(read)


def _parse_path(value: Any) -> Path:
    if not str(value).strip():  # Path("") is the working directory
        raise ValueError(f"expected a file or folder, got {str(value)!r}")
    return Path(value).expanduser()  # shells do not expand ~ in `--root=~/run`


register_type(Path, str, _parse_path, (ValueError, RuntimeError), isinstance)
register_type(Names, list, functools.partial(_parse_list, Names, str))
register_type(Numbers, list, functools.partial(_parse_list, Numbers, int))


class Recipe:
    """The options of a command (verb), from its command line and from the recipe files named there.

    `read` parses the command line and the recipe files. It can be called again with other defaults for the options. For
    `fit`, arguments before the first option are names of recipes.

    Raises:
        InputError: a package of `--code` or a recipe does not exist.
    """

    def __init__(self, verb: Callable[..., Any], argv: list[str]) -> None:
        if verb.__name__ == "fit":
            names = [*takewhile(lambda word: not word.startswith("-"), argv)]
            argv = [*(f"--config={name}" for name in names), *argv[len(names) :]]
        self.verb, self.argv, self.parser = verb, trust_code(argv), parser_of(verb)

    @functools.cached_property
    def options(self) -> Namespace:
        """The parsed options, cached; parsing raises the errors of `read`."""
        return self.read()

    def read(self, **defaults: Any) -> Namespace:
        """Parse and return the options, with these defaults.

        Raises:
            InputError: an option is unknown, missing, out of range or of the wrong type.
        """
        self.parser.set_defaults(**defaults)
        with _input_errors():
            options = self.parser.parse_args(self.argv)
        for action in self.parser._actions:
            name, value = action.dest, options.get(action.dest)
            if isinstance(value, str) and not value.strip() and name != "separator":  # empty: an unset shell variable
                raise InputError(f"{name}: expected a name or a path, got {value!r}")
            # On the command line a flag takes no value, but a recipe can give it any value.
            if action.nargs == 0 and not isinstance(options.get(name, False), bool):
                raise InputError(f"{name}: expected true or false, got {value!r}")
            allowed = getattr(action, "allowed", None)
            if allowed is not None and isinstance(value, int | float | tuple):
                refuse_outside("", {name: allowed}, {name: min(value) if isinstance(value, tuple) else value})
        return options

    def typed(self, name: str) -> list[str]:
        """Return the values given to an option on the command line itself, ignoring recipes."""
        words = [(*word.split("=", 1), following)[:2] for word, following in pairwise([*self.argv, ""])]
        return [value for option, value in words if option == f"--{name}"]

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments with which the verb is called."""
        return arguments(self.verb, {**vars(self.options), "recipe": self})

    def instantiate_all(self) -> Any:
        """Instantiate all classes that the options name, and return the options.

        Raises:
            InputError: a class refuses its arguments.
        """
        with _input_errors():
            return self.parser.instantiate_classes(self.options)

    def instantiate(self, name: str, options: Namespace) -> Any:
        """Instantiate the classes that one option names, and return the value of this option."""
        only = self.parser.get_defaults()
        only[name] = options[name]
        with _input_errors():
            return self.parser.instantiate_classes(only)[name]


class RecipeParser(ArgumentParser):
    """An argument parser that reports errors in one sentence, without printing the usage."""

    def error(self, message: str, ex: Exception | None = None) -> Any:
        keys = [*self.get_defaults(skip_validation=True).keys(branches=True)]
        # For a command, the message points to its help. The options of a class are few, so the message lists them.
        is_verb = self.prog.startswith("lit-layers ")
        others = f"see `{self.prog} --help`" if is_verb else f"the keys are {', '.join(keys)}"
        raise InputError(one_sentence(message, keys, ex, others=others)) from ex

    def _get_values(self, action: Any, arg_strings: list[str]) -> Any:
        if action.nargs in ("*", "?") and not action.option_strings and not arg_strings:
            return argparse.SUPPRESS  # an empty list would override the value of a recipe
        return super()._get_values(action, arg_strings)


def parser_of(verb: Callable[..., Any]) -> RecipeParser:
    """Return a parser with one option for each parameter of a verb, and `--config` for recipes."""
    doc = docstring_parser.parse(inspect.getdoc(verb) or "")
    parser = RecipeParser(
        prog=verb.__name__ if _is_group(verb) else f"lit-layers {verb.__name__}",
        description=" ".join(filter(None, [doc.short_description, doc.long_description])),
        exit_on_error=False,
        parser_mode="omegaconf+",
        allow_abbrev=False,
    )
    parser.usage = f"{parser.prog} [options]"
    _add_options(parser, verb)
    words = "a YAML recipe with values for these options; a later recipe overrides earlier ones"
    parser.add_argument("-c", "--config", action=_RecipeFile, help=words)
    # This option is only for --help: `take_verbose` has already removed -v from the arguments.
    words = "log what the command does, and tracebacks of failures"
    parser.add_argument(*VERBOSE, action="store_true", default=argparse.SUPPRESS, help=words)
    return parser


class _RecipeFile(ActionConfigFile):
    """The argparse action of `--config`: read a recipe, given by file path or by its name in the package."""

    def __call__(self, parser: Any, options: Any, value: Any, word: str | None = None) -> None:
        super().__call__(parser, options, str(find_recipe(value)), word)


def arguments(function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments for `function` from the options; dataclass parameters are instantiated."""
    kinds = {name: each.annotation for name, each in inspect.signature(function, eval_str=True).parameters.items()}
    return {
        name: kind(**arguments(kind, options)) if _is_group(kind) else options[name] for name, kind in kinds.items()
    }


def _add_options(parser: Any, function: Callable[..., Any]) -> None:
    """Add an option for each parameter of a function, or for each field of a dataclass."""
    docs = [docstring_parser.parse(part.__doc__ or "") for part in getattr(function, "__mro__", [function])]
    words = {each.arg_name: each.description for part in docs[::-1] for each in part.params}
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        kind, default, allowed = parameter.annotation, parameter.default, None
        if get_origin(kind) is Annotated:
            kind, allowed = get_args(kind)
        is_required, about = default is parameter.empty, {"help": " ".join((words.get(name) or "").split())}
        if kind is Recipe:
            continue
        if _is_group(kind):
            _add_options(parser, kind)
            continue
        if isinstance(allowed, type):  # e.g. Trainer: the arguments of this class become options
            parser.add_class_arguments(allowed, name, instantiate=False, fail_untyped=False, sub_configs=True)
            parser.set_defaults({f"{name}.{option}": value for option, value in default.items()})
            continue
        if inspect.isclass(kind) and not issubclass(kind, _PLAIN):
            shown: Any = {"as_group": False, "metavar": "CLASS", **about}
            parser.add_subclass_arguments(kind, name, fail_untyped=False, required=is_required, **shown)
            continue
        options: dict[str, Any] = {"type": kind, **about}
        if not is_required:
            options["default"] = [] if get_origin(kind) is list else default  # the default of a list is a factory
        if kind is bool and default is False:
            options = {"action": "store_true", **about}
        is_positional = parameter.kind is not parameter.KEYWORD_ONLY and not _is_group(function)
        if is_positional and get_origin(kind) is list:
            options |= {"type": get_args(kind)[0], "nargs": "*"}
        elif is_positional and not is_required:
            options["nargs"] = "?"
        elif is_required and not is_positional:
            options["required"] = True
        action = parser.add_argument(name if is_positional else f"--{name}", **options)
        action.allowed = allowed
        if action.nargs == "*":
            action.required, action.default = False, []


def _is_group(kind: Any) -> bool:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


@contextlib.contextmanager
def _input_errors() -> Iterator[None]:
    """Convert errors of a recipe, of a class that it names or of user code to InputError, but not an OSError."""
    try:
        yield
    except (OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"config: {' '.join(str(error).split())}") from error
    except Exception as error:
        chain: list[BaseException] = [error]  # jsonargparse wraps the original error
        while (inner := chain[-1].__cause__ or chain[-1].__context__) is not None:
            chain.append(inner)
        if said := next((each for each in chain if isinstance(each, InputError)), None):
            raise said from None
        if isinstance(error, OSError):
            raise
        frame = traceback.extract_tb(chain[-1].__traceback__)[-1]
        words = f"{type(chain[-1]).__name__}: {' '.join(str(chain[-1]).split())}"
        raise InputError(f"{frame.filename}, line {frame.lineno}: {words}") from error


def refuse_replacing(folder: Path | None, read: Iterable[str | Path | None], written: Sequence[str]) -> None:
    """Refuse an output folder if writing to it would overwrite one of the input tables.

    `read` are the paths of the input tables. `written` are the names of the output tables without suffix.

    Raises:
        InputError: an input table would be overwritten; the message names it.
    """
    for path in map(Path, filter(None, read)):
        if folder and path.is_file() and path.stem in written and path.resolve().parent == folder.resolve():
            raise InputError(f"root: {path}, which is read, would be replaced in {folder}: name another folder")


def one_sentence(
    message: str, keys: Sequence[str] = (), error: BaseException | None = None, *, others: str = "see --help"
) -> str:
    """Return a message of jsonargparse on one line, reworded for common mistakes.

    If the parser of a nested class refused a value, its error is the cause of `error`. The message of this
    cause is more precise, so it replaces `message`.
    """
    text = " ".join(message.split())
    where = re.match(r'Parser key "([^"]+)"', text)
    while error is not None and not isinstance(error, InputError) and error.__cause__ is not None:
        error = error.__cause__
    if where and isinstance(error, InputError):
        return f"{where[1]}: {error}"
    # For a class, jsonargparse lists the errors of all accepted types: use only the error of the class.
    if where and error is not None and "'class_path': " in text:
        said = "" if isinstance(error, ValueError | TypeError) else f"{type(error).__name__}: "
        text = f"{where[1]}: {said}{' '.join(str(error).split())}"
    for pattern, words in _REWORDED:
        text = re.sub(pattern, words, text)
    text = text if len(text) <= 400 else f"{text[:400]} ..."
    if unknown := re.match(r"unknown (?:option --|key )(\S+)", text):
        near = difflib.get_close_matches(unknown[1], keys, n=1)
        dashes = "--" if "--" in text else ""
        return f"{text}; did you mean {dashes}{near[0]}?" if near else f"{text}; {others}"
    if misspelt := re.search(r"import path string: ([A-Za-z]\w*)$|has no attribute '(\w+)'$", text):
        names = [each for room in _HOMES for each in importlib.import_module(room).__all__ if each[0].isupper()]
        near = difflib.get_close_matches(misspelt[1] or misspelt[2], names, n=1)
        text += f"; did you mean {near[0]}?" if near else ""
    return text


def trust_code(argv: list[str]) -> list[str]:
    """Remove each `--code PACKAGE` from a command line, and allow recipes to name classes of that package.

    PACKAGE is an importable package or module, or a folder of modules. A folder is appended to the end of `sys.path`,
    so that its files cannot replace installed packages. `--code` is not an option of the recipe parser, because a
    recipe could then set it.

    Raises:
        InputError: PACKAGE is neither an importable package or module nor a folder.
    """
    options = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    options.add_argument("--code", action="append", default=[])
    try:
        given, rest = options.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise InputError("--code: expected an importable package or module, or a folder such as .") from error
    for named in given.code:
        trusted_modules.update(_packages(named))
    set_parsing_settings(import_path_allowlist=[*trusted_modules])
    return rest


def _packages(named: str) -> list[str]:
    """Return the names of the modules that a `--code` argument makes available.

    For a folder these are its modules, except any that an installed package of the same name would shadow.
    """
    folder, name = Path(named).resolve(), named.strip()
    if name and folder.is_dir() and not name.isidentifier():
        sys.path.append(str(folder))
        names = {path.stem for path in folder.iterdir() if path.stem.isidentifier()}
        origins = {name: Path(spec.origin) for name in names if (spec := find_spec(name)) and spec.origin}
        return [name for name, origin in origins.items() if folder in origin.parents]
    try:
        if all(map(str.isidentifier, named.split("."))) and find_spec(named) is not None:
            return [named]
    except (ImportError, ValueError):
        pass
    raise InputError(f"--code: expected an importable package or module, or a folder such as ., got {named!r}")


def _refuse_functions(kind: type, options: Mapping[str, Any]) -> None:
    """Refuse functions that a recipe passes to a class.

    Functions of `lit_layers.functional` and of `--code` packages are allowed, and so are default arguments.
    """
    pure = ("lit_layers.functional.", *(f"{package}." for package in trusted_modules))
    for name, value in options.items():
        for each in value if isinstance(value, list | tuple) else [value]:
            path = f"{getattr(each, '__module__', '')}.{getattr(each, '__name__', '')}"
            is_function = callable(each) and hasattr(each, "__name__") and not isinstance(each, type)
            if is_function and not path.startswith(pure) and not _is_default(kind, name, each):
                known = "what lit_layers.functional or --code PACKAGE defines"
                raise InputError(f"{name}: a recipe names no function but {known}, got {path}")


def _is_default(kind: type, name: str, value: Any) -> bool:
    options = [inspect.signature(each.__init__).parameters.get(name) for each in kind.__mro__]
    return any(each is not None and each.default == value for each in options)


def _env_variable(name: str, *default: Any) -> Any:
    """Return the value of `${oc.env:NAME}` in a recipe; secrets are refused, because options are saved with the run."""
    if _SECRET.search(name):
        raise InputError(f"a recipe reads no variable that may hold a secret, got ${{oc.env:{name}}}")
    return oc.env(name, *default)


def _instantiate(class_type: Any, *args: Any, **kwargs: Any) -> Any:
    name = next((each for each in ("api_key", "host", "settings") if kwargs.get(each)), None)
    # Refuse an address or key for a class of Lightning: with it, a recipe could send the user's API key to any server.
    if name and class_type.__module__.startswith("lightning."):
        raise InputError(f"{name}: a recipe names no address and no key: set a variable of {class_type.__name__}")
    _refuse_functions(class_type, kwargs)
    made = class_type(*args, **kwargs)
    if (file := getattr(made, "code_file", None)) is not None:
        raise InputError(f"task: a recipe names no task file, which is code, got {file}: use lit-layers intervene")
    return made


add_instantiator(_instantiate, object)  # all classes: naming Analysis here would import torch even for `--help`
# Write as text the defaults that YAML cannot represent, e.g. an enum of Timer or the device of weight averaging.
yaml.SafeDumper.add_multi_representer(object, lambda dumper, it: dumper.represent_str(str(getattr(it, "value", it))))
OmegaConf.register_resolver("oc.env", _env_variable, replace=True)
# Only fields annotated with a class are instantiated. Fields annotated with Any are left as they are.
set_parsing_settings(
    import_path_denylist=["*"], import_path_allowlist=[*MODULES], instantiate_subclass_spec_in_any=False
)


def find_recipe(name: str | Path) -> Path:
    """Return the path of a recipe: an existing file, or a recipe in this package such as quickstart/gpt2.

    Raises:
        InputError: neither exists.
    """
    if os.path.isfile(name):
        return Path(name)
    plain = _recipe_name(name)
    if plain in shipped_recipes():
        return shipped_recipes()[plain]
    hint = did_you_mean(plain, shipped_recipes(), "of the package's recipes one is quickstart/gpt2", most=1)
    raise InputError(f"no recipe {str(name)[:200]!r}, neither a file nor one that comes with the package; {hint}")


@functools.cache
def shipped_recipes() -> dict[str, Path]:
    """Return the paths of all recipes in this package by name, such as `quickstart/gpt2` or `wandb_configs/default`."""
    base = _PACKAGE / "shipped"  # in a wheel; a checkout has these folders next to the package
    base = base if base.is_dir() else _PACKAGE.parent
    files = [file for folder in ("recipes", "wandb_configs") for file in sorted((base / folder).rglob("*.yaml"))]
    return {_recipe_name(file.relative_to(base)): file for file in files}


def _recipe_name(file: str | Path) -> str:
    return Path(file).as_posix().removesuffix(".yaml").removeprefix("recipes/")
