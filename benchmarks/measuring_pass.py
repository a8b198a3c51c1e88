"""CPU seconds of all analyses of a checkpoint: in one pass over their texts, each alone, and each with logits of all.

    OMP_NUM_THREADS=1 python benchmarks/measuring_pass.py               the model and the texts of the quickstart
    OMP_NUM_THREADS=1 python benchmarks/measuring_pass.py --layers 12 --width 768 --vocabulary 50257 --sequences 16

Texts are random tokens. "Each alone, all logits" is what every analysis did before: a pass of its own, with the scores
of the whole vocabulary for every token. The floor is one pass of each different text without a head. The probe is the
one for watching.
"""

import argparse
import time
from collections.abc import Callable, Iterator

import torch
from rounds import Row, add_options, finish, ratios
from torch import Tensor

from lit_layers.analyses import Coupling, Lens, NextTokenProbe, Representation, Trajectory
from lit_layers.analyses.base import Analysis
from lit_layers.data.batches import Batches
from lit_layers.models.build import weights_hash
from lit_layers.models.view import Batch, LayeredModel
from lit_layers.models.view import Trajectory as States
from lit_layers.undisturbed import in_one_pass, measure

WANTED = 0.85  # of the time of separate passes with all logits


class Windows(Batches):
    """Random texts."""

    def __init__(self, vocabulary: int, count: int, tokens: int, size: int, seed: int) -> None:
        self.ids = torch.randint(vocabulary, (count, tokens), generator=torch.Generator().manual_seed(seed))
        self.size, self.name = size, f"{vocabulary} {count} {tokens} {size} {seed}"

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for ids in self.ids.split(self.size):
            yield {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def __len__(self) -> int:
        return -(-len(self.ids) // self.size)

    def content_hash(self) -> str:
        return self.name


class AllLogits(LayeredModel):
    """Whose passes end in the scores of every token, read or not."""

    def trajectory(self, batch: Batch) -> States:
        trajectory = super().trajectory(batch)
        trajectory.logits  # noqa: B018
        return trajectory


def all_analyses(options: argparse.Namespace) -> list[Analysis]:
    def windows(count: int, tokens: int, size: int, seed: int) -> Windows:
        return Windows(options.vocabulary, count, tokens, size, seed)

    text = windows(options.sequences, options.tokens, 16, 0)
    return [
        Trajectory(batches=text),
        Representation(batches=text),
        Lens(batches=text),
        Coupling(batches=windows(8, 64, 16, 1), k=(4, 12, 32), num_prompts=options.prompts),
        NextTokenProbe(
            train=windows(options.probe_texts, 32, 50, 2),
            test=windows(options.probe_texts // 2, 32, 50, 3),
            num_classes=50,
            positions_per_sequence=4,
            estimator="watch",
        ),
    ]


def timed(action: Callable[[], object]) -> float:
    started = time.process_time()
    action()
    return time.process_time() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"layers": 6, "width": 128, "vocabulary": 2048, "sequences": 48, "tokens": 128}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--prompts", type=int, default=8, help="of the coupling")
    parser.add_argument("--probe-texts", type=int, default=500)
    add_options(parser)
    options = parser.parse_args()
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=options.layers, n_embd=options.width, n_head=options.width // 32, vocab_size=options.vocabulary
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    analyses, facts = all_analyses(options), {"run": "run", "step": 0, "weights_hash": weights_hash(model)}
    records: dict[str, list[float]] = {}

    def check(way: str, measurements: list) -> None:
        assert all(each.error is None for each in measurements), [each.error for each in measurements]
        records[way] = [record.value for each in measurements for record in each.records]
        torch.testing.assert_close(
            torch.tensor(records[way]), torch.tensor(records["all"]), rtol=1e-4, atol=1e-5, equal_nan=True
        )

    def floor() -> None:
        view = LayeredModel(model)
        batches = {
            batches.name: batches
            for each in analyses
            for batches in vars(each).values()
            if isinstance(batches, Windows)
        }
        for batch in (batch for each in batches.values() for batch in each):
            view.pass_states(batch, lambda layer, hidden, mask: None)

    ways: dict[str, Callable[[], object]] = {
        "all": lambda: check("all", [measure(AllLogits(model), each, **facts) for each in analyses]),
        "alone": lambda: check("alone", [measure(model, each, **facts) for each in analyses]),
        "one pass": lambda: check("one pass", list(in_one_pass(model, analyses, lambda _: None, **facts))),
        "floor": floor,
    }
    for action in ways.values():  # what is loaded or verified at first use is no part
        action()
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(options.rounds):
        for way, action in ways.items():
            seconds[way].append(timed(action))
    one = seconds["one pass"]
    rows = [
        Row("one pass over each alone, all logits", ratios(one, seconds["all"]), WANTED, at_most=True),
        Row("one pass over each alone", ratios(one, seconds["alone"])),
        Row("one pass over the passes of its texts", ratios(one, seconds["floor"])),
        *(Row(f"{way}, seconds", values, unit=" s") for way, values in seconds.items()),
    ]
    return finish("measuring_pass", rows, options)


if __name__ == "__main__":
    raise SystemExit(main())
