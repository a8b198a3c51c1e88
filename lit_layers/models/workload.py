"""The work of an analysis as counts that follow from shapes, without reading a weight: the input of `--plan`."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor, nn

from lit_layers.models.view import LayeredModel

# What work is made of; a plan times each on the machine, at the sizes that are asked for:
# blocks         passes of a batch through one block; size (texts, tokens)
# head           rows of states through the model's head
# jacobians      of a block at one token; size (inputs,) where one call gives those from several tokens
# directions     decompositions of such a Jacobian into its leading singular vectors; size (vectors,)
# spectra        singular values of a prompt's states in float64; size (rows,)
# evaluations    of the loss of a probe and its gradient; size (rows, classes)
# products       FLOP of matrix products in float32 whose inner side is the width; size (columns,)
# wide products  the same in float64
# calls          of a function of an analysis' own on states in float64, timed as it is; its FLOP are taken to be those
#                of the spectrum of as many rows; size (rows,)
# steps          of a handful of operations on few numbers each, whose time does not depend on the width; no FLOP
Kind = Literal[
    "blocks",
    "head",
    "jacobians",
    "directions",
    "spectra",
    "evaluations",
    "products",
    "wide products",
    "calls",
    "steps",
]


LETTERS = 4  # of a token
BATCH_TOKENS = 8192  # places of a batch of texts whose features are kept: 8,192 x 768 x 4 B = 25 MB for a state
OF_A_BLOCK = 12  # numbers a token and width that a block holds while it runs: q, k, v, 4 d twice, a residual
OF_A_JACOBIAN = 4  # width x width matrices that one takes while it is made and decomposed
# Of a probe: the closed form and its steps, which are of few classes; a path of ten fits on four fifths of the rows.
EVALUATIONS = {"watch": 15, "record": 330}
# Steps, from the operations that torch counts: of an evaluation, where the others of a fit are shared out among them.
STEPS_OF_AN_EVALUATION = {"watch": 30, "record": 6, "fixed_c": 3}


class Sized(Protocol):
    """Data that says how much of it there is: `lit_layers.data.batches.Size`, or None."""

    def size(self) -> Any: ...


class Part(NamedTuple):
    """So many of one kind."""

    kind: Kind
    count: float
    size: tuple[int, ...] = ()
    call: Callable[[Tensor], Any] | None = None  # of "calls": on states (rows, dim)


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one checkpoint takes.

    `tokens` are those of all texts, or patches of images. Bytes are what is held at a time beside the weights: on the
    device, in the memory of the host, on the disk.
    """

    texts: int = 0
    tokens: int = 0
    parts: tuple[Part, ...] = ()
    device: float = 0
    host: float = 0
    disk: float = 0
    at_most: bool = False  # the data is not at hand yet, and may hold fewer texts

    def __add__(self, other: "Work") -> "Work":
        """One after the other: memory is taken by the larger of both."""
        return Work(
            texts=self.texts + other.texts,
            tokens=self.tokens + other.tokens,
            parts=self.parts + other.parts,
            device=max(self.device, other.device),
            host=max(self.host, other.host),
            disk=self.disk + other.disk,
            at_most=self.at_most or other.at_most,
        )

    def block_runs(self) -> float:
        """Passes of a text through one block."""
        return sum(part.count * part.size[0] for part in self.parts if part.kind == "blocks")


def passes(
    model: LayeredModel, *, texts: int, tokens: int, batch: int, kept: bool = True, at_most: bool = False
) -> Work:
    """Texts through all blocks, in batches: `kept` says whether the states of all layers of a batch are held."""
    rows = min(batch, texts) * tokens
    states = rows * model.dim * 4 * ((model.num_layers + 1 if kept else 1) + OF_A_BLOCK)
    return Work(
        texts=texts,
        tokens=texts * tokens,
        parts=(Part("blocks", model.num_layers * texts / min(batch, texts), (min(batch, texts), tokens)),),
        device=states,
        at_most=at_most,
    )


def around(model: LayeredModel, work: Work) -> Work:
    """The steps of any analysis around its work: by its texts, batches and layers, whatever their size."""
    layers, block_passes = model.num_layers, sum(part.count for part in work.parts if part.kind == "blocks")
    steps = 60 + 4 * work.texts + 30 * layers + block_passes / layers * (30 + 12 * layers)
    return Work(parts=(Part("steps", steps),))


def passes_of(model: LayeredModel, batches: Sized, *, texts: int | None = None, kept: bool = True) -> Work | None:
    """Those of all batches, or of their first texts; None of batches that do not say how many they are."""
    size = batches.size()
    if size is None:
        return None
    number = size.texts if texts is None else min(texts, size.texts)
    length = size.tokens or model.num_prefix_tokens + model.num_patches(size.side)
    return passes(model, texts=number, tokens=length, batch=size.batch, kept=kept, at_most=not size.exact)


def of_texts(model: LayeredModel, texts: Sequence[str], max_tokens: int, letters: float = LETTERS) -> Work:
    """Passes of texts that nobody has made tokens of: one is taken to be four letters, as in English it is."""
    lengths = [min(max_tokens, max(1, int(len(text) / letters))) for text in texts]
    tokens = max(1, sum(lengths) // max(1, len(lengths)))
    return passes(model, texts=len(texts), tokens=tokens, batch=max(1, BATCH_TOKENS // tokens), kept=False)


def trained(
    model: LayeredModel,
    *,
    samples: float,
    tokens: int,
    micro_batch: int,
    block_runs: float = 0,
    passes: int = 3,
    weights: int | None = None,
) -> Work:
    """A training on so many samples: a forward pass, and a backward pass of twice its work.

    Memory is that of weights, gradients and Adam's two averages, and of what one micro-batch keeps for its backward
    pass, 17 numbers a token and width in each block and the logits twice. `block_runs`: of a sample, where the blocks
    do not run once each. `weights`: the bytes of the model's, where they were counted before.
    """
    rows, runs = tokens if model.vocab_size else 1, block_runs or model.num_layers
    scores = micro_batch * rows * (model.vocab_size or model.num_classes or 1)
    kept = 4.0 * (17 * micro_batch * tokens * model.dim * runs + 2 * scores)
    parts = (
        Part("blocks", passes * runs * samples / micro_batch, (micro_batch, tokens)),
        Part("head", passes * samples * rows),
    )
    weights = bytes_of_model(model) if weights is None else weights
    return Work(texts=round(samples), tokens=round(samples * tokens), parts=parts, device=3 * weights + kept)


def fits(
    model: LayeredModel,
    *,
    number: float,
    rows: int,
    num_classes: int,
    estimator: str,
    tolerance: float,
    max_iterations: int,
) -> Work:
    """So many probes of one layer each; without classes a regression, which is one decomposition."""
    parts = [Part("spectra", number, (max(1, rows),))]
    if num_classes:
        # Of GPT-2's states 66 at 1e-2, 163 at 1e-4, 489 at 1e-6: half as many again for each factor of 3 or so.
        of_fixed = 66 * math.exp(0.5 * max(0.0, -math.log10(tolerance) - 2))
        evaluations = EVALUATIONS.get(estimator, min(of_fixed, max_iterations))
        parts.append(Part("evaluations", number * evaluations, (max(1, rows), num_classes)))
        parts.append(Part("steps", number * evaluations * STEPS_OF_AN_EVALUATION[estimator]))
    return Work(parts=tuple(parts), host=8.0 * rows * (model.dim + num_classes))


def parameters_of_block(model: LayeredModel) -> int:
    """Numbers in the matrices of one block, of the mean where blocks differ."""
    sizes = [p.numel() for block in model.blocks for p in block.parameters() if p.ndim >= 2]
    return sum(sizes) // model.num_layers


def bytes_of(module: nn.Module) -> int:
    """What its weights take in float32, or in float64 where they are."""
    return sum(parameter.numel() * max(4, parameter.element_size()) for parameter in module.parameters())


def bytes_of_model(model: LayeredModel) -> int:
    """What all weights take in float32, or in float64 where they are."""
    return bytes_of(model.model)


def flop(model: LayeredModel, part: Part) -> float:
    """Floating-point operations of a part, a multiplication and an addition counted as two.

    A block: two a number in its matrices and token, and the two products of attention, 4 T^2 d. A Jacobian: one
    product with each matrix for each of d directions. Decompositions: by the leading terms of the algorithms, the Gram
    matrix included.
    """
    dim = model.dim
    match part.kind:
        case "blocks":
            texts, tokens = part.size
            of_one = texts * (2.0 * parameters_of_block(model) * tokens + 4.0 * tokens**2 * dim)
        case "head":
            of_one = 2.0 * dim * (model.vocab_size or model.num_classes or dim)
        case "jacobians":
            of_one = 2.0 * parameters_of_block(model) * dim
        case "directions":
            of_one = 4 / 3 * dim**3 + 2.0 * dim**3 + 8.0 * dim**2 * part.size[0]
        case "spectra" | "calls":
            least, most = sorted((part.size[0], dim))
            of_one = 2.0 * least**2 * most + 4 / 3 * least**3
        case "evaluations":
            of_one = 4.0 * part.size[0] * dim * part.size[1]
        case "steps":
            of_one = 0.0
        case _:
            of_one = 1.0
    return part.count * of_one
