"""The page that goes with an exported model: where it comes from, why this layer, what it scores and costs."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from lit_layers.errors import InputError
from lit_layers.models.costs import Cost
from lit_layers.select.head import HeadFacts
from lit_layers.select.table import cost_table, markdown, measured_on, score_table

AFTER_NORM = (
    " What such a model returns as its last state has been through the final norm, which was made for the last block "
    "of the source model; the probe reads the state before it."
)
ON_HUB = re.compile(r"[\w-][\w.-]*/[\w.-]+")


@dataclass(frozen=True, kw_only=True)
class Card:
    """What is known of an exported model beside the model itself."""

    source: str  # name of the model on the Hub, or a folder
    num_layers: int  # of that model
    rule: str  # by which the layer was chosen, as in `choose_layer`
    tolerance: float | None
    metric: str  # name of all scores here
    validation: Mapping[int, float]  # layer -> score, which the choice was made on
    test_chosen: float  # of the chosen layer
    test_last: float  # of the last one
    costs: Sequence[Cost] = ()
    revision: str | None = None
    commit: str | None = None
    weights_hash: str | None = None  # of the source model; found by the export if not given
    picture: str | Path | None = None  # of the validation curve
    licence: str | None = None  # of the source model
    notes: Sequence[str] = ()  # sentences for the reader

    @classmethod
    def of(cls, content: "Card | Mapping[str, Any]") -> "Card":
        """A card of fields by name.

        Raises:
            InputError: a field that is missing or unknown.
        """
        if isinstance(content, Card):
            return content
        known = {field.name: field.default is MISSING for field in fields(cls)}
        for name in content:
            if name not in known:
                raise InputError(f"card: {name!r} is no field of a card; they are {', '.join(known)}")
        if missing := [name for name, needed in known.items() if needed and name not in content]:
            raise InputError(f"card: {missing[0]!r} is missing")
        return cls(**content)


def render(card: Card, facts: HeadFacts, *, package: str, picture: str | None, final_norm: bool = True) -> str:
    """The README.md of an export, in Markdown with the header that model pages of the Hub begin with.

    `package` is the one that opens the model, `picture` the name of a file beside it; `final_norm` says whether the
    model has a norm behind its last block.
    """
    name = card.source.rstrip("/").rpartition("/")[2]
    does = "a classifier" if facts.kind == "classification" else "a regression"
    given = "images" if package == "timm" else "texts"
    parts = [
        _header(card, package, facts),
        f"# {name}, cut after block {facts.layer} of {card.num_layers}, with {does} for {facts.task}",
        f"The first {facts.layer} of the {card.num_layers} blocks of `{card.source}`, unchanged, and a linear probe on "
        f"the state that the last of them leaves (before any final norm), {_pooling(facts, given)}.",
        markdown(("", ""), _facts(card, facts)),
        "## Use",
        _use(facts, given),
        f"The model alone is an ordinary model of {package}: {_plain(package)}." + (AFTER_NORM if final_norm else ""),
        "## Scores",
        f"On the validation rows, which the layer was chosen on ({card.metric}):",
        score_table(card.validation, card.metric, chosen=facts.layer),
        *([f"![{card.metric} over layers]({picture})"] if picture else []),
        "On the test rows, which no choice was made on:",
        markdown(
            ("layer", card.metric),
            [
                (f"{facts.layer} (chosen)", f"{card.test_chosen:.4f}"),
                (f"{card.num_layers} (last)", f"{card.test_last:.4f}"),
            ],
        ),
        *(["## Costs", cost_table(card.costs), measured_on(card.costs)] if card.costs else []),
        *(["## Notes", "\n".join(f"- {note}" for note in card.notes)] if card.notes else []),
        "## Licence",
        f"The weights are those of `{card.source}`, and its licence holds for them"
        + (f": {card.licence}." if card.licence else ": look there."),
    ]
    return "\n\n".join(parts) + "\n"


def _header(card: Card, package: str, facts: HeadFacts) -> str:
    content: dict[str, Any] = {"library_name": package, "tags": ["lit_layers", "truncated", facts.kind]}
    if ON_HUB.fullmatch(card.source) and not Path(card.source).exists():
        content["base_model"] = card.source
    if card.licence:
        content["license"] = card.licence
    return f"---\n{yaml.safe_dump(content, sort_keys=False, allow_unicode=True)}---"


def _facts(card: Card, facts: HeadFacts) -> list[tuple[str, str]]:
    rule = card.rule if card.tolerance is None else f"{card.rule}, tolerance {card.tolerance:g}"
    rows = [
        ("source model", card.source),
        ("revision", card.revision),
        ("commit", card.commit),
        ("hash of its weights", card.weights_hash),
        ("task", facts.task),
        ("layer", f"{facts.layer} of {card.num_layers}"),
        ("chosen by", rule),
        ("pooling", facts.pooling),
        ("tokens kept of a text", None if facts.max_tokens is None else str(facts.max_tokens)),
        ("classes", None if facts.classes is None else str(len(facts.classes))),
    ]
    return [(name, value) for name, value in rows if value is not None]


def _pooling(facts: HeadFacts, given: str) -> str:
    text = given == "texts"
    mean = "averaged over all real tokens" if text else "averaged over the patches"
    last = "taken at the last real token" if text else "taken at the last patch"
    found = {"last": last, "mean": mean, "cls": "taken at the first token"}
    return found.get(facts.pooling, f"pooled by {facts.pooling}")


def _plain(package: str) -> str:
    if package == "timm":
        return '`timm.create_model("local-dir:FOLDER", pretrained=True)`'
    return "`AutoModel.from_pretrained(FOLDER)` and `AutoTokenizer.from_pretrained(FOLDER)`"


def _use(facts: HeadFacts, given: str) -> str:
    example = '["a text", "another one"]' if given == "texts" else "pixel_values  # (n, channels, height, width)"
    lines = ["from lit_layers.select import load_classifier", "", 'classifier = load_classifier("FOLDER")']
    lines += [f"inputs = {example}", "classifier.predict(inputs)"]
    lines += ["classifier.probabilities(inputs)"] if facts.kind == "classification" else []
    return "\n".join(["```python", *lines, "```"])
