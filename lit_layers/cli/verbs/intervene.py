"""`lit-layers intervene`: a model, or each checkpoint of a series, while its blocks run in other orders."""

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from lit_layers import analyses, records
from lit_layers.analyses.base import Analysis
from lit_layers.analyses.speed import Speed
from lit_layers.cli.measuring import Checkpoints, Outcome, Target, measure
from lit_layers.cli.options import Names, Numbers, Recipe, find_recipe
from lit_layers.data.batches import EvalText
from lit_layers.data.images import EvalImages
from lit_layers.errors import InputError
from lit_layers.figures.labels import value
from lit_layers.functional import block_schedules as orders
from lit_layers.metrics import headlines, look_up, sentence
from lit_layers.plots import add_task_medians
from lit_layers.report import write_report
from lit_layers.schema import COUNT, read_yaml
from lit_layers.tasks.benchmark_scores import BenchmarkScores
from lit_layers.tasks.lm_eval_scorer import refuse_unknown

KEYS = "recipes/finetune and recipes/glue have examples"
RESULTS = "intervene"
ALL = Names(("all",))
TASKS = Names(("lambada", "arc_challenge", "hellaswag", "winogrande", "gsm8k"))
COUNTED = Annotated[int | None, COUNT]


@dataclass(frozen=True, kw_only=True)
class Interventions:
    """What is changed, and what is measured.

    Args:
        tokenizer: name or folder of the tokenizer (default: the model's own)
        variants: which orders of blocks: all, or names with commas between: baseline, middle_repeat, skip, parallel,
            reverse, random, looped_parallel, skip_one, switch, or repeat_one, which all leaves out
        schedule: an order of your own, such as '1 2 (3,4,5) (3,4,5) 6', or several with ; between
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
    schedule: list[str] | str | None = None
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

    def resolved(self, recipe: Recipe) -> "Interventions":
        """Return them with the tasks that are usual, where nothing says what is measured.

        Raises:
            InputError: an option that names what is not there, or does not fit the others.
        """
        for task in self.tasks or ():
            if task.endswith(".yaml") and not any(task in word.split(",") for word in recipe.typed("tasks")):
                raise InputError(f"tasks: a recipe names no task file, which is code, got {task}: say --tasks {task}")
        is_chosen = any((self.tasks, self.images, self.glue, self.corpus, self.finetune, self.speed))
        return self if is_chosen else dataclasses.replace(self, tasks=TASKS)

    @property
    def order_options(self) -> dict[str, Any]:
        """The orders, as analyses take them."""
        custom = self.schedule.split(";") if isinstance(self.schedule, str) else self.schedule or ()
        return {
            "variants": orders.VARIANTS if self.variants == ALL else tuple(self.variants),
            "middles": None if self.middles == "all" else tuple(self.middles),
            "seeds": tuple(self.seeds or orders.SEEDS),
            "loops": tuple(self.loops or orders.LOOPS),
            "custom": tuple(custom),
        }


def intervene(recipe: Recipe, model: str, checkpoints: Checkpoints, options: Interventions) -> int:
    """Run the blocks of a model skipped, repeated, reversed, shuffled, side by side, and see what breaks.

    Run it again to continue. Exit code: 0, 1 if something failed, 2 wrong input, 130 after Ctrl-C.

    Args:
        model: a folder with config.json and weights, or a name on the Hub; for a series a folder of steps,
            a name on the Hub with --steps, or a manifest
    """
    options = options.resolved(recipe)
    changed = checkpoints.revision, checkpoints.untrained, None if checkpoints.dtype == "float32" else checkpoints.dtype
    if options.glue is not None and changed != (None, None, None):
        raise InputError(f"glue: it opens {model} as it is: leave --revision, --untrained and --dtype out")
    trains = [name for name in ("finetune", "glue") if getattr(options, name) is not None]
    if checkpoints.is_series(model) and trains:
        raise InputError(f"{trains[0]}: trains one model, and a series was named: name one of its checkpoints")
    for task in options.tasks or ():
        refuse_unknown(task, options.folder)
    make = functools.partial(_analyses, model, options)
    return measure(checkpoints.open(model), checkpoints, make, _report, tokenizer=options.tokenizer)


def _analyses(model: str, options: Interventions, target: Target) -> list[Analysis]:
    """Return first what tells most, so that a page can be looked at while the rest is under way."""
    _refuse_another_kind(options, target)
    results, chosen, made = target.root / RESULTS, options.order_options, list[Any]()
    if options.corpus is not None or options.images is not None:
        batches = _images(options) if options.corpus is None else _texts(options, target)
        made.append(analyses.Interventions(batches=batches, **chosen))
        if options.states:
            middle_only = {name: value for name, value in chosen.items() if name != "custom"}
            middle_only["variants"] = tuple(name for name in chosen["variants"] if name in orders.OF_MIDDLES)
            made.append(analyses.OrderStates(batches=batches, **middle_only))
    chosen["tell"] = target.tell
    for task in options.tasks or ():
        limits: Any = {"limit": options.limit, "max_new_tokens": options.max_new_tokens}
        limits["folder"] = None if task.endswith(".yaml") else options.folder
        about: Any = {"tokenizer": target.get_tokenizer(), "results": results / "scores", **limits}
        made.append(BenchmarkScores(task=task, **about, **chosen))
    if options.speed:
        length: Any = {} if options.num_tokens is None else {"num_tokens": options.num_tokens}
        made.append(Speed(**_speed_options(chosen), **length))
    if options.finetune is not None:
        from lit_layers.training.finetuning import TaskFinetuning, TaskFinetuningRecipe

        recipe = read_yaml(find_recipe(options.finetune), TaskFinetuningRecipe, KEYS)
        paths: Any = {"root": results / f"finetuned_{recipe.task}", "folder": options.folder}
        made.append(TaskFinetuning(recipe=recipe, tokenizer=target.get_tokenizer(), **paths, **chosen))
    if options.glue is not None:
        from lit_layers.training.glue import GlueRecipe, GlueScores

        glue = read_yaml(find_recipe(options.glue), GlueRecipe, KEYS)
        paths: Any = {"model": model, "root": results, "folder": options.folder, "tokenizer": target.get_tokenizer()}
        made += [GlueScores(task=task, recipe=glue, **paths, **chosen) for task in glue.tasks]
    return made


def _refuse_another_kind(options: Interventions, target: Target) -> None:
    """By what config.json says, as no tokenizer that is asked for would make a reader of a model that sees."""
    if "vocab_size" in target.config and options.images is not None:
        raise InputError(f"images: {target.name} is a language model: take --tasks, --corpus, --glue or --speed")
    for name in ("corpus", "tasks", "finetune", "glue"):
        if target.is_vision and getattr(options, name):
            raise InputError(f"{name}: {target.name} is a model of images: take --images or --speed")


def _speed_options(chosen: dict[str, Any]) -> dict[str, Any]:
    """Return variants of different cost: any order of all blocks takes what reverse does, one loop count tells all."""
    names = [name for name in chosen["variants"] if name not in ("random", *orders.OF_BLOCKS)]
    published = orders.PUBLISHED_LOOPS
    loops = (published,) if published in chosen["loops"] else chosen["loops"][:1]
    return chosen | {"variants": tuple(names) or chosen["variants"], "loops": loops, "seeds": chosen["seeds"][:1]}


def _texts(options: Interventions, target: Target) -> Any:
    num_tokens = options.num_tokens or min(128, target.length_limit or 128)
    counts: Any = {"num_sequences": options.num_sequences, "num_tokens": num_tokens}
    return EvalText(str(options.corpus), target.get_tokenizer(), **counts)


def _images(options: Interventions) -> Any:
    about: Any = {name: getattr(options, name) for name in ("num_images", "image_size", "normalisation")}
    return EvalImages(str(options.images), **about)


def _report(outcome: Outcome) -> bool:
    """Write the table and the page of all variants that the root holds, and print their paths and the scores of the
    full model; return whether any variant failed.
    """
    complete, found = outcome.complete()
    has_failed = False
    for each in found:
        for record in each.records:
            variant = record.tags.get("variant")
            if record.metric == records.FAILED:
                has_failed = True
                print(f"{sentence(each.analysis)}: {variant} failed ({record.tags.get('error')})")
            elif variant == "baseline" and record.metric in headlines() and outcome.steps is not None:
                score = f"{look_up(record.metric).with_unit} {value(record.value)}"
                print(f"{sentence(each.analysis)}: {score}, the full model")
    if complete:
        table = add_task_medians(records.frame(complete)).frame
        rows = table[table["variant"].notna()] if "variant" in table else table.iloc[:0]
        files = {"variants.csv": rows.dropna(axis="columns", how="all")}
        print(*records.write_files(outcome.root / RESULTS, files), sep="\n")
        print(write_report(outcome.root, settings=outcome.settings))
    return outcome.report() or has_failed
