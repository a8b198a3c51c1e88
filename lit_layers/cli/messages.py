"""A parser's complaint as one sentence: the option, what came, what would be right."""

import difflib
import re
from collections.abc import Iterable

_MOST = 10_000  # characters of a message that are looked at
_LONG = 400  # characters; a nested complaint repeats itself beyond that
_UNION = re.compile(
    r"Does not validate against any of the Union subtypes Subtypes: \[(?P<kinds>.*?)\] Errors: .*"
    r"Given value type: .*? Given value: (?P<value>.*)$"
)
_NESTED = re.compile(  # an option of a class that is named elsewhere
    r"Parser key \"(?P<group>[^\"]+)\": .* Errors: - (?P<said>.*?)(?: - Expected .*)? Given value type: .*"
    r"NestedArg\(key='(?P<name>[^']+)'"
)
_IN_CLASS = re.compile(  # the same, in a recipe
    r"Parser key \"(?P<group>[^\"]+)\": Does not validate .*? Errors: - (?P<said>[\w.]+: .*?) - Expected a "
    r"<class 'NoneType'> Given value type: .*? Given value: \{'class_path'"
)
REFUSED = "a recipe names no"
_MAY_BE_NAMED = (
    "only lit_layers, torch, lightning, transformers, timm, torchmetrics and your own code, with --code PACKAGE"
)
_REFUSED = re.compile(  # deep in an account of all the kinds that a value might have been
    rf"(?P<said>[\w.]+: {REFUSED} .*?, got \S+)|Importing '(?P<path>[^']+)' is not allowed"
    r"|Import path (?P<other>\S+) does not correspond to a subclass of (?P<kind>\w+)"
)
_REWORDED = [
    (r"Expected a typing\.Literal\[(.*?)\]\. Got value: (.*)", r"expected one of \1, got \2"),
    (
        r"Type \S*Callable\[.*?\] expects a function or a callable class: (.*?)\.? Got value: (.*)",
        r"expected the import path of a function, package.module.function, got \2: \1",
    ),
    (r"Expected a dot import path string: (.*)", r"expected the import path of a function, such as a.b.c, got \1"),
    (r"<class '(?:[\w.]+\.)?(\w+)'>", r"\1"),
    (r"Parser key \"([^\"]+)\": ?", r"\1: "),
    (r"Problem with given class_path '([^']+)': ", r"class_path \1: "),
    (r"Expected a (\w+)\. Got value: (.*)", r"expected \1, got \2"),
    (
        r"Not a valid subclass of (\w+)\. Got value: (.*?) Subclass types expect.*",
        r"expected a \1, by class_path, got \2",
    ),
    (r"expected bool\b", "expected true or false"),
    (r"Not of type \w+: ", ""),
    (r"^the following arguments are required: (.*)", r"missing: \1; give it in the recipe or on the command line"),
]


def one_sentence(message: str, options: Iterable[str] = ()) -> str:
    """Returns jsonargparse's message without its layout; a misspelt option gains the nearest of `options`."""
    if len(message) > _MOST:  # a value of megabytes, for which the patterns would take hours
        message = f"{message[: _MOST // 2]} ... {message[-_MOST // 2 :]}"
    text, options = " ".join(message.split()), list(options)
    if unknown := re.match(r"unrecognized arguments: (--([^\s=]+))", text):
        return f"unknown option {unknown[1]}{_nearest(unknown[2], options, '--')}"
    if unknown := re.match(r"Group '([^']+)' does not accept option '([^']+)'", text):
        key = f"{unknown[1]}.{unknown[2]}"
        return f"unknown key {key} in the recipe{_nearest(key, options)}"
    if unknown := re.match(r"Option '([^']+)' is not accepted", text):
        near = _nearest(unknown[1], options) or ": no class given there has an option of that name"
        return f"unknown key {unknown[1]} in the recipe{near}"
    if refused := _REFUSED.search(text):
        where = re.match(r'Parser key "([^"]+)"', text)
        said = refused["said"] or f"{REFUSED} {refused['path']}: {_MAY_BE_NAMED}"
        if refused["other"]:
            said = f"{REFUSED} class here but {refused['kind']}, got {refused['other']}"
        return f"{where[1]}{'.' if refused['said'] else ': '}{said}" if where else said
    if nested := _NESTED.match(text):
        key, said = f"{nested['group']}.{nested['name']}", nested["said"]
        if not said.startswith(f"{nested['name']}: "):
            return f"unknown option --{key}: the class given for {nested['group']} has none of that name"
        text = f"{nested['group']}.{said}"
    if inner := _IN_CLASS.match(text):
        text = f"{inner['group']}.{inner['said']}"
    if union := _UNION.search(text):
        place = text[: union.start()].partition(" - Expected a path but ")[
            0
        ]  # a recipe of its own might have been meant
        text = f"{place.rstrip()} expected {_plainly(union['kinds'])}, got {union['value']}".lstrip()
    for pattern, words in _REWORDED:
        text = re.sub(pattern, words, text)
    return text if len(text) <= _LONG else f"{text[:_LONG].rstrip()} ..."


def _plainly(kinds: str) -> str:
    """Python's names of kinds of values as a user would write them."""
    kinds = re.sub(r"typing\.Literal\[(.*?)\]", r"\1", re.sub(r"<class '([^']+)'>", r"\1", kinds))
    kinds = re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", kinds)
    kinds = kinds.replace("NoneType", "null").replace("dict[str, Any]", "keys and values")
    kinds = re.sub(r"\bNames\b", "names such as a,b", re.sub(r"\bNumbers\b", "numbers such as 1,5,9", kinds))
    is_pair = kinds.count(", ") == 1
    return kinds.replace(", ", " or ") if is_pair else f"one of {kinds}"


def _nearest(word: str, options: list[str], dashes: str = "") -> str:
    near = difflib.get_close_matches(word, options, n=1)
    return f"; did you mean {dashes}{near[0]}?" if near else ""
