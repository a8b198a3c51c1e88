"""`lit-layers intervene`: a model, or each checkpoint of a series, while its blocks run in other orders."""

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lit_layers import schema
from lit_layers.cli.intervene_options import read_options
from lit_layers.cli.measuring import (
    Outcome,
    Target,
    length_limit,
    measured,
    measurements_of,
    run,
    settings_there,
    tell_settings,
)
from lit_layers.cli.messages import one_sentence
from lit_layers.errors import InputError

if TYPE_CHECKING:
    from lit_layers.analyses.base import Analysis

T = TypeVar("T")
RESULTS = "intervene"
OF_BLOCKS, PUBLISHED_LOOPS = ("skip_one", "switch"), 3


def main(argv: list[str]) -> int:
    """Measures what the options say, prints and draws it; 130 where Ctrl-C cut it short, 1 if something failed."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # they would write over ours; read at import
    options = read_options(argv)
    _read_recipes(options)
    made = measured(options, lambda target: list(_analyses(options, target)), tokenizer=options.tokenizer)
    return run(made, _tell)


def _read_recipes(options: argparse.Namespace) -> None:
    """Takes the recipes of training from their files, before a model is opened."""
    if options.finetune is None and options.glue is None:
        return
    from lit_layers.training.finetuning import FinetuningRecipe
    from lit_layers.training.sequence_tasks import GlueRecipe
    from lit_layers.training.trainer import quieten

    quieten()
    if options.finetune is not None:
        options.finetune = read_recipe(FinetuningRecipe, options.finetune)
    if options.glue is not None:
        options.glue = read_recipe(GlueRecipe, options.glue)


def read_recipe(kind: type[T], path: str | Path) -> T:
    """The options of training in a YAML file, checked by their types.

    Raises:
        InputError: no such file, no mapping in it, an unknown key, a key that is missing, a wrong value.
    """
    from lit_layers.cli.trust import RecipeParser

    parser = RecipeParser(exit_on_error=False)
    parser.add_class_arguments(kind)
    content, known = schema.read_yaml(Path(path), dict[str, Any], "write KEY: VALUE lines"), vars(parser.get_defaults())
    for key in content:
        if key not in known:
            raise InputError(f"recipe: there is no key {key!r}; the keys are {', '.join(known)}")
    try:
        return kind(**parser.parse_object(content).as_dict())
    except (InputError, argparse.ArgumentError) as error:
        raise InputError(f"recipe: {one_sentence(str(error))}") from error


def _analyses(options: argparse.Namespace, target: Target) -> "Iterator[Analysis]":
    """What tells most first, so that a page can be looked at while the rest is under way."""
    _refuse_another_kind(options, target)
    chosen = {name: getattr(options, name) for name in ("variants", "middles", "seeds", "loops")}
    chosen["custom"] = options.schedule
    if options.corpus is not None or options.images is not None:
        from lit_layers.analyses import Interventions

        yield Interventions(batches=_images(options) if options.corpus is None else _texts(options, target), **chosen)
    yield from _tasks(options, target, chosen)
    if options.speed:
        from lit_layers.analyses.speed import Speed

        length = {} if options.num_tokens is None else {"num_tokens": options.num_tokens}
        yield Speed(**_timed(chosen), executions=options.execution, tell=target.tell, **length)
    if options.finetune is not None:
        from lit_layers.training.finetuning import Finetuning

        yield Finetuning(
            recipe=options.finetune,
            root=target.root / RESULTS / "finetuned",
            tokenizer=options.finetune.tokenizer or target.own_tokenizer(),
            tell=target.tell,
            **chosen,
        )
    if options.glue is not None:
        from lit_layers.training.sequence_tasks import GlueScores

        for task in options.glue.tasks:
            yield GlueScores(
                task=task,
                recipe=options.glue,
                model=options.model,
                root=target.root / RESULTS,
                folder=options.folder,
                tokenizer=target.own_tokenizer(),
                tell=target.tell,
                **chosen,
            )


def _refuse_another_kind(options: argparse.Namespace, target: Target) -> None:
    """By what config.json says, as no tokenizer that is asked for would make a reader of a model that sees."""
    reads = "vocab_size" in target.config
    sees = not reads and ("image_size" in target.config or "architecture" in target.config)  # transformers, timm
    if reads and options.images is not None:
        raise InputError(f"images: {target.name} is a language model: take --tasks, --corpus, --glue or --speed")
    for name in ("corpus", "tasks", "finetune", "glue"):
        if sees and getattr(options, name):
            raise InputError(f"{name}: {target.name} is a model of images: take --images or --speed")


def _timed(chosen: dict[str, Any]) -> dict[str, Any]:
    """Variants of different cost: any order of all blocks takes what reverse does, one loop count tells of others."""
    names = [name for name in chosen["variants"] if name not in ("random", *OF_BLOCKS)]
    loops = (PUBLISHED_LOOPS,) if PUBLISHED_LOOPS in chosen["loops"] else chosen["loops"][:1]
    return chosen | {"variants": tuple(names) or chosen["variants"], "loops": loops, "seeds": chosen["seeds"][:1]}


def _tasks(options: argparse.Namespace, target: Target, chosen: dict[str, Any]) -> "Iterator[Analysis]":
    if not options.tasks:
        return
    from lit_layers.tasks.benchmark_rows import is_file
    from lit_layers.tasks.benchmark_scores import BenchmarkScores

    for task in options.tasks:
        yield BenchmarkScores(
            task=task,
            tokenizer=target.own_tokenizer(),
            results=target.root / RESULTS / "scores",
            folder=None if is_file(task) else options.folder,
            limit=options.limit,
            max_new_tokens=options.max_new_tokens,
            tell=target.tell,
            **chosen,
        )


def _texts(options: argparse.Namespace, target: Target) -> Any:
    from lit_layers.data import EvalText

    limit = length_limit(target.config)
    if None not in (options.num_tokens, limit) and options.num_tokens > limit:
        raise InputError(f"num_tokens: {target.name} takes at most {limit} tokens, got {options.num_tokens}")
    num_tokens = options.num_tokens or min(128, limit or 128)
    return EvalText(
        options.corpus, target.own_tokenizer(), num_sequences=options.num_sequences or 64, num_tokens=num_tokens
    )


def _images(options: argparse.Namespace) -> Any:
    from lit_layers.data import EvalImages

    return EvalImages(
        options.images,
        num_images=options.num_images or 256,
        image_size=options.image_size,
        normalisation=options.normalisation or "source",
    )


def _tell(outcome: Outcome) -> bool:
    """Prints what the root holds of the variants (of some steps, if they are named), writes all; whether any failed."""
    from rich.console import Console

    from lit_layers import records
    from lit_layers.cli.intervene_results import notes, show_results, write_results
    from lit_layers.plots import with_task_medians
    from lit_layers.report import write_report

    file = outcome.root / "measurements.jsonl"
    known = [each for each in measurements_of(outcome) if each.error is None and each.records]
    has_failed = False
    if known:
        shown = [each for each in known if outcome.steps is None or each.step in outcome.steps]
        has_failed = any(record.metric == records.FAILED for each in shown for record in each.records)
        medians = with_task_medians(records.frame(shown))
        show_results(medians.frame, Console())
        print(*medians.notes.values(), *notes(medians.frame), sep="\n")
        print(write_results(outcome.root / RESULTS, with_task_medians(records.frame(known)).frame))
        print(write_report(outcome.root, settings=settings_there(outcome)))
    tell_settings(outcome.root, outcome.settings)
    for error in outcome.errors:
        print(f"failed: {error}", file=sys.stderr)
    print(file)
    return bool(outcome.errors) or has_failed
