"""What a recipe may name: classes of a few packages and of the user's own code, where a field asks for such a class.

And what these may reach: they write below the recipe's root and in folders that the command line names, and to no
address.
"""

import argparse
import contextlib
import difflib
import functools
import importlib
import inspect
import os
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from jsonargparse import ArgumentParser, Namespace, add_instantiator, set_parsing_settings
from omegaconf import OmegaConf
from omegaconf.resolvers import oc

from lit_layers.errors import InputError, did_you_mean

own_code: set[str] = set()  # packages of --code, whose functions may also be named
PACKAGES = ("lit_layers", "torch", "lightning", "transformers", "timm", "torchmetrics")
HELP = "lets recipes name the classes of this package, or of all modules of this folder; command line only, repeatable"
_OF_LIGHTNING = (  # its demonstrations fetch data, and its server starts a process
    *(f"lightning.pytorch.{part}" for part in ("accelerators", "callbacks", "loggers", "plugins", "profilers")),
    *("lightning.pytorch.strategies", "lightning.fabric.plugins"),
)
_OWN_PLACES = (".cache", ".results", ".root", ".store.folder")  # where classes of lit_layers write to
_PLACES = {"default_root_dir", "dir", "dirpath", "exclude_batches_path", "nvme_path", "root_dir", "save_dir"}
_PLACES |= {"staging_dir"}
_NO_PATH = re.compile(r"^~|://")
_LEAVES = re.compile(rf"{_NO_PATH.pattern}|^/|(^|/)\.\.(/|$)")
_ADDRESSES = {"api_key", "host", "settings", "tracking_uri"}
_SECRET = re.compile("key|token|secret|passw|credential", re.IGNORECASE)
_HARMLESS = ("lit_layers", *_OF_LIGHTNING, "lightning.pytorch.cli", "torch.distributed", "torch.optim")
_OPTIONS = ("init_args", "dict_kwargs")  # of a class
_PURE = "lit_layers.functional"  # and these, from tensors to tensors
_MOST_SHOWN = 400  # characters; a nested complaint repeats itself beyond that
_UNION = re.compile(
    r"Does not validate against any of the Union subtypes Subtypes: \[(?P<kinds>.*?)\] Errors: .*"
    r"Given value type: .*? Given value:(?P<value>.*)$"
)
REFUSED = "a recipe names no"
_MAY_BE_NAMED = f"only {', '.join(PACKAGES)} and your own code, with --code PACKAGE"
_REFUSED = re.compile(  # deep in an account of all the kinds that a value might have been
    rf"(?P<whole>[\w.]+: {REFUSED} .*?, got \S+)|Importing '(?P<path>[^']+)' is not allowed"
    r"|Import path (?P<other>\S+) does not correspond to a subclass of (?P<kind>\w+)"
)
_ROOMS = ("lit_layers.analyses", "lit_layers.data", "lit_layers.series", "lit_layers.training")
_MISSPELT = re.compile(r"(?:string: |'class_path': ')(?P<name>[A-Za-z]\w*)|has no attribute '(?P<of>\w+)'$")
_REWORDED = [
    (r"Parser key \"([^\"]+)\"(?: element \d+)?: ?", r"\1: "),
    (r"<class '(?:[\w.]+\.)?(\w+)'>", r"\1"),
    (r"typing\.Literal\[(.*?)\]", r"one of \1"),
    (r"Expected an? (.*?)\. Got value: ?(.*)", r"expected \1, got \2"),
    (r" Subclass types expect.*", ""),
    (r"^the following arguments are required: (.*)", r"missing: \1; give it in the recipe or on the command line"),
]


class RecipeParser(ArgumentParser):
    """Reads recipes as data, and says what is wrong in one sentence, not after fifty lines of usage.

    A recipe names classes, and each is made only where it is a kind of the class that the field asks for: nothing in a
    field that takes any value, and no function but of the user's own code.

    Only `--help trainer` shows the options of a library's class, such as Lightning's Trainer. `classes` are the names
    of such options, `shown` the one whose help is asked for.
    """

    classes: tuple[str, ...] = ()
    shown: str = ""

    def format_help(self) -> str:
        shown = [action for action in self._actions if (self._class_of(action) or "") == self.shown]
        words = [action.dest for action in shown if not action.option_strings]
        words += [
            f"--{action.dest} {action.dest.upper()}"
            for action in shown
            if action.option_strings and getattr(action, "is_needed", 0)
        ]
        self.usage = " ".join([self.prog, *dict.fromkeys(words), "[options]"])
        for group in self._action_groups:
            group._group_actions = [action for action in group._group_actions if action in shown]
        self._action_groups = [group for group in self._action_groups if group._group_actions]
        return super().format_help()

    def _class_of(self, action: Any) -> str | None:
        option = next(iter(action.option_strings), "").removeprefix("--").partition(".")[0]
        return option if option in self.classes else None

    def error(self, message: str, ex: Exception | None = None) -> Any:
        options = [*self.get_defaults(skip_validation=True).keys(branches=True)]
        sentence = one_sentence(message, options, ex)
        if sentence.startswith("unknown") and "did you mean" not in sentence:
            is_verb = self.prog.startswith("lit-layers ")  # else a recipe of its own, whose keys are all that there is
            keys = ", ".join(key for key in options if key != "config")
            sentence += f"; see `{self.prog} --help`" if is_verb else f"; the keys are {keys}"
        raise InputError(sentence) from ex

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
        made = pkgutil.resolve_name(given) if is_under(given, {*PACKAGES, *own_code}) else None
    if isinstance(made, type) and issubclass(made, kinds):
        return
    if _takes_callables(hint) and is_under(getattr(made, "__module__", None) or "", {_PURE, *own_code}):
        return
    expected = " or ".join(kind.__name__ for kind in kinds) or f"what {_PURE} or --code PACKAGE defines"
    path = given if is_class else f"{getattr(given, '__module__', '')}.{getattr(given, '__name__', given)}"
    raise TypeError(f"{where}: {REFUSED} {'class' if is_class else 'function'} here but {expected}, got {path}")


def _kinds(hint: Any) -> Iterator[type]:
    """Yields the classes that an annotation names, without those of Python itself, such as `dict` or `Callable`."""
    if isinstance(hint, type) and is_under(hint.__module__, {*PACKAGES, *own_code}):
        yield hint
    for part in get_args(hint):  # of a Callable what it takes is a list, and is not looked at
        yield from _kinds(part)


def _takes_callables(hint: Any) -> bool:
    return Callable in (hint, get_origin(hint)) or any(map(_takes_callables, get_args(hint)))


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
    except ModuleNotFoundError:
        return False
    except Exception as error:
        raise InputError(f"--code: {named.rpartition('.')[0]} cannot be imported: {error}") from error


@contextlib.contextmanager
def blaming_classes(*, made: bool) -> Iterator[None]:
    """Turn what goes wrong in the user's own code, or in any class that is `made`, into a sentence that says where.

    Raises:
        InputError: in place of any other error.
    """
    try:
        yield
    except Exception as error:
        chain: list[BaseException] = [error]  # jsonargparse wraps what a module or a constructor says
        while (inner := chain[-1].__cause__ or chain[-1].__context__) is not None:
            chain.append(inner)
        said = next((each for each in chain if isinstance(each, InputError)), None)
        for raised in (each for each in chain if not isinstance(each, InputError)):
            frames = [*traceback.walk_tb(raised.__traceback__)]
            own = [each for each in frames if is_under(each[0].f_globals.get("__name__", ""), own_code)]
            if own or (made and said is None and raised is chain[-1] and not isinstance(raised, OSError)):
                where = "".join(f"{each.f_code.co_filename}, line {line}: " for each, line in (own or frames)[-1:])
                words = " ".join(f"{type(raised).__name__}: {raised}".split())
                raise InputError(f"{where}{words}: mend it, or leave its class out of the recipe") from error
        if made and said is not None:
            raise said from None
        raise


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


def placed(options: Namespace, root: str | Path, argv: list[str]) -> Namespace:
    """Return the options with the relative places of their classes below `root`.

    Raises:
        InputError: a place outside of `root` or an address that the command line does not name, or a class that could
            fetch or start something.
    """
    options = options.clone()
    if not isinstance(trainer := options.get("trainer", options), Namespace):
        raise InputError(f"trainer: expected the options of a Trainer, got {trainer!r}")
    for where, within, name, holder in _values(options):
        value, is_own = within[name], is_under(holder, own_code)
        if name == "class_path":
            if is_own or is_under(value, own_code):
                continue
            named = pkgutil.resolve_name(value) if is_under(value, PACKAGES) else None  # others are not imported
            if not is_under(getattr(named, "__module__", ""), _HARMLESS):
                raise InputError(
                    f"{where.removesuffix('.class_path')}: {REFUSED} {value}, which could fetch or start something: "
                    "only classes of lit_layers, torch.optim, lightning's callbacks, loggers, plugins, profilers and "
                    "strategies, and your own code, with --code PACKAGE"
                )
        elif holder and not is_own and isinstance(value, str | Path):
            made = pkgutil.resolve_name(holder)
            is_ours, is_address = is_under(made.__module__, {"lit_layers"}), not _ADDRESSES.isdisjoint(where.split("."))
            is_place = where.endswith(_OWN_PLACES) and where != "series.root" if is_ours else name in _PLACES
            leaves = not is_ours and (is_address or _LEAVES.search(str(value)))
            if leaves and _is_class_default(made, name, value):
                continue
            if is_place:
                within[name] = type(value)(placed_path(where, str(value), [root], argv))
            elif leaves and (is_address or not _lies_in(str(value), [root], argv)) and value not in _words(argv):
                raise _out_of_reach(where, str(value))
    return options


def placed_path(name: str, value: str, roots: Sequence[str | Path], argv: list[str]) -> str:
    """Return a path to write to, below the first root unless it lies in one or where the command line says.

    Raises:
        InputError: a path elsewhere, naming the option.
    """
    if value in _words(argv):
        return value
    below = value if _NO_PATH.search(value) else str(Path(roots[0]) / value)
    for path in (value, below):
        if _lies_in(path, roots, argv):
            return path
    raise _out_of_reach(name, value)


def _words(argv: list[str]) -> list[str]:
    return [part for word in argv for part in (word, word.partition("=")[2]) if part]


def _lies_in(value: str, roots: Sequence[str | Path], argv: list[str]) -> bool:
    allowed = [Path(folder).resolve() for folder in (*roots, *_words(argv))]
    return not _NO_PATH.search(value) and any(Path(value).resolve().is_relative_to(place) for place in allowed)


def _out_of_reach(name: str, value: str) -> InputError:
    return InputError(
        f"{name}: a recipe reaches only its root and folders that the command line names, got {value!r}: write it "
        "relative to the root, or type it"
    )


def _values(within: Any, where: str = "", holder: str = "") -> Iterator[tuple[str, Any, Any, str]]:
    """Yield where each value among options stands, what holds it, its name there, and the class that it is for.

    A class comes before its options.
    """
    within = vars(within) if isinstance(within, Namespace) else within
    is_class = isinstance(within, Mapping) and isinstance(within.get("class_path"), str)
    if is_class:
        yield f"{where}.class_path", within, "class_path", holder
        holder = within["class_path"]
    for name, part in list(within.items()) if isinstance(within, Mapping) else enumerate(within):
        is_named = isinstance(within, Mapping) and not (is_class and name in _OPTIONS)
        at = f"{where}.{name}".lstrip(".") if is_named else where
        if isinstance(part, Namespace | Mapping | list | tuple):
            yield from _values(part, at, "lightning.Trainer" if at == "trainer" else holder)
        elif name != "class_path":
            yield at, within, name, holder


def _is_class_default(made: Any, name: str, value: Any) -> bool:
    """Whether a class, or one that it is derived from, has this value where nothing else is said."""
    options = [inspect.signature(kind.__init__).parameters for kind in getattr(made, "__mro__", ())]
    return any(name in each and each[name].default == value for each in options)


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


def one_sentence(message: str, options: Sequence[str] = (), error: BaseException | None = None) -> str:
    """Return jsonargparse's message on one line, in plainer words for the mistakes that people really make.

    If the parser of a class inside has refused something, that is the cause of `error`, and says it best.
    """
    text = " ".join(message.split())
    if unknown := re.match(r"unrecognized arguments: (--([^\s=]+))", text):
        return f"unknown option {unknown[1]}{_nearest(unknown[2], options, '--')}"
    if unknown := re.match(r"(?:Group '(.+?)' does not accept o|O)ption '(.+?)'", text):
        key = ".".join(filter(None, unknown.groups()))
        return f"unknown key {key} in the recipe{_nearest(key, options)}"
    if recipe := re.match(r"Unexpected config: ?(.*)", text):
        text = f"expected a recipe of KEY: VALUE lines, got {recipe[1] or 'an empty one'}"
    while error is not None and not isinstance(error, InputError):
        error = error.__cause__
    where = re.match(r'Parser key "([^"]+)"', text)
    if error is not None and where:
        names_option = _UNION.search(text) and not str(error).startswith(("missing: ", "unknown "))
        return _shortened(f"{where[1]}{'.' if names_option else ': '}{error}")
    if refused := _REFUSED.search(text):
        sentence = refused["whole"] or f"{REFUSED} {refused['path']}: {_MAY_BE_NAMED}"
        if refused["other"]:
            sentence = f"{REFUSED} class here but {refused['kind']}, got {refused['other']}"
        return f"{where[1]}{'.' if refused['whole'] else ': '}{sentence}" if where else sentence
    if union := _UNION.search(text):
        place = text[: union.start()].partition(" - Expected a path but ")[0]  # a recipe of its own might be meant
        kinds = re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", re.sub(r"<class '([^']+)'>", r"\1", union["kinds"]))
        kinds = re.sub(r"Literal\[(.*?)\]", r"\1", kinds).replace("NoneType", "null")
        text = f"{place.rstrip()} expected one of {kinds}, got {union['value'].strip() or repr('')}"
    for pattern, words in _REWORDED:
        text = re.sub(pattern, words, text)
    return _shortened(text) + _nearest_class(text)


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN].rstrip()} ..."


def _nearest_class(sentence: str) -> str:
    """The class of the package whose name is like the one that a sentence refuses, if that is of none."""
    if not (misspelt := _MISSPELT.search(sentence)):
        return ""
    name = misspelt["of"] or misspelt["name"]
    names = [each for room in _ROOMS for each in importlib.import_module(room).__all__ if each[0].isupper()]
    return "" if name in names else _nearest(name, names)


def _nearest(word: str, options: Sequence[str], dashes: str = "") -> str:
    near = difflib.get_close_matches(word[:_MOST_SHOWN], options, n=1)
    return f"; did you mean {dashes}{near[0]}?" if near else ""


add_instantiator(_without_code, object)  # of every class: to name Analysis would import torch for every `--help`
# Options whose defaults are no plain values, such as an enumeration of Timer and the device of weight averaging.
yaml.SafeDumper.add_multi_representer(object, lambda dumper, it: dumper.represent_str(str(getattr(it, "value", it))))
OmegaConf.register_resolver("oc.env", _variable, replace=True)
set_parsing_settings(
    import_path_denylist=["*"],
    import_path_allowlist=[*PACKAGES],
    instantiate_subclass_spec_in_any=False,
)


_PACKAGE = Path(__file__).parents[1]
_FOLDERS = ("recipes", "wandb_configs")


def find_recipe(name: str | Path) -> Path:
    """The file that a name stands for: itself where it exists, else the shipped recipe, e.g. of `quickstart/gpt2`.

    Raises:
        InputError: there is neither.
    """
    if os.path.isfile(name):
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
    return str(name if os.path.isfile(name) else shipped_recipe(name) or name)


def _name(file: str | Path) -> str:
    return Path(file).as_posix().removesuffix(".yaml").removeprefix("recipes/")
