"""Time of all analyses of a checkpoint: in one shared pass, in separate passes, and in separate passes with all logits.

    OMP_NUM_THREADS=1 python benchmarks/measuring_pass.py                        the quickstart's model and texts
    OMP_NUM_THREADS=1 python benchmarks/measuring_pass.py --recipe text --share 128   recipes/analyses/text.yaml
    python benchmarks/measuring_pass.py --recipe text --device cuda                   all its texts
    OMP_NUM_THREADS=1 python benchmarks/measuring_pass.py --memory                    its peak memory

Texts are random tokens with frequencies 1 / rank (Zipf). "Each alone, all logits" gives every analysis a separate pass
that computes the logits of the whole vocabulary for every token. The floor is one pass without a head over each
different text, where the texts of a probe end at the last position that it reads. The probe uses `estimator="watch"`.

`text` is GPT-2 small with a share of the texts of text.yaml (`--share 128` takes one of 128), at least one of each
kind. Coupling and the fixed cost of probes therefore weigh more than in text.yaml. `--memory` measures in a separate
process the peak above the memory with the model loaded, for Trajectory, Representation and Lens of GPT-2 small on 16
texts of 1,024 tokens.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rounds import Row, add_options, clock, finish, ratios
from torch import Tensor

from lit_layers.analyses import Coupling, Lens, NextTokenProbe, Representation, Trajectory
from lit_layers.analyses.base import Analysis
from lit_layers.analyses.probes.next_token_probe import passes
from lit_layers.data.batches import Batches
from lit_layers.measuring.one_model import measure, outcomes
from lit_layers.models.build import weights_hash
from lit_layers.models.view import Batch, LayeredModel
from lit_layers.models.view import Trajectory as States

WANTED = 0.85  # share of the time of separate passes with all logits
WANTED_OVER_PASSES = 1.5
WANTED_ON_GPU = 15  # seconds for all analyses of text.yaml, GPT-2 small
WANTED_MEMORY = 600  # MB


@dataclass(frozen=True)
class Recipe:
    """Sizes of a model and of its analyses; texts as (number, tokens, batch size)."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    text: tuple[int, int, int]
    coupling: tuple[int, int, int]
    k: tuple[int, ...]
    train: tuple[int, int, int]
    test: tuple[int, int, int]
    classes: int
    positions: int

    def divided(self, share: int) -> dict[str, tuple[int, int, int]]:
        names = ("text", "coupling", "train", "test")
        return {name: (max(1, getattr(self, name)[0] // share), *getattr(self, name)[1:]) for name in names}


RECIPES = {
    "quickstart": Recipe(
        *(6, 128, 4, 2048, (48, 128, 16), (8, 64, 16), (4, 12, 32), (500, 32, 50), (250, 32, 50)),
        classes=50,
        positions=4,
    ),
    "text": Recipe(
        *(12, 768, 12, 50257, (128, 256, 16), (8, 64, 16), (10, 30, 76), (10000, 64, 128), (3000, 64, 128)),
        classes=1000,
        positions=1,
    ),
}


class Windows(Batches):
    """Random texts."""

    def __init__(self, vocabulary: int, count: int, tokens: int, size: int, seed: int) -> None:
        draws = torch.rand(count, tokens, generator=torch.Generator().manual_seed(seed))
        self.ids = (vocabulary**draws).long().clamp(max=vocabulary) - 1  # token k has a frequency of about 1 / (k + 1)
        self.at_once, self.name = size, f"{vocabulary} {count} {tokens} {size} {seed}"

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for ids in self.ids.split(self.at_once):
            yield {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def __len__(self) -> int:
        return -(-len(self.ids) // self.at_once)

    def content_hash(self) -> str:
        return self.name


class AllLogits(LayeredModel):
    """View whose passes always compute the logits of every token."""

    def trajectory(self, batch: Batch) -> States:
        trajectory = super().trajectory(batch)
        trajectory.logits  # noqa: B018
        return trajectory


def all_analyses(recipe: Recipe, share: int) -> list[Analysis]:
    sizes = recipe.divided(share)
    text, coupling, train, test = (Windows(recipe.vocabulary, *sizes[name], seed) for seed, name in enumerate(sizes))
    return [
        Trajectory(batches=text),
        Representation(batches=text),
        Lens(batches=text),
        Coupling(batches=coupling, k=recipe.k),
        NextTokenProbe(
            train=train,
            test=test,
            num_classes=recipe.classes,
            positions_per_sequence=recipe.positions,
            estimator="watch",
        ),
    ]


def network(recipe: Recipe) -> torch.nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=recipe.layers, n_embd=recipe.width, n_head=recipe.heads, vocab_size=recipe.vocabulary
    )
    return transformers.GPT2LMHeadModel(config).eval()


def timed(action: Callable[[], object], device: str) -> float:
    started = clock(device)
    action()
    return clock(device) - started


def peak_above_the_model() -> int:
    """Return the peak bytes of this process above its memory with the model loaded and used once.

    Call it in a fresh process.
    """
    recipe = RECIPES["text"]
    model = network(recipe)

    def measured(text: Windows) -> None:
        analyses = [Trajectory(batches=text), Representation(batches=text), Lens(batches=text)]
        assert [each.error for each in outcomes(model, analyses, weights_hash="none")] == [None] * 3

    measured(Windows(recipe.vocabulary, 2, 16, 2, 0))
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _resident("VmRSS")
    measured(Windows(recipe.vocabulary, 16, 1024, 16, 1))
    return _resident("VmHWM") - before


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))


def memory(options: argparse.Namespace) -> int:
    """Measure the peak memory in one round, because all rounds use the same random numbers."""
    command = [sys.executable, __file__, "--peak"]
    peaks = [int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])]
    what = "peak above the model, GPT-2 small, 16 x 1,024 tokens: Trajectory, Representation, Lens"
    row = Row(what, [peak / 1e6 for peak in peaks], WANTED_MEMORY, at_most=True, unit=" MB")
    return finish("measuring_memory", [row], options, least_rounds=1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=list(RECIPES), default="quickstart")
    parser.add_argument("--share", type=int, default=1, help="a text of so many is measured")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--memory", action="store_true", help="peak memory, and nothing else")
    parser.add_argument("--peak", action="store_true", help=argparse.SUPPRESS)
    add_options(parser)
    options = parser.parse_args()
    if options.peak:
        print(peak_above_the_model())
        return 0
    return memory(options) if options.memory else seconds_of_passes(options)


def seconds_of_passes(options: argparse.Namespace) -> int:
    recipe = RECIPES[options.recipe]
    model = network(recipe).to(options.device)
    analyses, facts = (
        all_analyses(recipe, options.share),
        {"run": "run", "step": 0, "weights_hash": weights_hash(model)},
    )
    view, probe = LayeredModel(model), analyses[-1]
    assert isinstance(probe, NextTokenProbe)
    records: dict[str, list[float]] = {}
    of_each: dict[str, list[float]] = {}

    def check(way: str, found: list) -> None:
        assert all(each.error is None for each in found), [each.error for each in found]
        records[way] = [record.value for each in found for record in each.records]
        if way == "one pass":
            for each in found:
                of_each.setdefault(each.analysis.name, []).append(each.seconds)
        reference = records.setdefault("reference", records[way])
        torch.testing.assert_close(
            torch.tensor(records[way]), torch.tensor(reference), rtol=1e-4, atol=1e-5, equal_nan=True
        )

    def pass_all(batches: Iterable[Batch]) -> None:
        for batch in batches:
            view.pass_states(batch, lambda layer, hidden, mask: None)

    def texts(of: Iterable[Analysis]) -> list[Batch]:
        sets = {each.name: each for analysis in of for each in vars(analysis).values() if isinstance(each, Windows)}
        return [batch for each in sets.values() for batch in each]

    problem, most = probe._problem, max(batch["input_ids"].numel() for batch in probe.test)
    contexts = [
        {"input_ids": part.input_ids}
        for rows in (problem.train, problem.test)
        for part in passes(rows, max_tokens=most, together=True)
    ]
    ways: dict[str, Callable[[], object]] = {
        "one pass": lambda: check("one pass", list(outcomes(model, analyses, weights_hash=facts["weights_hash"]))),
        "floor": lambda: pass_all(texts(analyses)),
        "read": lambda: pass_all([*texts(analyses[:-1]), *contexts]),
    }
    if options.recipe == "quickstart":
        ways["all"] = lambda: check("all", [measure(AllLogits(model), each, **facts) for each in analyses])
        ways["alone"] = lambda: check("alone", [measure(model, each, **facts) for each in analyses])
    for action in ways.values():  # a warm-up excludes imports and checks at first use
        action()
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(options.rounds):
        for way, action in ways.items():
            seconds[way].append(timed(action, options.device))
    one = seconds["one pass"]
    target = {"target": WANTED_OVER_PASSES, "at_most": True} if options.recipe == "text" else {}
    rows = [
        Row("one pass over the bare passes of its texts", ratios(one, seconds["floor"]), **target),
        Row("one pass over the bare passes of what is read of them", ratios(one, seconds["read"])),
    ]
    if "all" in ways:
        rows += [
            Row("one pass over each alone, all logits", ratios(one, seconds["all"]), WANTED, at_most=True),
            Row("one pass over each alone", ratios(one, seconds["alone"])),
        ]
    wanted = WANTED_ON_GPU if options.device == "cuda" and (options.recipe, options.share) == ("text", 1) else None
    limits: dict[str, Any] = {"one pass": {"target": wanted, "at_most": True}} if wanted else {}
    rows += [Row(f"{way}, seconds", values, unit=" s", **limits.get(way, {})) for way, values in seconds.items()]
    rows += [Row(f"of one pass: {name}", spent[1:], unit=" s") for name, spent in of_each.items()]
    return finish("measuring_pass", rows, options, device=options.device)


if __name__ == "__main__":
    raise SystemExit(main())
