"""Writes the `Cost:` lines of all recipes by the plan: `python -m tests.support.recipe_costs`; with `--check` it says
which are behind.

What a recipe costs is said in counts alone: FLOP, texts, bytes, and what measuring adds to a training. They follow from
the shapes of models without weights and from sizes of data as they are asked for, on any machine alike; `--plan` says
what they take on one. How long a run took somewhere, and where, is a recipe's own line `Time:`.
"""

import argparse
import contextlib
import importlib
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import yaml

from lit_layers.analyses.probes.task_probes import OnTask
from lit_layers.cli.verbs import fit
from lit_layers.data import batches
from lit_layers.data.prompt_texts import CorpusTexts
from lit_layers.measuring import plan as planning
from lit_layers.measuring.plan import Plan, planned, size
from lit_layers.models.build import vit
from lit_layers.models.saved import outline
from lit_layers.models.view import LayeredModel
from lit_layers.models.workload import Work, bytes_of_model, flop, trained
from lit_layers.schedule import PYTHIA, Schedule
from lit_layers.tasks.catalogue import find
from lit_layers.training import LitImageData
from lit_layers.training.callbacks import plan_run
from lit_layers.training.tuning import sequence_tasks
from lit_layers.training.tuning.finetuning import Finetuning, FinetuningRecipe, TaskFinetuning, TaskFinetuningRecipe
from lit_layers.training.tuning.sequence_tasks import GlueRecipe, GlueScores

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
WIDTH, FULL = 8, 120  # of the title, of a line
LINE = re.compile(r"# Cost:( +)\S.*\n(?:# {7,}\S.*\n)*")
# Overlays, which change how a run is trained and not what it takes; recipes of papers, which say it in docs/papers.md.
WITHOUT = ("recipes/trainer/", "recipes/papers/")

# Sizes of data and models that are on no test machine.
TOKENS = {"gpt2": 50257}  # of a vocabulary
ARC = 1119  # training rows of ARC-Challenge
IMAGES = {"cifar10": (50_000, 10, 32), "ILSVRC/imagenet-1k": (1_281_167, 1000, 224)}  # to train on, classes, px
INTENTS = {"train": 10_003, "test": 3_080, "letters": 59, "classes": 77}  # Banking77
GLUE = {"cola": (8551, 1043), "mrpc": (3668, 408), "rte": (2490, 277), "sst2": (67349, 872), "stsb": (5749, 1500)}
NEOX = {"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], "vocab_size": 50304}
MODELS: dict[str, dict[str, Any]] = {
    "Pythia 70M": NEOX
    | {"num_hidden_layers": 6, "hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8},
    "Pythia 410M": NEOX
    | {"num_hidden_layers": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16},
    "OLMo 2 1B": {
        "model_type": "olmo2",
        "architectures": ["Olmo2ForCausalLM"],
        "num_hidden_layers": 16,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 16,
        "vocab_size": 100352,
    },
    "GPT-2 small": {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
    "GPT-2 XL": {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": 48,
        "n_embd": 1600,
        "n_head": 25,
    },
    "Llama 2 7B": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "BERT base": {"model_type": "bert", "architectures": ["BertModel"]},
}
SERIES = {
    "pythia_70m": ["Pythia 70M"],
    "pythia_410m": ["Pythia 410M"],
    "olmo2_1b": ["OLMo 2 1B"],
    "gpt2_family": ["GPT-2 small", "GPT-2 XL"],
    "llm_suite": ["GPT-2 small", "Llama 2 7B"],
}


@contextlib.contextmanager
def as_asked_for() -> Iterator[None]:
    """Corpora are as large as is asked for, nothing is timed, and what is on no machine has the size above."""
    rows = {part: SimpleNamespace(texts=["a" * INTENTS["letters"]] * INTENTS[part]) for part in ("train", "test")}
    intents = SimpleNamespace(
        train_and_validation=lambda: rows["train"], test=rows["test"], classes=range(INTENTS["classes"])
    )
    stands = [
        mock.patch.object(batches, "prepared_before", return_value=None),
        mock.patch.object(fit, "prepared_before", return_value=None),
        mock.patch.object(fit, "load_tokenizer", lambda name: SimpleNamespace(vocab_size=TOKENS[name])),
        mock.patch.object(planning.Bench, "seconds", return_value=0.0),
        mock.patch.object(LitImageData, "setup", _images),
        mock.patch.object(OnTask, "_read", return_value=SimpleNamespace(data=lambda: intents)),
        mock.patch.object(CorpusTexts, "texts", lambda self: ["a" * 4 * self.num_tokens] * self.num_texts),
        mock.patch.object(sequence_tasks, "read_rows", _glue),
    ]
    with contextlib.ExitStack() as stack:
        for each in stands:
            stack.enter_context(each)
        yield


def _images(data: Any, stage: str) -> None:
    if data.source_name in IMAGES:
        number, num_classes, side = IMAGES[data.source_name]
        data.source = SimpleNamespace(train=range(number), num_classes=num_classes)
        data.image_size, data.statistics = data.asked_size or side, ((0.5,) * 3, (0.5,) * 3)
    else:
        _setup(data, stage)


_setup = LitImageData.setup


def _glue(task: Any, split: str, folder: Any) -> Any:
    number = dict(zip(sequence_tasks.SPLITS, GLUE[task.name], strict=True))[split]
    longest = ("a" * 10**4,)  # any row may be cut

    class Rows(list):
        texts = property(lambda self: self)

        def take(self, count: int | None, seed: int) -> Any:
            return Rows(self[:count])

    return Rows([longest] * number)


def made(value: Any, names: dict[str, Any]) -> Any:
    """What a recipe's data stand for."""
    if isinstance(value, dict) and "class_path" in value:
        module, _, name = value["class_path"].rpartition(".")
        options = {key: made(each, names) for key, each in (value.get("init_args") or {}).items()}
        return getattr(importlib.import_module(module), name)(**options)
    if isinstance(value, dict):
        return {key: made(each, names) for key, each in value.items()}
    if isinstance(value, list):
        return [made(each, names) for each in value]
    if isinstance(value, str) and (whole := re.fullmatch(r"\$\{(\w+)\}", value)):
        return names[whole[1]]
    if isinstance(value, str):
        return re.sub(r"\$\{(\w+)\}", lambda name: names[name[1]], re.sub(r"\$\{oc\.env:.*\}", "", value)) or None
    return value


def analyses_of(path: str, **names: str) -> list[Any]:
    """Those of a list, or of a recipe that has its own."""
    return made(read(path).get("analyses", []), {"corpus": "wikitext", "tokenizer": "gpt2"} | names)


def read(path: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / path).read_text())


def model_of(name: str) -> LayeredModel:
    return LayeredModel(outline(MODELS[name], name))


# What is said, by the folder of a recipe.


def of_training(path: str) -> str:
    """Of a recipe for `fit`."""
    recipe = read(path) | {"analyses": []} | {key: value for key, value in read(path).items() if key == "analyses"}
    names = {name: recipe[name] for name in ("corpus", "tokenizer", "seed_everything") if name in recipe}
    data, module = made(recipe["data"], names), made(recipe["model"], names)
    trainer, steps = recipe["trainer"], recipe["trainer"]["max_steps"]
    ranks, accumulate = fit.ranks_of(trainer), trainer.get("accumulate_grad_batches", 1)
    view = fit.outlined(module, data, world_size=ranks, accumulate=accumulate)
    beside = "" if recipe["analyses"] else f"recipes/analyses/{'images' if view.family.sees_images else 'text'}.yaml"
    analyses = made(recipe["analyses"], names) or analyses_of(beside, **names)
    number = len([*Schedule(recipe["steps"]).until(steps)])
    facts: Any = {"steps": steps, "accumulate": accumulate, "world_size": 1, "device": CPU, "num_checkpoints": number}
    plan, row = plan_run(view, analyses, data, **facts)
    assert row.work is not None
    seen = f"{row.work.texts:,} images" if view.family.sees_images else f"{words(row.work.tokens)} tokens"
    share = 100 * number * measuring_flop(plan) / row.flop
    return (
        f"training {words(row.flop)} FLOP ({parameters(view)}, {steps:,} steps, {seen}); {number} saved "
        f"checkpoints {size(number * bytes_of_model(view))} on the disk, two to resume from {size(row.work.disk)}. "
        f"Measuring{f' with {beside}' if beside else ''} {words(measuring_flop(plan))} FLOP a checkpoint: in "
        f"all {share:.2g}% of the training's, most of it {most(plan)}."
    )


def of_list(path: str) -> str:
    """Of a list of analyses: one checkpoint of a model of the usual size."""
    if path.endswith("images.yaml"):
        with torch.device("meta"):
            model, name = (
                LayeredModel(vit("deit_tiny_patch16_224", img_size=32, patch_size=4, num_classes=10)),
                "DeiT-Tiny at 32 px",
            )
        analyses = analyses_of(path, corpus="cifar10")
    else:
        model, name, analyses = model_of("GPT-2 small"), "GPT-2 small", analyses_of(path)
    return f"of {name} ({parameters(model)}) {a_checkpoint(model, analyses)}"


def a_checkpoint(model: LayeredModel, analyses: list[Any]) -> str:
    plan = planned(model, analyses, device=CPU)
    whole, total = plan.whole, measuring_flop(plan)
    kind = ("image", "image") if model.family.sees_images else ("text", "token")
    tokens = model.num_prefix_tokens + model.num_patches(None) if model.family.sees_images else 1024
    sample = trained(model, samples=1, tokens=tokens, micro_batch=1)
    one = sum(flop(model, part) for part in sample.parts) / (1 if model.family.sees_images else tokens)
    assert not plan.unknown, plan.unknown
    held = {"host": whole.host, "disk": whole.disk}
    beside = "".join(f", {size(number)} on the {place}" for place, number in held.items() if number)
    return (
        f"{whole.texts:,} {kind[0]}s, {words(total)} FLOP a checkpoint, as much as training on {words(total / one)} "
        f"{kind[1]}s, most of it {most(plan)}; {size(whole.device)} on the device beside the weights{beside}."
    )


def of_series(path: str) -> str:
    recipe, name = read(path), Path(path).stem
    options = recipe["series"]["init_args"]
    said = []
    for model in SERIES[name]:
        analyses = analyses_of(path if "analyses" in recipe else "recipes/analyses/text.yaml")
        said.append(f"of {model} {a_checkpoint(model_of(model), analyses)}".rstrip("."))
    number = len(options["models"]) if "models" in options else number_of_steps(options["steps"])
    beside = "" if "analyses" in recipe else "with recipes/analyses/text.yaml, "
    return f"{beside}{number} {'models' if 'models' in options else 'checkpoints'}: " + "; ".join(said) + "."


def number_of_steps(steps: Any) -> int:
    """Of a public series, which has Pythia's 143,000 steps where it says so."""
    return len([*Schedule(PYTHIA).until(143_000)]) if steps == "pythia" else steps["log_spaced"]


def of_finetuning(path: str) -> str:
    model = model_of("GPT-2 small")
    options: Any = {"root": Path(), "tokenizer": "gpt2", "variants": ()}
    if "task" in read(path):
        of_task = TaskFinetuning(recipe=TaskFinetuningRecipe(**read(path)), **options)
        of_task.texts = [("", "")] * ARC  # what is read of them is their number
        work = of_task.work(model)
    else:
        work = Finetuning(recipe=FinetuningRecipe(**read(path)), **options).work(model)
    return f"of GPT-2 small ({parameters(model)}) {a_variant(model, work)}, {size(work.disk)} on the disk."


def of_glue(path: str) -> str:
    recipe, model, whole = GlueRecipe(**read(path)), model_of("BERT base"), Work()
    for task in recipe.tasks:
        work = GlueScores(task=task, recipe=recipe, model="", root=Path(), tokenizer="", variants=()).work(model)
        assert work is not None, find("glue", task)
        whole += work
    return f"of BERT base ({parameters(model)}) {a_variant(model, whole)}, at most: with all rows of full length."


def a_variant(model: LayeredModel, work: Work) -> str:
    total = sum(flop(model, part) for part in work.parts)
    return f"{work.texts:,} texts, {words(total)} FLOP for each order of the blocks"


WRITERS: dict[str, Callable[[str], str]] = {
    "analyses": of_list,
    "series": of_series,
    "finetune": of_finetuning,
    "glue": of_glue,
}


def parameters(model: LayeredModel) -> str:
    return f"{bytes_of_model(model) / 4e6:.3g} M parameters"


def words(number: float) -> str:
    """Two digits."""
    return f"{float(f'{number:.2g}'):,.0f}" if number < 1e7 else f"{number:.2g}".replace("e+", "e")


def measuring_flop(plan: Plan) -> float:
    return sum(row.flop for row in plan.rows)


def most(plan: Plan) -> str:
    return max(plan.rows, key=lambda row: row.flop).name


def recipes() -> list[str]:
    """All that say what they cost."""
    paths = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "recipes").rglob("*.yaml"))
    return [path for path in paths if not path.startswith(WITHOUT)]


def cost_of(path: str) -> str:
    """What the recipe's line says."""
    with as_asked_for():
        writer = WRITERS.get(Path(path).parts[1], of_training)
        return writer(path)


def with_cost(path: str, text: str) -> str:
    """The recipe with the line in its place.

    Raises:
        ValueError: it has no such line.
    """
    if (place := LINE.search(text)) is None:
        raise ValueError(f"{path} has no line '# Cost:'")
    first = f"# Cost:{place[1]}"
    lines = textwrap.wrap(
        cost_of(path),
        FULL,
        initial_indent=first,
        subsequent_indent="#" + " " * (len(first) - 1),
        break_on_hyphens=False,
    )
    return text[: place.start()] + "\n".join(lines) + "\n" + text[place.end() :]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check, behind = parser.parse_args().check, []
    for path in recipes():
        before = (ROOT / path).read_text()
        if (after := with_cost(path, before)) != before:
            behind.append(path)
            if not check:
                (ROOT / path).write_text(after)
    sys.stdout.write("".join(f"{path}\n" for path in behind))
    return int(check and bool(behind))


if __name__ == "__main__":
    raise SystemExit(main())
