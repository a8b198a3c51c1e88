"""Whether a plan says what is then measured: seconds of the analyses of six recipes, reduced, planned over measured.

Each round plans and measures each recipe once, so that both meet the same minutes of the machine; wanted is a ratio
between a half and two. GPT-2 of random weights on the Python standard library's source, or a ViT on digits.

    python benchmarks/plan.py --save
"""

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rounds import Row, add_options, finish, ratios

from lit_layers import analyses as A
from lit_layers import plan as planning
from lit_layers.analyses import Analysis
from lit_layers.data import EvalImages, EvalText
from lit_layers.models.build import causal_lm, vit
from lit_layers.models.view import LayeredModel
from lit_layers.plan import planned
from lit_layers.undisturbed import in_one_pass

SMALL = {"n_layer": 4, "n_embd": 128, "n_head": 4, "n_positions": 128, "vocab_size": 2048}
WIDE = {"n_layer": 2, "n_embd": 384, "n_head": 6, "n_positions": 128, "vocab_size": 2048}


def text(num_sequences: int, num_tokens: int, **options: Any) -> EvalText:
    return EvalText("python", "bpe:2048", num_sequences=num_sequences, num_tokens=num_tokens, **options)


def of_text() -> list[Analysis]:
    batches = text(32, 128)
    probe = A.NextTokenProbe(
        train=text(500, 32, documents=(0.0, 0.7), batch_size=50),
        test=text(250, 32, documents=(0.7, 1.0), batch_size=50),
        num_classes=50,
        estimator="watch",
    )
    shared = [A.Trajectory(batches=batches), A.Representation(batches=batches), A.Lens(batches=batches)]
    return [*shared, A.Coupling(batches=text(8, 64), k=(4, 12, 32)), probe]


def of_images() -> list[Analysis]:
    batches = EvalImages("digits", num_images=64)
    shared = [A.Trajectory(batches=batches), A.Representation(batches=batches), A.Lens(batches=batches)]
    train, test = EvalImages("digits", split="train", num_images=500), EvalImages("digits", num_images=200)
    return [*shared, A.LabelProbe(train=train, test=test, estimator="watch")]


def of_coupling() -> list[Analysis]:
    prompts = text(4, 64)
    influence = A.CrossTokenInfluence(batches=prompts, num_inputs=8, num_prompts=2)
    return [A.Coupling(batches=prompts), A.TokenCoupling(batches=prompts, num_tokens=4, num_prompts=2), influence]


def of_interventions() -> list[Analysis]:
    batches = text(16, 128)
    return [A.Interventions(batches=batches, seeds=(0, 1), loops=(3,)), A.LayerSimilarity(batches=batches)]


def of_representation() -> list[Analysis]:
    return [A.Representation(batches=text(32, 128)), A.PromptStudies(batches=text(8, 64))]


def of_streams() -> list[Analysis]:
    batches = text(32, 128)
    return [A.Trajectory(batches=batches), A.Representation(batches=batches), A.Coupling(batches=text(4, 64))]


RECIPES: dict[str, tuple[Callable[[], Any], Callable[[], list[Analysis]]]] = {
    "analyses/text.yaml": (lambda: causal_lm("gpt2", **SMALL), of_text),
    "analyses/images.yaml": (lambda: vit("vit_tiny_patch16_224", img_size=8, patch_size=2, num_classes=10), of_images),
    "analyses/coupling.yaml": (lambda: causal_lm("gpt2", **WIDE), of_coupling),
    "analyses/interventions.yaml": (lambda: causal_lm("gpt2", **SMALL), of_interventions),
    "analyses/representation.yaml": (lambda: causal_lm("gpt2", **SMALL), of_representation),
    "analyses/stream.yaml": (lambda: causal_lm("gpt2", **WIDE), of_streams),
}


def measured(model: LayeredModel, analyses: Sequence[Analysis]) -> float:
    """CPU seconds of one checkpoint."""
    started = time.process_time()
    for each in in_one_pass(model, analyses, lambda analysis: None, run="plan", step=0, weights_hash="0"):
        if each.error is not None:
            raise SystemExit(f"{each.analysis}: {each.error}")
    return time.process_time() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    options = parser.parse_args()
    planning.clock = time.process_time  # as what is compared: the machine may do other things, too
    seconds: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in RECIPES}
    cases = {name: (LayeredModel(build()), make()) for name, (build, make) in RECIPES.items()}
    for model, analyses in cases.values():
        measured(model, analyses)  # data is read once
    for _ in range(options.rounds):
        for name, (model, analyses) in cases.items():
            planning._TIMED.clear()
            seconds[name][0].append(planned(model, analyses, device=torch.device("cpu")).seconds)
            seconds[name][1].append(measured(model, analyses))
    rows = []
    for name, (said, took) in seconds.items():
        larger = [max(ratio, 1 / ratio) for ratio in ratios(said, took)]
        others = {
            "planned": f"{sorted(said)[len(said) // 2]:.2g} s",
            "measured": f"{sorted(took)[len(took) // 2]:.2g} s",
        }
        rows.append(Row(f"{name}, reduced: larger over smaller", larger, 2.0, at_most=True, others=others))
    return finish("plan", rows, options)


if __name__ == "__main__":
    raise SystemExit(main())
