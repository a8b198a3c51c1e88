"""Share of the time of recipes/quickstart/gpt2.yaml that its analyses take, and that bare forward passes would take.

    OMP_NUM_THREADS=1 python benchmarks/quickstart.py                    about two minutes

A bare loop trains the model for some of the recipe's steps. Then the recipe's analyses and a few more training steps
run in turn. The result is the CPU seconds of all checkpoints over those of all steps and checkpoints. The floor is one
pass without a head over each text, as far as an analysis reads it: no way of measuring as many texts takes less time.
"""

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import yaml
from measuring_pass import timed
from rounds import Row, add_options, finish

import lit_layers.analyses
from lit_layers.analyses import NextTokenProbe
from lit_layers.analyses.base import Analysis
from lit_layers.analyses.probes.next_token_probe import passes
from lit_layers.data import EvalText
from lit_layers.measuring.one_model import outcomes
from lit_layers.models import causal_lm
from lit_layers.models.view import Batch, LayeredModel
from lit_layers.schedule import Schedule

RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart" / "gpt2.yaml"
WANTED = 8.0  # percent
BEFORE = 64  # training steps before the measurement
STEPS = 8  # training steps in a round


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    options = parser.parse_args()
    recipe = yaml.safe_load(RECIPE.read_text())
    names = {name: recipe[name] for name in ("corpus", "tokenizer")}
    analyses: list[Analysis] = [built(each, names) for each in recipe["analyses"]]
    torch.manual_seed(recipe["seed_everything"])
    data, network = recipe["data"]["init_args"], recipe["model"]["init_args"]
    size = data["global_batch_size"]
    text = EvalText(**names, split="train", num_sequences=32 * size, num_tokens=data["num_tokens"], batch_size=size)
    model = causal_lm("gpt2", vocab_size=int(names["tokenizer"].split(":")[1]), **network["config"])
    step = stepping(model, [batch["input_ids"] for batch in text], network["lr"])
    for _ in range(BEFORE):
        step()

    def measure() -> None:
        errors = [each.error for each in outcomes(model, analyses, weights_hash="none")]
        assert not any(errors), errors

    contexts = read_by(analyses)
    ways: dict[str, Callable[[], object]] = {
        "analyses": measure,
        "passes": lambda: pass_all(model, contexts),
        "steps": lambda: [step() for _ in range(STEPS)],
    }
    for action in ways.values():  # a warm-up excludes imports and checks at first use
        action()
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(options.rounds):
        for way, action in ways.items():
            seconds[way].append(timed(action, "cpu"))
    num_steps = recipe["trainer"]["max_steps"]
    checkpoints = len([*Schedule(recipe["steps"]).steps_to(num_steps)])

    def shares(way: str) -> list[float]:
        of_step = [each / STEPS for each in seconds["steps"]]
        pairs = zip(seconds[way], of_step, strict=True)
        return [100 * checkpoints * one / (checkpoints * one + num_steps * step) for one, step in pairs]

    rows = [
        Row("all analyses, of the run's time", shares("analyses"), WANTED, at_most=True, unit="%"),
        Row("bare passes of what they read, of the run's time with nothing else", shares("passes"), unit="%"),
        Row("all analyses, a checkpoint", seconds["analyses"], unit=" s"),
        Row("bare passes, a checkpoint", seconds["passes"], unit=" s"),
        Row("a training step", [each / STEPS for each in seconds["steps"]], unit=" s"),
    ]
    return finish("quickstart", rows, options)


def built(described: dict[str, Any], names: dict[str, str]) -> Any:
    """Return an object described in a recipe, with `${name}` replaced by the recipe's value."""
    module, name = described["class_path"].rsplit(".", 1)
    kinds = {"lit_layers.analyses": lit_layers.analyses, "lit_layers.data": lit_layers.data}
    arguments = {
        key: built(value, names) if isinstance(value, dict) else names.get(str(value)[2:-1], value)
        for key, value in described["init_args"].items()
    }
    return getattr(kinds[module], name)(**arguments)


def stepping(model: torch.nn.Module, batches: list[torch.Tensor], lr: float) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    done = 0

    def step() -> None:
        nonlocal done
        model.train()
        ids = batches[done % len(batches)]
        logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
        torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        model.eval()

    return step


def read_by(analyses: Iterable[Analysis]) -> list[Batch]:
    """Return each text that the analyses read once. The texts of a probe end at its last position."""
    texts: dict[str, EvalText] = {}
    contexts: list[Batch] = []
    for analysis in analyses:
        if isinstance(analysis, NextTokenProbe):
            problem, most = analysis._problem, max(batch["input_ids"].numel() for batch in analysis.test)
            for rows in (problem.train, problem.test):
                parts = passes(rows, max_tokens=most, together=True)
                contexts += [{"input_ids": part.input_ids} for part in parts]
        else:
            texts |= {each.content_hash(): each for each in vars(analysis).values() if isinstance(each, EvalText)}
    return [*(batch for each in texts.values() for batch in each), *contexts]


def pass_all(model: torch.nn.Module, batches: Iterable[Batch]) -> None:
    view = LayeredModel(model)
    for batch in batches:
        view.pass_states(batch, lambda layer, hidden, mask: None)


if __name__ == "__main__":
    raise SystemExit(main())
