"""Cost of the embeddings of all layers, against those of only the last layer.

    OMP_NUM_THREADS=1 python benchmarks/mteb_layers.py --folder DATA

The result is CPU seconds (wall seconds on a GPU) for the texts of a few tasks of MTEB through a random GPT-NeoX. One
side pools all layers and caches them on disk, as `lit-layers mteb` does. The other side pools the last hidden states of
a plain forward pass in memory. Both use the same batches in turn. The target is a median ratio of at most 1.1.
`--scoring` also measures how long mteb takes to score a layer, and for this encodes all texts of a task.
"""

import argparse
import sys
from pathlib import Path
from statistics import median

import torch
from rounds import Row, add_options, clock, finish, ratios

from lit_layers.data.batches import BATCH_TOKENS, EncodedTexts, encode_texts
from lit_layers.data.tokenization import train_bpe
from lit_layers.errors import InputError
from lit_layers.models.build import causal_lm
from lit_layers.models.families import trunk_of
from lit_layers.models.view import LayeredModel
from lit_layers.tasks.catalogue import resolve
from lit_layers.tasks.embeddings import LayerEncoder, TaskEmbeddings
from lit_layers.tasks.mteb_tasks import MtebScorer, open_task

WANTED = 1.1
VOCABULARY, CONTEXT = 4000, 512


class Listener(LayerEncoder):
    """Encoder that records the texts of an evaluation and returns placeholder embeddings that are not all equal."""

    def __init__(self) -> None:
        self.texts, self.layer, self.followed, self._by_dot = list[str](), 0, None, False

    def encode(self, inputs, **_):
        texts = [text for batch in inputs for text in batch["text"]]
        self.texts += texts
        return torch.randn(len(texts), 8, generator=torch.Generator().manual_seed(0)).numpy()


def main() -> int:
    parser = _parser()
    options = parser.parse_args()
    try:
        specs = resolve(options.tasks.split(","), options.folder)
        tasks = [MtebScorer(open_task(spec, seed=42), spec) for spec in specs]
    except InputError as error:
        parser.error(str(error))
    complete = {task.spec.name: _texts(task) for task in tasks}
    texts = {name: each[: options.num_texts] for name, each in complete.items()}
    tokenizer = train_bpe([text for each in complete.values() for text in each], VOCABULARY)
    shape = {"hidden_size": options.dim, "num_hidden_layers": options.layers, "num_attention_heads": options.dim // 64}
    sizes = {"intermediate_size": 4 * options.dim, "vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT}
    view = LayeredModel(causal_lm("gpt_neox", **shape, **sizes).eval().to(options.device))
    how = {"tokenizer": tokenizer, "max_tokens": CONTEXT, "pooling": "mean", "states": "resid"}
    encoded = {name: encode_texts(tokenizer, each, max_tokens=CONTEXT) for name, each in texts.items()}
    seconds: dict[str, dict[str, list[float]]] = {name: {"all": [], "last": []} for name in texts}
    scoring: dict[str, float] = {}
    for number in range(options.rounds + 1):
        for task in tasks:
            name, found = task.spec.name, TaskEmbeddings(view, **how)
            last = _timed(lambda name=name: _last_layer(view, encoded[name]), view)
            whole = _timed(lambda name=name, found=found: found.embed(texts[name], view.num_layers), view)
            if options.scoring and number == options.rounds:
                found.embed(complete[name], 1)
                scoring[name] = _timed(lambda task=task, found=found: task.evaluate(LayerEncoder(found, 1)), view)
            if number:  # the first round is a warm-up
                seconds[name]["all"].append(whole)
                seconds[name]["last"].append(last)
    shape_of = f"width {options.dim}, {options.layers} blocks"
    rows = [_row(f"{shape_of}, {name}", len(texts[name]), each, scoring.get(name)) for name, each in seconds.items()]
    together = {
        side: [sum(all_of) for all_of in zip(*(each[side] for each in seconds.values()), strict=True)]
        for side in ("all", "last")
    }
    rows.append(_row(f"{shape_of}, together", sum(map(len, texts.values())), together, None, WANTED))
    return finish("mteb_layers", rows, options, device=options.device)


def _texts(task: MtebScorer) -> list[str]:
    listener = Listener()
    task.evaluate(listener)
    return [text for text in dict.fromkeys(listener.texts) if text.strip()]


def _last_layer(view: LayeredModel, encoded: EncodedTexts) -> list[torch.Tensor]:
    found = []
    with torch.no_grad():
        for _, batch in encoded.batches(BATCH_TOKENS):
            inputs, _ = view._inputs(batch)
            hidden = trunk_of(view.model)(**inputs, use_cache=False).last_hidden_state.double()
            mask = batch["attention_mask"].to(hidden.device)[..., None]
            found.append(((hidden * mask).sum(1) / mask.sum(1)).float().cpu())
    return found


def _timed(action, view: LayeredModel) -> float:
    start = clock(view.device)
    action()
    return clock(view.device) - start


def _row(what: str, num_texts: int, seconds: dict, scoring: float | None, target: float | None = None) -> Row:
    others = {
        "texts": f"{num_texts:,}",
        "seconds: last, all": f"{median(seconds['last']):.2f}, {median(seconds['all']):.2f}",
    }
    if scoring is not None:
        others["scoring a layer, s"] = f"{scoring:.2f}"
    return Row(what, ratios(seconds["all"], seconds["last"]), target, at_most=True, others=others)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="local data of the tasks")
    parser.add_argument("--tasks", default="STS16,Banking77Classification")
    parser.add_argument("--num_texts", type=int, default=1000, help="of each task, at most")
    parser.add_argument("--scoring", action="store_true")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--dim", type=int, default=512)
    add_options(parser)
    parser.add_argument("--device", default="cpu")
    return parser


if __name__ == "__main__":
    sys.exit(main())
