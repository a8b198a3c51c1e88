"""Display texts of analyses, tags and numbers in figures and tables."""

import html
import math
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path

from lit_layers.metrics import look_up

DASH, MINUS = "\N{EN DASH}", "\N{MINUS SIGN}"

_LABELS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
ANALYSES: dict[str, str] = _LABELS["analyses"]
BLOCKS: dict[str, str] = _LABELS["blocks"]
_NAMES = ("Brier", "Jacobian", "Kendall", "Matthews", "Pearson", "Spearman")


def analysis_note(name: str) -> str:
    """Return a sentence that describes an analysis; for `probe/some_task` it is the sentence of `probe`."""
    return ANALYSES.get(name) or ANALYSES.get(name.split("/")[0], "")


def escape(text: object) -> str:
    """Return text with `&`, `<` and `>` escaped, so that figures and HTML show them."""
    return html.escape(str(text), quote=False)


def mid_sentence(title: str) -> str:
    """Return a title with a lower-case first letter, e.g. `prompt entropy`.

    Names and abbreviations keep their capital: `Pearson correlation`, `DiME of halves`.
    """
    word = title.partition(" ")[0]
    return title if word.startswith(_NAMES) or not word[1:].islower() else title[0].lower() + title[1:]


def tag_text(tags: dict[str, object]) -> str:
    """Return the display text of tags, e.g. `k = 12, median`; an empty string without tags."""
    parts = []
    for name, value in tags.items():
        text = f"{value:g}" if isinstance(value, float) else str(value)
        if (label := _LABELS["values"].get(name, {}).get(text)) is not None:
            parts.append(label)
        elif name == "of":
            parts.append(f"of {mid_sentence(look_up(text).title).removeprefix('probe ')}")
        elif name == "reference":
            parts.append(text.replace("_", " "))
        else:
            template = _LABELS["tags"].get(name)
            parts.append(template.format(text) if template else f"{name.replace('_', ' ')} = {text}")
    return ", ".join(parts)


def listing(noun: str, names: Iterable[object], most: int = 12) -> str:
    """Return a text such as `steps 1, 2, 3 and 40 more`, with at most `most` names."""
    texts = [str(name) for name in names]
    rest = f" and {len(texts) - most} more" if len(texts) > most else ""
    return f"{noun}{'s' if len(texts) > 1 else ''} {', '.join(texts[:most])}{rest}"


def pair_text(layer: int | None, other_layer: int | None) -> str:
    """Return the display text of a layer, or of a pair of blocks: `block 1 in the directions of block 3`."""
    return f"layer {layer}" if other_layer is None else f"block {layer} in the directions of block {other_layer}"


def count(number: float | None) -> str:
    """Return a count in short form: 512, 1,500, 143k, 2.1M, 300B."""
    if number is None:
        return ""
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size and abs(number) >= 10_000:
            return f"{number / size:.3g}{suffix}"
    return f"{number:,.0f}" if abs(number) >= 10_000 or number == int(number) else f"{number:.3g}"


def value(number: float | None) -> str:
    """Return a number as short text, below 1e-4 and from 1e5 on with an exponent; a dash for None and NaN."""
    if number is None or math.isnan(number):
        return DASH
    if math.isinf(number):
        return "\N{INFINITY}" if number > 0 else MINUS + "\N{INFINITY}"
    size = abs(number)
    if size != 0 and (size >= 1e5 or size < 1e-4):
        text = f"{number:.2e}".replace("e-0", "e-").replace("e+0", "e")
    elif 0 < size < 1e-2:
        text = f"{number:.4f}"
    else:
        text = f"{number:.1f}" if size >= 1000 else f"{number:.2f}" if size >= 10 else f"{number:.3f}"
    return text.replace("-", MINUS, 1) if number < 0 else text


def p_text(p: float | None, least: float = 1e-300) -> str:
    """Return a p-value with two digits: 0.057, 1.4e-10, < 1e-300.

    A p-value below `least` is shown as a bound, never as 0. None and NaN give an empty string.
    """
    if p is None or math.isnan(p):
        return ""
    if p < least:
        return f"< {least:g}"
    return f"{p:.1e}".replace("e-0", "e-") if p < 9.5e-4 else f"{p:.2g}"


def p_equation(p: float | None, least: float = 1e-300) -> str:
    """Return a p-value as an equation: p = 0.057, p < 1e-300."""
    text = p_text(p, least)
    return f"p {text}" if text.startswith("<") else f"p = {text}"


def number_text(metric: str) -> Callable[[float], str]:
    """Return the function that formats values of a metric."""
    return whole if look_up(metric).whole else value


def whole(number: float) -> str:
    """Return the text of a number: an integer in full, another number to three significant digits, NaN as a dash."""
    text = f"{number:.0f}" if number % 1 == 0 else f"{number:.3g}"
    return DASH if math.isnan(number) else text.replace("-", MINUS, 1)
