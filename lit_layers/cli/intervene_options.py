"""The options of `lit-layers intervene`: read, and refused where they do not fit."""

import argparse
from pathlib import Path
from typing import NoReturn

from lit_layers.cli.measuring import MODEL, add_options, settle
from lit_layers.errors import InputError

ALL = "all"
TASKS = ("lambada", "arc_challenge", "hellaswag", "winogrande", "gsm8k")
OF_TASKS = ("folder", "limit", "max_new_tokens")
OF_IMAGES = ("num_images", "image_size", "normalisation")


def read_options(argv: list[str]) -> argparse.Namespace:
    """What a command line says: `variants` and `tasks` as tuples, `middles` None for all, `is_series` beside them.

    Raises:
        InputError: options that are unknown, out of range or do not fit together.
    """
    from lit_layers.functional.block_schedules import LOOPS, SEEDS, VARIANTS

    options = _parser().parse_args(argv)
    asked = _names("variants", options.variants)
    options.variants = VARIANTS if asked == (ALL,) else asked
    for name in options.variants:
        if name not in VARIANTS:
            raise InputError(f"variants: there is no {name!r}; choose all, or from {', '.join(VARIANTS)}")
    options.middles = None if options.middles == ALL else _numbers("middles", options.middles, 1)
    options.seeds = SEEDS if options.seeds is None else _numbers("seeds", options.seeds, 0)
    options.loops = LOOPS if options.loops is None else _numbers("loops", options.loops, 1)
    options.schedule = tuple(options.schedule or ())
    options.execution = _names("execution", options.execution)
    if strange := [name for name in options.execution if name not in ("loop", "stacked")]:
        raise InputError(f"execution: expected loop, stacked, or loop,stacked, got {strange[0]!r}")
    if options.execution != ("loop",) and not options.speed:
        raise InputError("execution: is for --speed, which was not given: leave it out")
    for name in ("model", "tokenizer", "corpus", "images"):
        if (value := getattr(options, name)) is not None and not value.strip():
            raise InputError(f"{name}: expected a name or a path, got {value!r}")
    for name in ("limit", "max_new_tokens", "num_images", "image_size", "num_sequences", "num_tokens"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise InputError(f"{name}: expected at least 1, got {value}")
    _settle_what_is_measured(options)
    settle(options)
    if options.is_series and (name := _given(options, ("finetune", "glue"))):
        raise InputError(f"{name}: trains one model, and a series was named: name one of its checkpoints")
    return options


def _settle_what_is_measured(options: argparse.Namespace) -> None:
    """Tasks are the default; images or GLUE take their place."""
    if options.images is not None and (name := _given(options, ("tasks", "corpus", "glue", "finetune", *OF_TASKS))):
        raise InputError(f"{name}: is for language models, and --images was given: leave it out")
    if options.images is None and (name := _given(options, OF_IMAGES)):
        raise InputError(f"{name}: is for --images, which was not given: leave it out")
    if options.corpus is None and (name := _given(options, ("num_sequences",))):
        raise InputError(f"{name}: is for --corpus, which was not given: leave it out")
    others = _given(options, ("images", "glue", "corpus", "finetune")) or options.speed
    options.tasks = _names("tasks", options.tasks) if options.tasks is not None else () if others else TASKS
    if not options.tasks and (name := _given(options, OF_TASKS[1:])):
        raise InputError(f"{name}: is for --tasks, which were not given: leave it out")
    if options.folder is not None and not options.tasks and options.glue is None:
        raise InputError("folder: is for --tasks and --glue, neither of which was given: leave it out")
    if options.num_tokens is not None and options.corpus is None and not options.speed:
        raise InputError("num_tokens: is for --corpus and --speed, neither of which was given: leave it out")
    if options.glue is not None and options.revision is not None:
        raise InputError(f"revision: --glue trains what {options.model} holds without one: leave it out")
    if options.glue is not None and options.dtype != "float32":
        raise InputError("dtype: --glue trains in the precision of its recipe: leave it out")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see `{self.prog} --help`")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="lit-layers intervene",
        description="Run the blocks of a model skipped, repeated, reversed, shuffled, side by side, and see what "
        "breaks. Run again it continues.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", metavar="MODEL|SERIES", help=MODEL)
    add("--tokenizer", help="default: the model's own")
    add_options(add, root="results (default: checkpoints/NAME OF MODEL, or a run's own folder)")
    add("--variants", default=ALL, help="all, or of baseline, middle_repeat, skip, parallel, reverse, random, "
        "looped_parallel, skip_one, switch, with commas between them (default: all)")  # fmt: skip
    add("--schedule", action="append", metavar="STEPS", help="one of your own, such as '1 2 (3,4,5) (3,4,5) 6'; may "
        "be given several times")  # fmt: skip
    add("--middles", default=ALL, help="how many middle blocks are changed: all, or numbers such as 1,5,9 "
        "(default: all)")  # fmt: skip
    add("--seeds", help="of random orders (default: 0 to 9)")
    add("--loops", help="how often looped_parallel runs the middle (default: 2 to 8)")
    add("--tasks", help=f"of {', '.join(TASKS)}, further ones of lm-eval, or with --folder of docs/interventions.md "
        "(default: these five)")  # fmt: skip
    add("--folder", type=Path, help="local data, whose tasks.yaml says where the tasks lie, also those of --glue "
        "(default: the Hub)")  # fmt: skip
    add("--limit", type=int, help="score the first rows of a task only")
    add("--max_new_tokens", type=int, help="of a generated answer (default: 256)")
    add("--corpus", help="measure loss, accuracy and divergence on held-out text of it, too")
    add("--num_sequences", type=int, help="of that text (default: 64)")
    add("--num_tokens", type=int, help="of each text, also of those that are timed (default: 128)")
    add("--images", help="instead, for an image classifier: digits, cifar10, a local path, ORG/NAME")
    add("--num_images", type=int, help="of its test split (default: 256)")
    add("--image_size", type=int, help="of the model's input, in px (default: the source's)")
    add("--normalisation", choices=["imagenet", "half", "source"], help="of pixels (default: source)")
    add("--speed", action="store_true", help="measure the latency of each variant against the full model")
    add("--execution", default="loop", help="how groups side by side are timed: loop, stacked, or both with a comma "
        "(default: loop)")  # fmt: skip
    add("--finetune", type=Path, metavar="RECIPE", help="train each changed model, before and after "
        "(recipes/finetune/text.yaml)")  # fmt: skip
    add("--glue", type=Path, metavar="RECIPE", help="fine-tune an encoder on GLUE in each variant "
        "(recipes/glue/small_steps.yaml)")  # fmt: skip
    return parser


def _names(option: str, text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise InputError(f"{option}: expected names with commas between them, got {text!r}")
    return names


def _numbers(option: str, text: str, least: int) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) >= least for part in parts):
        raise InputError(f"{option}: expected numbers of at least {least} with commas between them, got {text!r}")
    return tuple(dict.fromkeys(int(part) for part in parts))


def _given(options: argparse.Namespace, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if getattr(options, name) is not None), None)
