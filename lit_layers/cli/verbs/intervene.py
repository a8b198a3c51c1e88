"""`lit-layers intervene`: score a model, or each checkpoint of a series, while its blocks run in other orders."""

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
    """Options that select the orders of blocks and what is measured.

    Args:
        tokenizer: name or folder of the tokenizer (default: the model's own)
        variants: which orders of blocks (docs/interventions.md): all, or comma-separated names: baseline,
            middle_repeat, skip, parallel, reverse, random, looped_parallel, skip_one, switch, or repeat_one (not
            included in all)
        schedule: a custom order, such as '1 2 (3,4,5) (3,4,5) 6': blocks in parentheses run side by side, and their
            outputs are averaged. Separate several orders with ;
        middles: numbers of middle blocks to change: all (every possible number), or a list such as 1,5,9
        seeds: seeds of the random orders (default: 0 to 9)
        loops: how many times looped_parallel runs the middle blocks (default: 2 to 8)
        tasks: benchmarks to score: lambada, arc_challenge, hellaswag, winogrande, gsm8k, other tasks of lm-eval, or,
            with --folder, those of docs/interventions.md (default: these five, if no other option says what to measure)
        folder: a folder of local data; its tasks.yaml gives the paths of the tasks, also for --glue and --finetune
            (default: the Hub)
        limit: largest number of rows to score of each task; the first rows are taken
        max_new_tokens: largest number of tokens of a generated answer (default: 256)
        corpus: a text: measure loss, accuracy and divergence from the full model on its held-out part
        states: with --corpus or --images: also measure how far the hidden states after the changed blocks are from
            those of the full model
        num_sequences: number of sequences of the --corpus text
        num_tokens: number of tokens of each sequence of --corpus and --speed (default: 128)
        images: images to score, instead of texts, for an image classifier: digits, cifar10, a local path, ORG/NAME
        num_images: number of images of the test split
        image_size: size of the model's input in pixels (default: that of the image source)
        normalisation: pixels are normalised by the mean and deviation of imagenet, by half (0.5), or by those of the
            source
        speed: measure the latency of each variant and of the full model
        finetune: a recipe such as recipes/finetune/arc.yaml: fine-tune each variant on a task, and score it before and
            after
        glue: a recipe such as recipes/glue/small_steps.yaml: fine-tune each variant of an encoder on GLUE
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
        """Return these options, with the default tasks if the options name nothing to measure.

        Raises:
            InputError: an option names something that does not exist, or contradicts another option.
        """
        for task in self.tasks or ():
            if task.endswith(".yaml") and not any(task in word.split(",") for word in recipe.typed("tasks")):
                raise InputError(f"tasks: a recipe names no task file, which is code, got {task}: say --tasks {task}")
        is_chosen = any((self.tasks, self.images, self.glue, self.corpus, self.finetune, self.speed))
        return self if is_chosen else dataclasses.replace(self, tasks=TASKS)

    @property
    def order_options(self) -> dict[str, Any]:
        """The orders of blocks, as keyword arguments of analyses."""
        custom = self.schedule.split(";") if isinstance(self.schedule, str) else self.schedule or ()
        return {
            "variants": orders.VARIANTS if self.variants == ALL else tuple(self.variants),
            "middles": None if self.middles == "all" else tuple(self.middles),
            "seeds": tuple(self.seeds or orders.SEEDS),
            "loops": tuple(self.loops or orders.LOOPS),
            "custom": tuple(custom),
        }


def intervene(recipe: Recipe, model: str, checkpoints: Checkpoints, options: Interventions) -> int:
    """Run a model with its blocks skipped, repeated, reversed, shuffled or run in parallel, and measure what breaks.

    Run the command again to continue after an interruption. Exit code: 0; 1 if anything failed; 2 for wrong input; 130
    after Ctrl-C.

    Args:
        model: a folder with config.json and weights, or a name on the Hub; for a series: a folder of steps, a name on
            the Hub together with --steps, or a manifest of published series (*.yaml)
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
    """Return the analyses, the most informative first, so that the page is useful before all have finished."""
    _refuse_another_kind(options, target)
    results, chosen, made = target.root / RESULTS, options.order_options, list[Any]()
    if options.corpus is not None or options.images is not None:
        batches = _images(options) if options.corpus is None else _texts(options, target)
        made.append(analyses.Interventions(batches=batches, **chosen))
        if options.states:
            middle_only = {name: value for name, value in chosen.items() if name != "custom"}
            middle_only["variants"] = tuple(name for name in chosen["variants"] if name in orders.MIDDLE_NAMES)
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
    """Refuse options for texts on an image model, and options for images on a language model.

    This reads config.json only. A tokenizer named by the user would not turn an image model into a language model.
    """
    if "vocab_size" in target.config and options.images is not None:
        raise InputError(f"images: {target.name} is a language model: take --tasks, --corpus, --glue or --speed")
    for name in ("corpus", "tasks", "finetune", "glue"):
        if target.is_vision and getattr(options, name):
            raise InputError(f"{name}: {target.name} is a model of images: take --images or --speed")


def _speed_options(chosen: dict[str, Any]) -> dict[str, Any]:
    """Return the options that select orders of the blocks, without the orders that `--speed` does not measure.

    Random orders are left out, because they take as long as the reversed order. Variants of single blocks are also
    left out. `loops`, how many times looped_parallel runs the middle blocks, keeps only one value.
    """
    names = [name for name in chosen["variants"] if name not in ("random", *orders.BLOCK_NAMES)]
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
    """Write the table and page of all variants to the root folder, and print the scores of the full model.

    Also print the paths of these files. Return whether any analysis or variant failed.
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
                score = f"{look_up(record.metric).unit_title} {value(record.value)}"
                print(f"{sentence(each.analysis)}: {score}, the full model")
    if complete:
        table = add_task_medians(records.frame(complete)).frame
        rows = table[table["variant"].notna()] if "variant" in table else table.iloc[:0]
        files = {"variants.csv": rows.dropna(axis="columns", how="all")}
        print(*records.write_files(outcome.root / RESULTS, files), sep="\n")
        print(write_report(outcome.root, settings=outcome.settings))
    return outcome.report() or has_failed
