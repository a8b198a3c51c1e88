"""The options of `lit-layers mteb`: read, and refused where they do not fit."""

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from lit_layers.cli.measuring import MODEL, add_options, settle
from lit_layers.errors import InputError

if TYPE_CHECKING:
    from lit_layers.tasks.catalogue import Task
    from lit_layers.tasks.mteb_tasks import Sources

STATES = ("resid", "normed", "hf")


def read_options(argv: list[str]) -> argparse.Namespace:
    """What a command line says: `layers` None for all, `tasks` as they are named, `is_series` beside them.

    Raises:
        InputError: options that are unknown, out of range or do not fit together.
    """
    options = _parser().parse_args(argv)
    options.layers = _layers(options.layers)
    options.tasks = _names("tasks", options.tasks)
    options.domains = None if options.domains is None else _names("domains", options.domains)
    for name in ("max_tokens", "seed"):
        least = 0 if name == "seed" else 1
        if getattr(options, name) < least:
            raise InputError(f"{name}: expected at least {least}, got {getattr(options, name)}")
    if not 0 < options.cache_gb < math.inf:
        raise InputError(f"cache_gb: expected a positive number, got {options.cache_gb:g}")
    settle(options)
    return options


def sources_and_tasks(options: argparse.Namespace) -> "tuple[Sources, list[Task]]":
    """Where data come from, and which tasks are asked for.

    Raises:
        InputError: a folder that is not there, a task that is none.
    """
    from lit_layers.tasks.catalogue import LOCAL, resolve
    from lit_layers.tasks.mteb_tasks import Sources

    sources = Sources(folder=options.folder, mirror=options.mirror)
    sources.check()
    if LOCAL in options.tasks and options.folder is None:
        raise InputError("tasks: local means all tasks whose data lie in --folder, which was not given")
    return sources, resolve(options.tasks, domains=options.domains, local=sources.local_names())


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see `{self.prog} --help`")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="lit-layers mteb",
        description="Score every layer of a model, or of each checkpoint of a series, on tasks of MTEB. Run again it "
        "continues.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", metavar="MODEL|SERIES", help=MODEL)
    add("--tokenizer", help="default: the model's own")
    add_options(add, root="results (default: checkpoints/NAME OF MODEL, or a run's own folder)")
    add("--tasks", default="layerwise32", help="layerwise32, local (all that --folder holds), or names, with commas "
        "between them (default: layerwise32)")  # fmt: skip
    add("--domains", help="of these tasks only some: classification, clustering, pair_classification, reranking, sts")
    add("--layers", default="all", help="all, or numbers such as 0,3,6 (default: all); 0 is the embedding output")
    add("--folder", type=Path, help="local data in their own layout (docs/mteb.md); looked at first")
    add("--mirror", type=Path, help="a folder with copies of data sets of the Hub, as ORGANIZATION/NAME; next")
    add("--pooling", choices=["mean", "last", "cls"], default="mean", help="default: mean, over real tokens")
    add("--states", choices=STATES, default="resid", help="the convention: resid, as a block leaves them (default); "
        "normed, each after the final norm; hf, only the last")  # fmt: skip
    add("--max_tokens", type=int, default=2048, help="a longer text loses its end; also at the model's limit "
        "(default: 2048)")  # fmt: skip
    add("--metrics", action="store_true", help="measure the first 1,000 texts of each task without labels, too")
    add("--cache", type=Path, metavar="FOLDER", help="of embeddings (default: below the root)")
    add("--cache_gb", type=float, default=20.0, help="how much it may hold; the oldest task gives way (default: 20)")
    add("--store_dtype", choices=["float32", "bfloat16", "float16"], default="float32", help="of embeddings that are "
        "kept (default: float32; the halves change scores a little)")  # fmt: skip
    add("--seed", type=int, default=42, help="of mteb's draws (default: 42, as mteb's)")
    return parser


def _layers(text: str) -> tuple[int, ...] | None:
    if text == "all":
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise InputError(f"layers: expected all, or numbers with commas between them, such as 0,3,6, got {text!r}")
    return tuple(sorted({int(part) for part in parts}))


def _names(option: str, text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise InputError(f"{option}: expected names with commas between them, got {text!r}")
    return names
