"""`lit-layers intervene`: a model, or each checkpoint of a series, while its blocks run in other orders."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from lit_layers.cli.console import show_table
from lit_layers.cli.measuring import Checkpoints, Outcome, measured
from lit_layers.cli.options import Names, Numbers, Recipe, given, refuse_beside
from lit_layers.errors import InputError
from lit_layers.figures.labels import tag_text
from lit_layers.functional.block_schedules import (
    LOOPS,
    NAMES,
    OF_BLOCKS,
    OF_MIDDLES,
    PUBLISHED_LOOPS,
    SEEDS,
    VARIANTS,
)
from lit_layers.metrics import headlines, look_up, sentence
from lit_layers.schema import COUNT

if TYPE_CHECKING:
    from lit_layers.analyses.base import Analysis
    from lit_layers.measuring.plan import Target

T = TypeVar("T")
RESULTS = "intervene"
TAGS = ("variant", "loops", "schedule", "when", "training")  # what tells the rows of a table from each other
ALL = Names(("all",))
TASKS = Names(("lambada", "arc_challenge", "hellaswag", "winogrande", "gsm8k"))
COUNTED = Annotated[int | None, COUNT]
OF_TEXTS = ("tasks", "corpus", "glue", "finetune", "folder", "limit", "max_new_tokens")
NEEDS = {  # an option: what it belongs to
    **dict.fromkeys(("num_images", "image_size", "normalisation"), ("images",)),
    **dict.fromkeys(("limit", "max_new_tokens"), ("tasks",)),
    "num_sequences": ("corpus",),
    "states": ("corpus", "images"),
    "folder": ("tasks", "glue", "finetune"),
    "num_tokens": ("corpus", "speed"),
}


@dataclass(frozen=True, kw_only=True)
class Interventions:
    """What is changed, and what is measured.

    Args:
        tokenizer: name or folder of the tokenizer (default: the model's own)
        variants: which orders of blocks: all, or names with commas between: baseline, middle_repeat, skip, parallel,
            reverse, random, looped_parallel, skip_one, switch, or repeat_one, which all leaves out
        schedule: an order of your own, such as '1 2 (3,4,5) (3,4,5) 6'; may be given several times
        middles: how many middle blocks are changed: all possible numbers, or some, such as 1,5,9
        seeds: seeds of the random orders (default: 0 to 9)
        loops: how often looped_parallel runs the middle (default: 2 to 8)
        tasks: benchmarks to score: lambada, arc_challenge, hellaswag, winogrande, gsm8k, further ones of lm-eval, or
            with --folder those of docs/interventions.md (default: these five)
        folder: a folder of local data, whose tasks.yaml says where the tasks lie, also those of --glue and --finetune
            (default: the Hub)
        limit: score only so many first rows of a task
        max_new_tokens: most tokens of a generated answer (default: 256)
        corpus: a text: measure loss, accuracy and divergence on its held-out part, too
        states: also measure how far the states behind the changed blocks are from those of the full model, on the same
            text or images
        num_sequences: how many sequences of that text
        num_tokens: tokens of each sequence, also of those that are timed (default: 128)
        images: for an image classifier, in place of texts: digits, cifar10, a local path, ORG/NAME
        num_images: how many images of its test split
        image_size: size of the model's input, in px (default: the source's)
        normalisation: how pixels are normalised
        speed: also measure the latency of each variant against the full model
        finetune: a recipe: train each changed model on a task, and score it before and after
            (recipes/finetune/arc.yaml)
        glue: a recipe: fine-tune an encoder on GLUE in each variant (recipes/glue/small_steps.yaml)
    """

    tokenizer: str | None = None
    variants: Names = ALL
    schedule: list[str] | None = None
    middles: Annotated[Numbers | Literal["all"], COUNT] = "all"
    seeds: Numbers | None = None
    loops: Annotated[Numbers | None, COUNT] = None
    tasks: Names | None = None
    folder: Path | None = None
    limit: COUNTED = None
    max_new_tokens: COUNTED = None
    corpus: str | None = None
    states: bool = False
    num_sequences: Annotated[int, COUNT] = 64
    num_tokens: COUNTED = None
    images: str | None = None
    num_images: Annotated[int, COUNT] = 256
    image_size: COUNTED = None
    normalisation: Literal["imagenet", "half", "source"] = "source"
    speed: bool = False
    finetune: Path | None = None
    glue: Path | None = None

    def settled(self, recipe: Recipe) -> "Interventions":
        """With the tasks that are usual, where nothing says what is measured.

        Raises:
            InputError: an option that names what is not there, or does not fit the others.
        """

        options = given(self)
        if unknown := next((one for one in options.get("variants", ()) if one not in NAMES), None):
            raise InputError(f"variants: there is no {unknown!r}; choose all, or from {', '.join(NAMES)}")
        refuse_beside(OF_TEXTS, [(options, self.images is not None, "is for language models, and --images was given")])
        for task in self.tasks or ():
            if task.endswith(".yaml") and not any(task in word.split(",") for word in recipe.typed("tasks")):
                raise InputError(f"tasks: a recipe names no task file, which is code, got {task}: say --tasks {task}")
        chosen = options.keys() & {"tasks", "images", "glue", "corpus", "finetune", "speed"}
        settled = self if chosen else dataclasses.replace(self, tasks=TASKS)
        cases = []
        for name, owners in NEEDS.items():
            cases.append(([name], not given(settled).keys() & {*owners}, f"is for --{' or --'.join(owners)}"))
        refuse_beside(options, cases)
        return settled


def intervene(recipe: Recipe, model: str, checkpoints: Checkpoints, options: Interventions) -> int:
    """Run the blocks of a model skipped, repeated, reversed, shuffled, side by side, and see what breaks.

    Run it again to continue. Exit code: 0, 1 if something failed, 2 wrong input, 130 after Ctrl-C.

    Args:
        model: a folder with config.json and weights, or a name on the Hub; for a series a folder of steps,
            a name on the Hub with --steps, or a manifest
    """
    options = options.settled(recipe)
    others = ("revision", "dtype", "untrained")
    why = f"--glue opens {model} for each variant, as it is and in the precision of its recipe"
    refuse_beside(given(checkpoints), [(others, options.glue is not None, why)])
    trains = [name for name in ("finetune", "glue") if getattr(options, name) is not None]
    if checkpoints.are_series(model) and trains:
        raise InputError(f"{trains[0]}: trains one model, and a series was named: name one of its checkpoints")
    recipes = _training_recipes(options)
    if options.tasks:
        from lit_layers.tasks.benchmark_scores import refuse_no_task

        for task in options.tasks:
            refuse_no_task(task, options.folder)
    make = lambda target: [*_analyses(model, options, recipes, target)]  # noqa: E731
    return measured(checkpoints.opened(model), checkpoints, make, _tell, tokenizer=options.tokenizer)


def _training_recipes(options: Interventions) -> dict[str, Any]:
    """The recipes of training, read before a model is opened."""
    if options.finetune is None and options.glue is None:
        return {}
    from lit_layers.training.finetuning import TaskFinetuningRecipe
    from lit_layers.training.glue import GlueRecipe
    from lit_layers.training.trainer import quieten

    quieten()
    files: dict[str, Any] = {"finetune": (TaskFinetuningRecipe, options.finetune), "glue": (GlueRecipe, options.glue)}
    return {name: read_recipe(kind, file) for name, (kind, file) in files.items() if file is not None}


def read_recipe(kind: type[T], path: str | Path) -> T:
    """The options of training in a YAML file, checked by their types.

    Raises:
        InputError: no such file, no mapping in it, an unknown key, a key that is missing, a wrong value.
    """
    recipe = Recipe(kind, ["--config", str(path)])
    try:
        return recipe.group(kind, recipe.options)
    except InputError as error:
        raise InputError(f"recipe: {str(error).removeprefix('recipe: ')}") from error


def _analyses(model: str, options: Interventions, recipes: dict[str, Any], target: "Target") -> "Iterator[Analysis]":
    """What tells most first, so that a page can be looked at while the rest is under way."""
    _refuse_another_kind(options, target)
    results, folder = target.root / RESULTS, options.folder
    chosen: dict[str, Any] = {
        "variants": VARIANTS if options.variants == ALL else tuple(options.variants),
        "middles": None if options.middles == "all" else tuple(options.middles),
        "seeds": tuple(options.seeds or SEEDS),
        "loops": tuple(options.loops or LOOPS),
        "custom": tuple(options.schedule or ()),
    }
    if options.corpus is not None or options.images is not None:
        from lit_layers import analyses

        batches = _images(options) if options.corpus is None else _texts(options, target)
        yield analyses.Interventions(batches=batches, **chosen)
        if options.states:
            of_middle = {name: value for name, value in chosen.items() if name != "custom"}
            of_middle["variants"] = tuple(name for name in chosen["variants"] if name in OF_MIDDLES)
            yield analyses.OrderStates(batches=batches, **of_middle)
    chosen["tell"] = target.tell
    for task in options.tasks or ():
        from lit_layers.tasks.benchmark_scores import BenchmarkScores

        limits: Any = {"limit": options.limit, "max_new_tokens": options.max_new_tokens}
        limits["folder"] = None if task.endswith(".yaml") else folder
        tokenizer = target.own_tokenizer()
        yield BenchmarkScores(task=task, tokenizer=tokenizer, results=results / "scores", **limits, **chosen)
    if options.speed:
        from lit_layers.analyses.speed import Speed

        length: dict[str, Any] = {} if options.num_tokens is None else {"num_tokens": options.num_tokens}
        yield Speed(**_timed(chosen), **length)
    if (recipe := recipes.get("finetune")) is not None:
        from lit_layers.training.finetuning import TaskFinetuning

        of_task: Any = {"root": results / f"finetuned_{recipe.task}", "folder": folder}
        yield TaskFinetuning(recipe=recipe, tokenizer=target.own_tokenizer(), **of_task, **chosen)
    if (recipe := recipes.get("glue")) is not None:
        from lit_layers.training.glue import GlueScores

        places: Any = {"model": model, "root": results, "folder": folder, "tokenizer": target.own_tokenizer()}
        yield from (GlueScores(task=task, recipe=recipe, **places, **chosen) for task in recipe.tasks)


def _refuse_another_kind(options: Interventions, target: "Target") -> None:
    """By what config.json says, as no tokenizer that is asked for would make a reader of a model that sees."""
    if "vocab_size" in target.config and options.images is not None:
        raise InputError(f"images: {target.name} is a language model: take --tasks, --corpus, --glue or --speed")
    for name in ("corpus", "tasks", "finetune", "glue"):
        if target.sees_images and getattr(options, name):
            raise InputError(f"{name}: {target.name} is a model of images: take --images or --speed")


def _timed(chosen: dict[str, Any]) -> dict[str, Any]:
    """Variants of different cost: any order of all blocks takes what reverse does, one loop count tells of others."""
    names = [name for name in chosen["variants"] if name not in ("random", *OF_BLOCKS)]
    loops = (PUBLISHED_LOOPS,) if PUBLISHED_LOOPS in chosen["loops"] else chosen["loops"][:1]
    return chosen | {"variants": tuple(names) or chosen["variants"], "loops": loops, "seeds": chosen["seeds"][:1]}


def _texts(options: Any, target: "Target") -> Any:
    from lit_layers.data.batches import EvalText

    limit = target.length_limit
    if None not in (options.num_tokens, limit) and options.num_tokens > limit:
        raise InputError(f"num_tokens: {target.name} takes at most {limit} tokens, got {options.num_tokens}")
    num_tokens = options.num_tokens or min(128, limit or 128)
    number = options.num_sequences
    return EvalText(options.corpus, target.own_tokenizer(), num_sequences=number, num_tokens=num_tokens)


def _images(options: Any) -> Any:
    from lit_layers.data.images import EvalImages

    chosen = {name: getattr(options, name) for name in ("num_images", "image_size", "normalisation")}
    return EvalImages(options.images, **chosen)


def _tell(outcome: Outcome) -> bool:
    """Prints what the root holds of the variants (of some steps, if they are named), writes all; whether any failed."""
    from lit_layers import records
    from lit_layers.plots import with_task_medians
    from lit_layers.report import write_report

    complete, shown = outcome.complete()
    if complete:
        medians = with_task_medians(records.frame(shown))
        for title, rows in _tables(medians.frame):
            show_table(_rows(rows), title)
        print(*medians.notes.values(), *_notes(medians.frame), sep="\n")
        outcome.write(RESULTS, {"variants.csv": _exported(with_task_medians(records.frame(complete)).frame)})
        print(write_report(outcome.root, settings=outcome.settings))
    has_failed = any(record.metric == records.FAILED for each in shown for record in each.records)
    return outcome.tell() or has_failed


def _notes(table: Any) -> Iterator[str]:
    """Yields which tasks have no normalised score, and which variants failed: a sentence each."""
    import pandas as pd

    from lit_layers import records

    if "undefined" in table:
        for analysis in table[table["undefined"].notna()]["analysis"].unique():
            yield f"{sentence(analysis)}: no normalised score, as the full model does not beat guessing"
    for row in table[table["metric"] == records.FAILED].to_dict("records"):
        place = "" if pd.isna(row.get("middle")) else f" of {int(row['middle'])} blocks"
        yield f"{sentence(row['analysis'])}: {row['variant']}{place} failed ({row['error']})"


def _exported(table: Any) -> Any:
    """Every number of every variant, without the columns that nothing has a value in."""
    from lit_layers import records

    rows = _of_variants(table).dropna(axis="columns", how="all")
    tags = [name for name in rows if name not in records.COLUMNS]
    columns = ("run", "step", "analysis", "metric", *tags, "layer", "value", "stderr", "low", "high", "n")
    return rows[[name for name in columns if name in rows]]


def _of_variants(table: Any) -> Any:
    return table[table["variant"].notna()] if "variant" in table else table.iloc[:0]


def _tables(table: Any) -> Iterator[tuple[str, Any]]:
    """Yields the title and rows of each score; of several steps the last, without single seeds and single blocks."""
    from lit_layers.figures.tables import MEDIAN

    rows = _of_variants(table)
    if rows.empty:
        return
    if rows["step"].notna().any():
        rows = rows[rows["step"] == rows["step"].max()]
    rows = rows[~rows["variant"].isin(OF_BLOCKS)]
    rows = rows[rows["seed"].isna()] if "seed" in rows else rows
    has_median = (rows["analysis"] == MEDIAN).any()
    for analysis in rows["analysis"].unique():
        for metric in headlines():
            part = rows[(rows["analysis"] == analysis) & (rows["metric"] == metric)]
            if not part.empty and not (has_median and metric == "normalized_score" and analysis != MEDIAN):
                yield f"{sentence(analysis)}, {look_up(metric).with_unit}", part


def _rows(table: Any) -> Iterator[dict[str, str]]:
    """Yield a row a variant, with a column a number of blocks changed: 0 for the full model and orders of your own."""
    import pandas as pd

    tags = [name for name in TAGS if name in table]
    table = table.assign(blocks=table["middle"].fillna(0).astype(int) if "middle" in table else 0)
    for values, group in table.groupby(tags, dropna=False, sort=False):
        variant, *others = ((name, value) for name, value in zip(tags, values, strict=True) if pd.notna(value))
        named = "full model" if variant[1] == "baseline" else str(variant[1]).replace("_", " ")
        cells = {str(row["blocks"]): f"{row['value']:.3f}" for row in group.to_dict("records")}
        order = {str(number): cells.get(str(number), "") for number in sorted(table["blocks"].unique())}
        yield {"blocks changed": ", ".join([named, *filter(None, [tag_text(dict(others))])])} | order
