"""How analyses, tags and numbers are written in figures and tables."""

import html
import math
from collections.abc import Iterable

from lit_layers.metrics import look_up

DASH, MINUS = "\N{EN DASH}", "\N{MINUS SIGN}"

ANALYSES = {
    "trajectory": "The path of single tokens through the layers.",
    "coupling": "How alike the blocks' Jacobians are, by their leading singular directions.",
    "token_coupling": "How alike a block acts on the tokens of a prompt, by the Jacobians between them.",
    "coupling_matrices": "The matrices behind coupling, at the last token.",
    "cross_token_influence": "How much, and in how many directions, earlier tokens reach the last one in each block.",
    "representation": "How many directions the states of a prompt fill, and how its tokens turn.",
    "label_probe": "What a linear probe can tell about the label from each layer.",
    "paths_in_plane": "The paths of a prompt's tokens through the layers, as a picture.",
    "invariance": "How well each layer tells prompts apart, and how little it minds their wording.",
    "mteb": "How well each layer does as an embedding: the main scores of MTEB's tasks.",
    "prompt_studies": "How the entropy of prompts moves with repetition, with random tokens and with length.",
    "next_token_probe": "What a linear probe can tell about the next token from each layer.",
    "lens": "What the model's own readout makes of each layer.",
    "probe": "What a linear probe of each layer can tell on a downstream task.",
    "sample_sizes": "How the test score of each layer's probe grows with the number of training rows.",
    "concept_alignment": "How far the word pairs of a relation point in one direction at each layer.",
    "prediction_residual": "How much of the next token a linear map of each layer cannot tell, by least squares.",
    "interventions": (
        "What is left when the middle blocks are skipped, repeated, reversed, shuffled or run side by side, and "
        "nothing is trained again."
    ),
    "intervene": "Scores of the model with its blocks in another order.",
    "layer_similarity": (
        "How alike the states of two layers are, and where the stages of the model begin: layers in the middle share "
        "one space."
    ),
}

_TAGS = {
    "drop_first": "first {} tokens dropped",
    "statistic": "{}",
    "control": "{}",
    "normalization": "{} normalization",
    "prompt": "prompt {}",
    "domain": "{}",
    "states": "{} states",
    "variant": "{}",
    "middle": "M = {}",
    "loops": "k = {}",
    "schedule": "{}",
    "when": "{} fine-tuning",
    "execution": "run as a {}",
    "mode": "{}",
}
_REFERENCES = {
    "majority": "majority class",
    "mean": "training mean",
    "lm_head": "model's head",
    "lm_head_closed": "model's head, probe's classes",
}
_SHOWN = {
    ("drop_first", "0"): "all tokens",
    ("drop_first", "1"): "without the first token",
    ("control", "random_labels"): "random labels",
    ("control", "untrained_model"): "untrained model",
    ("control", "relabelled_vocabulary"): "relabelled vocabulary",
    ("split", "train"): "training rows",
    ("split", "validation"): "validation rows",
    ("split", "test"): "test rows",
    ("pooling", "cls"): "class token",
    ("pooling", "mean"): "mean of the tokens",
    ("pooling", "last"): "last token",
    ("variant", "baseline"): "full model",
    ("variant", "middle_repeat"): "middle repeated",
    ("variant", "skip"): "skip",
    ("variant", "random"): "random order",
    ("variant", "looped_parallel"): "looped parallel",
    ("variant", "skip_one"): "skip one block",
    ("variant", "switch"): "switch with the next",
    ("variant", "custom"): "own schedule",
    ("execution", "loop"): "run one by one",
    ("execution", "stacked"): "run stacked",
    ("mode", "token"): "token by token",
    ("mode", "flattened"): "of flattened prompts",
    ("training", "full"): "all weights trained",
    ("training", "frozen"): "frozen encoder",
    ("of", "layer_cosine"): "by cosine",
    ("of", "layer_cka"): "by CKA",
    ("normalization", "raw"): "raw",
    ("normalization", "maxEntropy"): "share of the maximum",
}


def analysis_note(name: str) -> str:
    """Returns what an analysis does, in a sentence; one named `probe/some_task` does what `probe` does."""
    return ANALYSES.get(name) or ANALYSES.get(name.split("/")[0], "")


def escape(text: object) -> str:
    """Returns text that figures and HTML show as it is, whatever it holds."""
    return html.escape(str(text), quote=False)


def tag_text(tags: dict[str, object]) -> str:
    """Returns what a variant of a metric is called: `k = 12, median`; an empty string for no tags."""
    parts = []
    for name, value in tags.items():
        text = f"{value:g}" if isinstance(value, float) else str(value)
        if (name, text) in _SHOWN:
            parts.append(_SHOWN[name, text])
        elif name == "of":
            parts.append(f"of {look_up(text).title.removeprefix('Probe ')}")
        elif name == "reference":
            parts.append(_REFERENCES.get(text, text.replace("_", " ")))
        else:
            parts.append(_TAGS[name].format(text) if name in _TAGS else f"{name.replace('_', ' ')} = {text}")
    return ", ".join(parts)


def listing(noun: str, names: Iterable[object], most: int = 12) -> str:
    """Returns `steps 1, 2, 3 and 40 more`: so many names, and how many there are beyond them."""
    known = [str(name) for name in names]
    rest = f" and {len(known) - most} more" if len(known) > most else ""
    return f"{noun}{'s' if len(known) > 1 else ''} {', '.join(known[:most])}{rest}"


def pair_text(layer: int | None, other_layer: int | None) -> str:
    """Returns what a layer is called, or a pair: `block 1 in the directions of block 3`."""
    return f"layer {layer}" if other_layer is None else f"block {layer} in the directions of block {other_layer}"


def count(number: float | None) -> str:
    """Returns a count, short: 512, 1,500, 143k, 2.1M, 300B."""
    if number is None:
        return ""
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size and abs(number) >= 10_000:
            return f"{number / size:.3g}{suffix}"
    return f"{number:,.0f}" if abs(number) >= 10_000 or number == int(number) else f"{number:.3g}"


def value(number: float | None) -> str:
    """Returns a measured number with three to four digits; a dash where there is none."""
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


def whole(number: float) -> str:
    """Returns a number that is a whole one, or the mean of some; a dash where there is none."""
    return DASH if math.isnan(number) else f"{number:g}".replace("-", MINUS, 1)
