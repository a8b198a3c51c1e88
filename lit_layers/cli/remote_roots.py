"""A command line that names runs on a store, s3://bucket/run: the command itself gets their local copies."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, cast

from lit_layers.cli.console import note
from lit_layers.cli.options import Recipe
from lit_layers.errors import InputError, RunLostError
from lit_layers.files import remote_copy, remote_runs
from lit_layers.measuring.measuring_options import AUTO

MEASURING = ("analyze", "intervene", "mteb")
READING = ("audit", "correlate", "emerge", "report", "select")
_OF_CHECKPOINTS = (*MEASURING, "audit", "select")


@contextlib.contextmanager
def in_local_copies(recipe: Recipe, environment: Mapping[str, str]) -> Iterator[None]:
    """Gives a command local copies in place of what its words name on a store, as `--root` or as words that are no
    option's. What it writes there is sent while it runs, and the rest at its end.

    Raises:
        InputError: a place that cannot be had; a command that needs a folder of its own.
    """
    places: dict[tuple[str, str], Path] = {}

    def local(option: str, url: str) -> str:
        return str(places.setdefault((option, url), remote_copy.LocalCopy(url).folder))

    recipe.parser.local = local
    options = recipe.options
    if not places:
        yield
        return
    command = recipe.verb.__name__
    _refuse(recipe, environment)
    copies, is_first = [], not int(environment.get("LOCAL_RANK") or 0)
    has_root = any(option == "root" for option, _ in places)
    with contextlib.ExitStack() as held:
        for option, word in sorted(places, key=lambda place: place[0] == "root"):  # the root last
            url = word.rstrip("/")
            is_model = option != "root" and command in _OF_CHECKPOINTS
            name_filter = remote_copy.checkpoints if is_model else remote_copy.numbers
            is_alone = is_model and remote_runs.holds(url, "config.json")
            if is_alone and (of := remote_copy.CHECKPOINT.fullmatch(url)) and remote_runs.holds(of["run"], "run.json"):
                url, name_filter = of["run"], functools.partial(remote_copy.to_measure, of["name"])
                alone, there = str(places[option, word]), str(remote_copy.LocalCopy(url).folder / of["name"])
                places[option, word], named = Path(there), options[option]
                options[option] = (
                    [there if each == alone else each for each in named] if isinstance(named, list) else there
                )
            writes = option == "root" if has_root else command in ("fit", *MEASURING)
            if not is_first:  # the first rank has it, and started this one
                continue
            if writes and not is_alone and not options.get("plan"):
                name_filter = remote_copy.to_resume if command == "fit" else name_filter
                held.enter_context(remote_runs.written(url, name_filter))
            else:
                remote_runs.read(url, name_filter)
                copies.append(remote_runs.Additions(url))
        with _in_addresses(remote_runs.addressed, remote_runs.copies):
            yield
        for copy in copies:
            copy.send()
    for url in dict.fromkeys(url for _, url in places) if is_first else ():
        note(f"{url}: all is there")


@contextlib.contextmanager
def _in_addresses(addressed: Callable[[str], str], copies: Mapping[str, str]) -> Iterator[None]:
    """What is printed has addresses on the store in place of the local copies' paths; what is refused has both."""
    try:
        with contextlib.redirect_stdout(cast("TextIO", _Addressed(sys.stdout, addressed))):
            yield
    except RunLostError:
        raise
    except InputError as error:
        named = [f"{url} is worked on in {folder}" for folder, url in copies.items() if folder in str(error)]
        if not named:
            raise
        raise InputError("; ".join([addressed(str(error)), *named])) from error


@dataclass
class _Addressed:
    """A stream that puts addresses into what is written to it. W&B sets a `write` of its own, to keep what is said."""

    stream: TextIO
    addressed: Callable[[str], str]

    def write(self, text: str) -> int:
        return self.stream.write(self.addressed(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _refuse(recipe: Recipe, environment: Mapping[str, str]) -> None:
    command, options = recipe.verb.__name__, recipe.options
    if command not in ("fit", *MEASURING, *READING):
        raise InputError(f"{command} needs a local folder; a store can be the --root of fit, {', '.join(MEASURING)}")
    several = {"WORLD_SIZE": "RANK"}
    if options.get("engine") != "ray":  # `srun ... ray symmetric-run` starts the command in one of its tasks alone
        several["SLURM_NTASKS"] = "SLURM_PROCID"
    ranks = max((int(environment.get(name) or 1) for name, rank in several.items() if rank in environment), default=1)
    if ranks > 1 or int(environment.get("NODE_RANK") or 0):
        raise InputError(
            f"root: one process writes a run on a store, and {ranks} were started: leave torchrun and srun out (fit "
            "starts the ranks of one machine itself, --engine ray those of many), or name a folder that all see"
        )
    if options.get("shard", AUTO) != AUTO:
        raise InputError("shard: one process writes a run on a store: leave it out; --engine ray divides the work")
    if "overwrite" in recipe.typed("if_exists"):
        raise InputError("if_exists: no run on a store is overwritten: choose another root, or remove the run there")
    if options.get("measure") == "async":
        raise InputError("measure: async writes into a local folder; with a root on a store leave it out")
