"""Whether a plan says what is then measured: seconds, memory and disk of the analyses of six recipes, reduced, planned
over measured.

Each round plans and measures each recipe once, so that both meet the same minutes of the machine; wanted is a ratio
between a half and two. Memory is the most that is resident in a process of its own above what was before; disk the
most that its scratch folder holds. GPT-2 of random weights on the Python standard library's source, or a ViT on digits.

    python benchmarks/plan.py --save
    python benchmarks/plan.py --single --save     each analysis by itself, width 64 and 768: five CPU minutes
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rounds import LEAST_ROUNDS, Row, add_options, finish, ratios

from lit_layers import analyses as A
from lit_layers.analyses import Analysis
from lit_layers.data import CorpusTexts, EvalImages, EvalText
from lit_layers.measuring import calibration
from lit_layers.measuring import plan as planning
from lit_layers.measuring.one_model import in_one_pass
from lit_layers.measuring.plan import Plan, planned
from lit_layers.models.build import causal_lm, vit
from lit_layers.models.costs import forget_most, most_ever
from lit_layers.models.view import LayeredModel

SMALL: dict[str, Any] = {"n_layer": 4, "n_embd": 128, "n_head": 4, "n_positions": 128, "vocab_size": 2048}
WIDE: dict[str, Any] = {"n_layer": 2, "n_embd": 384, "n_head": 6, "n_positions": 128, "vocab_size": 2048}


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
    texts = CorpusTexts("python", "bpe:2048", num_texts=50, num_tokens=24)
    options = {"tokenizer": "bpe:2048", "corpus": "python", "max_tokens": 32}
    shared = [A.Representation(batches=text(32, 128)), A.PromptStudies(batches=text(8, 64))]
    return [*shared, A.Invariance(texts=texts, **options)]


RECIPES: dict[str, tuple[Callable[[], Any], Callable[[], list[Analysis]]]] = {
    "analyses/text.yaml": (lambda: causal_lm("gpt2", **SMALL), of_text),
    "analyses/images.yaml": (lambda: vit("vit_tiny_patch16_224", img_size=8, patch_size=2, num_classes=10), of_images),
    "analyses/coupling.yaml": (lambda: causal_lm("gpt2", **WIDE), of_coupling),
    "analyses/interventions.yaml": (lambda: causal_lm("gpt2", **SMALL), of_interventions),
    "analyses/representation.yaml": (lambda: causal_lm("gpt2", **SMALL), of_representation),
}
NARROW_ALONE = ("token_coupling", "next_token_probe, record", "prediction_residual")
WIDTHS = {64: 4, 768: 2}  # and blocks


def build(width: int) -> LayeredModel:
    heads, blocks = max(4, width // 64), WIDTHS[width]
    size: dict[str, Any] = SMALL | {"n_layer": blocks, "n_embd": width, "n_head": heads}
    return LayeredModel(causal_lm("gpt2", **size))


def single() -> dict[str, Analysis]:
    """Each analysis that reads texts alone, on so few that what does not grow with them weighs most."""
    texts, few, views = text(16, 64), text(4, 32), CorpusTexts("python", "bpe:2048", num_texts=20, num_tokens=24)
    train, test = (text(n, 32, documents=d, batch_size=50) for n, d in ((200, (0.0, 0.7)), (100, (0.7, 1.0))))
    probes = {
        f"next_token_probe, {estimator}": A.NextTokenProbe(
            train=train, test=test, num_classes=20, estimator=estimator, tolerance=1e-4
        )
        for estimator in ("watch", "fixed_c", "record")
    }
    plain: list[Analysis] = [
        A.Trajectory(batches=texts),
        A.Representation(batches=texts),
        A.Lens(batches=texts),
        A.Coupling(batches=few, k=(4,)),
        A.CouplingMatrices(batches=few, num_prompts=2, pairs=[(1, 2)]),
        A.TokenCoupling(batches=few, k=(4,), num_tokens=4, num_prompts=1),
        A.CrossTokenInfluence(batches=few, num_inputs=8, num_prompts=1),
        A.Interventions(batches=texts, seeds=(0, 1), loops=(3,)),
        A.OrderStates(batches=texts, seeds=(0, 1), loops=(3,)),
        A.LayerSimilarity(batches=texts),
        A.PromptStudies(batches=text(4, 64)),
        A.Invariance(texts=views, tokenizer="bpe:2048", corpus="python", max_tokens=32, num_views=4),
        A.StateGeometry(batches=texts),
        A.PooledStates(batches=texts),
        A.PathsInPlane(batches=texts, num_prompts=8),
        A.NextTokenResidual(batches=texts),
    ]
    return {analysis.name: analysis for analysis in plain} | probes


CPU = torch.device("cpu")


class Case:
    """A recipe, ready to be planned and measured: its data are read."""

    def __init__(self, name: str, scratch: Path) -> None:
        build, make = RECIPES[name]
        self.model, self.analyses, self.place = LayeredModel(build()), make(), scratch
        self.measure()

    @classmethod
    def alone(cls, model: LayeredModel, analysis: Analysis) -> "Case":
        """One analysis of a model in memory."""
        case = cls.__new__(cls)
        case.model, case.analyses = model, [analysis]
        case.measure()
        return case

    def plan(self) -> Plan:
        calibration._TIMED.clear()
        return planned(self.model, self.analyses, device=CPU)

    def measure(self) -> float:
        """CPU seconds of one checkpoint."""
        started = time.process_time()
        facts = {"run": "plan", "step": 0, "weights_hash": "0"}
        done = in_one_pass(self.model, self.analyses, lambda analysis: None, **facts)
        errors = [each.error for each in done]
        if any(errors):
            raise SystemExit("; ".join(filter(None, errors)))
        return time.process_time() - started


def in_a_child(name: str) -> dict[str, float]:
    """Bytes of memory and disk of a checkpoint, planned and measured, by a process of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        # What is freed goes back to the system at once, so that what is resident is what is in use.
        environment = {
            **os.environ,
            "TMPDIR": scratch,
            "MALLOC_MMAP_THRESHOLD_": "65536",
            "MALLOC_TRIM_THRESHOLD_": "0",
        }
        command = [sys.executable, __file__, "--child", name]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def child(name: str) -> None:
    """Prints what `in_a_child` returns: of a second measurement, when all code is there that it needs."""
    scratch, most, ended = Path(tempfile.gettempdir()), [0], threading.Event()
    case = Case(name, scratch)
    if case.streams:
        shutil.rmtree(scratch / "walk")
    at_first = written(scratch)

    def look() -> None:
        while not ended.wait(0.005):
            most[0] = max(most[0], written(scratch) - at_first)

    before, watching = forget_most(), threading.Thread(target=look)
    watching.start()
    case.measure()
    memory = most_ever() - before
    most[0] = max(most[0], written(scratch) - at_first)
    ended.set()
    watching.join()
    plan = case.plan()
    weights = plan.weights if case.streams else 0  # elsewhere they were there before
    planned_memory = plan.whole.device + plan.whole.host + weights
    result = {"memory": memory, "planned memory": planned_memory, "disk": most[0], "planned disk": plan.whole.disk}
    print(json.dumps(result))


def written(folder: Path) -> int:
    """Bytes in a folder; files may go while it is looked through."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--single", action="store_true", help="each analysis by itself, seconds alone")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    calibration.clock = time.process_time  # as what is compared: the machine may do other things, too
    if options.child:
        child(options.child)
        return 0
    if options.save and options.rounds < LEAST_ROUNDS:
        raise SystemExit(f"a result that is kept has at least {LEAST_ROUNDS} rounds")
    if options.single:
        return singly(options)
    bytes_of = {name: in_a_child(name) for name in RECIPES}
    seconds: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in RECIPES}
    with tempfile.TemporaryDirectory() as scratch:
        cases = {name: Case(name, Path(scratch)) for name in RECIPES}
        for _ in range(options.rounds):
            for name, case in cases.items():
                seconds[name][0].append(case.plan().seconds)
                seconds[name][1].append(case.measure())
    rows = []
    for name, (foreseen, took) in seconds.items():
        rows.append(row(f"{name}, seconds", foreseen, took, planning.duration))
        for what in ("memory", "disk"):
            if (number := bytes_of[name][what]) or bytes_of[name][f"planned {what}"]:
                rows.append(row(f"{name}, {what}", [bytes_of[name][f"planned {what}"]], [number], planning.size))
    return finish("plan", rows, options, least_rounds=1)  # bytes are the same in every round


def singly(options: argparse.Namespace) -> int:
    cases: dict[str, Case] = {}
    for width in WIDTHS:
        model = build(width)
        for name, analysis in single().items():
            if width < 512 or name not in NARROW_ALONE:
                cases[f"{name}, {width} wide"] = Case.alone(model, analysis)
    seconds: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in cases}
    for number in range(options.rounds):
        for name, case in cases.items():
            seconds[name][0].append(case.plan().seconds)
            seconds[name][1].append(case.measure())
        print(f"round {number + 1} of {options.rounds}: {time.process_time():.0f} CPU seconds", file=sys.stderr)
    rows = [row(name, *both, planning.duration) for name, both in seconds.items()]
    return finish("plan_of_analyses", rows, options)


def row(what: str, foreseen: list[float], found: list[float], words: Callable[[float], str]) -> Row:
    larger = [max(ratio, 1 / ratio) for ratio in ratios(foreseen, found)]
    others = {name: words(statistics.median(each)) for name, each in (("planned", foreseen), ("measured", found))}
    return Row(f"{what}: larger over smaller", larger, 2.0, at_most=True, others=others)


if __name__ == "__main__":
    raise SystemExit(main())
