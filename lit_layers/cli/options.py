"""The options of a verb: its function's parameters, from the command line and YAML recipes, checked by their types.

A parameter without a default is required, the docstring has its words, and `Annotated[int, COUNT]` its range. A
dataclass among the parameters stands for its fields: options that several functions share.
"""

import dataclasses
import functools
import inspect
import re
import tempfile
from argparse import Action
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import docstring_parser
from jsonargparse import SUPPRESS, ActionConfigFile, DefaultHelpFormatter, Namespace
from jsonargparse.typing import register_type
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from lit_layers.cli.console import QUIET, VERBOSE
from lit_layers.cli.recipes import (
    HELP,
    RecipeParser,
    blaming_classes,
    find_recipe,
    placed,
    placed_path,
    recipe_file,
    trust_code,
)
from lit_layers.errors import InputError, refused
from lit_layers.schema import Range, refuse_outside

T = TypeVar("T")
_PLAIN = (str, int, float, tuple, Path)  # other classes are named by class_path
Steps = list[int] | dict[str, int | list[int]] | str
WRITTEN = ("export", "pictures", "json", "cache", "offload")  # besides its root


class Names(tuple[str, ...]):
    """Names: a list in a recipe, with commas between them on a command line."""

    def __str__(self) -> str:
        return ",".join(self)


class Numbers(tuple[int, ...]):
    """Whole numbers of at least 0: a list in a recipe, with commas between them on a command line."""

    def __str__(self) -> str:
        return ",".join(map(str, self))


class Pairs(tuple[tuple[str, str], ...]):
    """Names with a value each: a mapping in a recipe, NAME=VALUE,... on a command line."""

    def __str__(self) -> str:
        return ",".join(map("=".join, self))


def _names(value: Any) -> Names:
    parts = [part.strip() for part in (value.split(",") if isinstance(value, str) else value)]
    if isinstance(value, Mapping) or not (names := [part for part in parts if part]):
        raise ValueError(f"expected names such as a,b, got {value}")
    return Names(dict.fromkeys(names))


def _numbers(value: Any) -> Numbers:
    parts = value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else [value]
    if not parts or not all(re.fullmatch(r"\s*[0-9]+\s*", str(part)) for part in parts):
        raise ValueError(f"expected numbers such as 1,5,9, got {value}")
    return Numbers(dict.fromkeys(map(int, parts)))


def _pairs(value: Any) -> Pairs:
    """What has no = of its own belongs to the value before it, which has a comma: `run=GPT-2, seed 1`."""
    if not isinstance(value, str | Mapping):
        raise ValueError(f"expected NAME=VALUE,..., got {value}")
    pairs: list[tuple[str, str]] = []
    for part in value.split(",") if isinstance(value, str) else [f"{name}={each}" for name, each in value.items()]:
        name, equals, text = part.partition("=")
        if not equals and pairs:
            pairs[-1] = pairs[-1][0], f"{pairs[-1][1]},{part}".strip(", ")
        elif not (name.strip() and text.strip()):
            raise ValueError(f"expected NAME=VALUE,..., got {part.strip()!r}")
        else:
            pairs.append((name.strip(), text.strip()))
    return Pairs(pairs)


def _path(value: Any) -> Path:
    if not str(value).strip():  # which would be the working directory, or a folder that nobody sees
        raise ValueError(f"expected a file or folder, got {str(value)!r}")
    return Path(value)


register_type(Path, str, _path, type_check=isinstance)
register_type(Names, list, _names)
register_type(Numbers, list, _numbers)
register_type(Pairs, dict, _pairs)


class Recipe:
    """A command line with its recipes, which a verb can read again, with other defaults.

    Words of `fit` before all options are names of recipes.

    Raises:
        InputError: a package of `--code`, or a recipe, that is not there.
    """

    def __init__(self, verb: Callable[..., Any], argv: list[str]) -> None:
        if verb.__name__ == "fit":
            names = [*takewhile(lambda word: not word.startswith("-"), argv)]
            argv = [*(f"--config={find_recipe(name)}" for name in names), *argv[len(names) :]]
        self.verb = verb
        self.takes_classes = any("analyses" in inspect.signature(part).parameters for part in _parts(verb))
        self.argv = trust_code(argv) if self.takes_classes else argv
        self.parser = parser_of(verb, epilog=f"--code PACKAGE: {HELP}." if self.takes_classes else None)
        if self.argv[:1] in (["-h"], ["--help"]) and self.argv[1:] in [[name] for name in self.parser.classes]:
            self.parser.shown, self.argv = self.argv[1], self.argv[:1]

    @functools.cached_property
    def options(self) -> Namespace:
        """What it says, read once; raises what `read` does."""
        return self.read()

    def read(self, **defaults: Any) -> Namespace:
        """What it says.

        Raises:
            InputError: an option that is unknown, missing, out of range or of another kind than its type says.
        """
        self.parser.set_defaults(**defaults)
        options = _parsed(self.parser, self.argv)
        for action in self.parser._actions:
            name, kind, value = action.dest, getattr(action, "_typehint", None), options.get(action.dest)
            is_written = name in ("root", *WRITTEN)
            words = self.typed(name) if is_written or kind == str | None else []
            if words and value is None and words[-1] != "null":  # YAML reads ~ and --- as nothing: here they are words
                options[name] = value = words[-1]
            if is_written and str(value).startswith("~"):  # a shell leaves it so behind `--root=`
                raise InputError(f"{name}: expected a whole path, got {str(value)!r}, with ~ not written out")
            if isinstance(value, str) and not value.strip() and name != "separator":  # a variable that is not set
                raise InputError(f"{name}: expected a name or a path, got {value!r}")
            _refuse_out_of_range(action, value)
        return self.checked(options)

    def typed(self, name: str) -> list[str]:
        """The values that the command line, and no recipe, gives an option; of a flag the word behind it."""
        values = []
        for word, following in pairwise([*self.argv, ""]):
            option, sign, value = word.partition("=")
            if option.replace("-", "_") == f"__{name}":
                values.append(value if sign else following)
        return values

    def checked(self, options: Namespace) -> Namespace:
        """Options whose classes reach only where they may."""
        self._placed(options)
        for name in WRITTEN:
            value = options.get(name)
            if value is not None and value != self.parser.get_default(name):
                roots: list[Any] = [*filter(None, [*(options.get("runs") or []), options.get("root")])] or ["."]
                options[name] = type(value)(placed_path(name, str(value), roots, self.argv))
        return options

    def _placed(self, options: Namespace) -> Namespace:
        return placed(options, options.root or "checkpoints", self.argv) if self.takes_classes else options

    def arguments(self) -> dict[str, Any]:
        """The arguments of the verb."""
        return arguments(self.verb, {**vars(self.options), "recipe": self})

    def group(self, kind: type[T], options: Namespace) -> T:
        """The options of a group, as its dataclass."""
        return kind(**arguments(kind, vars(options)))

    def instantiated(self) -> Any:
        """The options, with all classes that they name instantiated.

        Raises:
            InputError: what a class refuses.
        """
        options = self._placed(self.options)
        with blaming_classes(made=True):
            return self.parser.instantiate_classes(options)

    def made(self, name: str, options: Namespace) -> Any:
        """What an option names by class, instantiated, and nothing else."""
        alone = self.parser.get_defaults()
        alone[name] = self._placed(options)[name]
        with blaming_classes(made=True):
            return self.parser.instantiate_classes(alone)[name]


def parser_of(verb: Callable[..., Any], *, epilog: str | None = None) -> RecipeParser:
    """A parser with an option for each parameter of a verb, and `--config` for recipes."""
    doc = docstring_parser.parse(inspect.getdoc(verb) or "")
    parser = RecipeParser(
        prog=verb.__name__ if _is_group(verb) else f"lit-layers {verb.__name__}",
        description=" ".join(filter(None, [doc.short_description, doc.long_description])),
        epilog=epilog,
        formatter_class=HelpFormatter,
        exit_on_error=False,
        parser_mode="omegaconf+",
        allow_abbrev=False,
    )
    _add_options(parser, verb)
    parser.add_argument(
        "-c",
        "--config",
        action=_RecipeFile,
        help="a YAML recipe with values for these options; of several, later ones win",
    )
    parser._actions[-1].help = "print the recipe that these options make, and end"
    heeded: Any = {"action": _Heeded, "nargs": 0, "dest": SUPPRESS, "default": SUPPRESS}
    parser.add_argument(*QUIET, help="print only results, warnings and refusals", **heeded)
    parser.add_argument(*VERBOSE, help="print a line for everything that is done, and tracebacks of failures", **heeded)
    return parser


class _RecipeFile(ActionConfigFile):
    """A recipe, by its file or its name in the package."""

    def __call__(self, parser: Any, options: Any, value: Any, word: str | None = None) -> None:
        super().__call__(parser, options, recipe_file(value), word)


class _Heeded(Action):
    """An option for the help alone: the command heeded it before its verb reads the others."""

    def __call__(self, *_: Any, **__: Any) -> None: ...


def arguments(function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a function among options, those of a group as an instance of its dataclass."""
    kinds = {name: each.annotation for name, each in inspect.signature(function, eval_str=True).parameters.items()}
    return {
        name: kind(**arguments(kind, options)) if _is_group(kind) else options[name] for name, kind in kinds.items()
    }


def given(group: Any) -> dict[str, Any]:
    """The options of a group that are not at their defaults."""
    values = {field.name: (getattr(group, field.name), field.default) for field in dataclasses.fields(group)}
    return {name: value for name, (value, default) in values.items() if value != default}


def _parsed(parser: RecipeParser, argv: list[str]) -> Any:
    """What a command line and its recipes say.

    Raises:
        InputError: a recipe that is no YAML, not UTF-8, or with a `${...}` for nothing.
    """
    try:
        with blaming_classes(made=False):
            return parser.parse_args(_spelt(parser, argv))
    except (OmegaConfBaseException, YAMLError) as error:
        sentence = " ".join(str(error).partition("\n    full_key:")[0].split())
        sentence = sentence.removeprefix("InputError raised while resolving interpolation: ")
        option = getattr(error, "full_key", None)
        raise InputError(f"{option}: {sentence}" if option else sentence) from error
    except UnicodeDecodeError as error:
        raise InputError(f"config: a recipe is not UTF-8 ({error}): convert it with iconv") from error


def _parts(verb: Callable[..., Any]) -> list[Any]:
    """A verb and the groups among its parameters."""
    return [verb, *filter(_is_group, inspect.get_annotations(verb, eval_str=True).values())]


def _add_options(parser: Any, function: Callable[..., Any]) -> None:
    """Adds an option for each parameter of a function, or each field of a dataclass, to a parser."""
    doc, *inherited = [docstring_parser.parse(part.__doc__ or "") for part in getattr(function, "__mro__", [function])]
    words = {each.arg_name: each.description for part in (*inherited, doc) for each in part.params}
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        (kind, allowed), default = _with_range(parameter.annotation), parameter.default
        if get_origin(kind) is list and default is not parameter.empty:  # of a dataclass a factory
            default = []
        is_required = default is parameter.empty
        if kind is Recipe:
            continue
        if _is_group(kind):
            _add_options(parser, kind)
            continue
        if isinstance(allowed, type):
            _add_options_of(parser, name, allowed, default, get_args(parameter.annotation)[2])
            continue
        if inspect.isclass(kind) and not issubclass(kind, _PLAIN):
            shown: dict[str, Any] = {"as_group": False, "help": words[name], "metavar": "CLASS"}
            parser.add_subclass_arguments(kind, name, fail_untyped=False, required=is_required, **shown)
            continue
        options: dict[str, Any] = {"type": kind, "help": " ".join((words[name] or "").split())}
        if not is_required:
            options["default"] = default
        parts = [part for part in get_args(kind) if part is not type(None)]
        if type(None) in get_args(kind) and inspect.isabstract(parts[0]):
            options["type"] = parts[0]  # named by its class; what is wrong with that is said of one kind, not of two
        if len(parts) == 1 and get_origin(parts[0]) is Literal:
            options["metavar"] = f"{{{','.join(get_args(parts[0]))}}}"
        if kind is bool and default is False:
            options = {"action": "store_true", "help": options["help"]}
        if parameter.kind is parameter.KEYWORD_ONLY or _is_group(function):
            names = list(dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"]))
            options |= {"required": True} if is_required else {}
        else:
            names = [name]
            if get_origin(kind) is list:
                options |= {"type": get_args(kind)[0], "nargs": "*"}
            elif not is_required:
                options["nargs"] = "?"
        action = parser.add_argument(*names, **options)
        action.allowed, action.is_needed = allowed, is_required  # `required` is unset as it parses
        if action.nargs == "*":
            action.required, action.default = False, []


def _add_options_of(parser: RecipeParser, name: str, kind: type, defaults: Any, ranges: Mapping[str, Range]) -> None:
    """Adds the options of a class, as `--name.option`: `Annotated[Mapping, Class, ranges] = defaults`."""
    parser.classes += (name,)
    words = f"--help {name}: the options of {kind.__name__}, --{name}.OPTION."
    parser.epilog = " ".join(filter(None, [words, parser.epilog]))
    parser.add_class_arguments(kind, name, instantiate=False, fail_untyped=False, sub_configs=True)
    parser.set_defaults({f"{name}.{option}": value for option, value in defaults.items()})
    action: Any
    for action in parser._actions:
        if action.dest.startswith(f"{name}."):
            action.allowed = ranges.get(action.dest.removeprefix(f"{name}."))


def _with_range(kind: Any) -> tuple[Any, Any]:
    return get_args(kind)[:2] if get_origin(kind) is Annotated else (kind, None)


def _refuse_out_of_range(action: Action, value: Any) -> None:
    """Refuse a number outside the range that its option was declared with; words and times have none.

    Raises:
        InputError: naming it, what is expected and what came.
    """
    allowed = getattr(action, "allowed", None)
    if allowed is not None and not isinstance(value, str | Mapping | Namespace):
        refuse_outside("", {action.dest: allowed}, {action.dest: min(value) if isinstance(value, tuple) else value})


def _is_group(kind: Any) -> bool:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def _spelt(parser: RecipeParser, argv: list[str]) -> list[str]:
    """The command line with an option for several words, given several times, as jsonargparse has it: `--option+`."""
    lists = {
        option
        for option, action in parser._option_string_actions.items()
        if getattr(action, "_typehint", None) in (list[str], list[str] | None)
    }
    parts = [word.partition("=") for word in argv]
    return [f"{option}{'+' if option in lists else ''}{equals}{value}" for option, equals, value in parts]


class HelpFormatter(DefaultHelpFormatter):
    """Shows the default of an option where the signature has one, and no types: the words say what is meant."""

    def _format_action_invocation(self, action: Any) -> str:
        value = self._format_args(action, self._get_default_metavar_for_optional(action)) if action.nargs != 0 else ""
        spellings = {each.replace("-", "_").rstrip("+"): each for each in reversed(action.option_strings)}
        options = ", ".join(reversed(spellings.values()))
        if value.startswith("\b"):  # jsonargparse would have a terminal take the blank before it back
            return options + value.removeprefix("\b")
        return f"{options} {value}".rstrip() if options else super()._format_action_invocation(action)

    def _get_help_string(self, action: Any) -> str:
        if "." in action.dest:  # of a class of a library, whose words leave that to the type
            return super()._get_help_string(action) or ""
        words = (super()._get_help_string(action) if action.help is None else action.help) or ""
        if extra := getattr(action, "extra_help", str)():
            words = f"{words.removesuffix('.')} ({_class_names(extra.lstrip(', '))})"
        default = action.default
        if default in (None, [], SUPPRESS) or action.nargs == 0 or not str(default) or "(default" in words:
            return words
        return f"{words} (default: %(default)s)"


def _class_names(extra: str) -> str:
    """Return the classes of the package by the names that recipes may call them by, without those that are private."""
    _, is_list, paths = extra.partition("known subclasses: ")
    if not is_list:
        return extra
    public = [path for path in paths.split(", ") if not path.startswith("lit_layers.") or path.count(".") == 2]
    return f"classes: {', '.join(sorted(re.sub(r'^lit_layers[.].*[.]', '', path) for path in public))}"


def refuse_beside(options: Iterable[str], cases: Iterable[tuple[Iterable[str], bool, str]]) -> None:
    """Refuses options that do not go with the others: a case says which ones, whether it applies, and why.

    Raises:
        InputError: naming the first.
    """
    for names, applies, why in cases:
        if applies and (name := next((name for name in names if name in options), None)):
            raise InputError(f"{name}: {why}: leave it out")


def refuse_unwritable(name: str, folder: Path) -> None:
    """Refuses, before anything is computed for it, a folder to be that is a file or where nothing can be written.

    Raises:
        InputError: naming the option, and the file or why.
    """
    with refused(f"{name}: cannot write to {folder}"):
        there = next((path for path in (folder, *folder.absolute().parents) if path.exists()), Path.cwd())
        if not there.is_dir():
            raise InputError(f"{name}: expected a folder, {there} is a file")
        with tempfile.TemporaryFile(dir=there):
            pass


def refuse_replacing(folder: Path, read: Iterable[str | Path | None], written: Iterable[str]) -> None:
    """Refuses a folder whose results, by their names without endings, would take the place of a file that is read.

    Raises:
        InputError: naming the file.
    """
    for path in map(Path, filter(None, read)):
        is_replaced = path.stem in written and path.resolve().parent == folder.resolve()
        if is_replaced and not path.is_dir():  # of a run, which a file of that name leaves alone
            raise InputError(f"root: {path}, which is read, would be replaced in {folder}: name another folder")
