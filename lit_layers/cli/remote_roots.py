"""A command line that names runs on a store, s3://bucket/run: the command itself gets their local copies."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO, cast

from lit_layers.errors import InputError, RunLostError
from lit_layers.files.remote_store import is_remote

MEASURING = ("analyze", "intervene", "mteb")
READING = ("audit", "compact", "correlate", "emerge", "publish", "report", "select")
_OF_CHECKPOINTS = (*MEASURING, "audit", "select")
_WRITES_NOTHING = {"-h", "--help", "--plan", "--print_config"}


@contextlib.contextmanager
def in_local_copies(command: str, argv: list[str], environment: Mapping[str, str]) -> Iterator[list[str]]:
    """Gives the command line with local copies in place of what is on a store, as `--root` or among the words that are
    no option's. What the command writes there is sent while it runs, and the rest at its end.

    Raises:
        InputError: a place that cannot be had; a command that needs a folder of its own.
    """
    places = {number: option for number, option in enumerate(map(_option, ["", *argv], argv)) if option is not None}
    if not places:
        yield argv
        return
    _refuse(command, argv, environment)
    from lit_layers.files import remote_copy, remote_runs

    line, copies, is_first = [*argv], [], not int(environment.get("LOCAL_RANK") or 0)
    with contextlib.ExitStack() as held:
        for number, option in sorted(places.items(), key=lambda place: place[1]):  # the root last
            url = argv[number].removeprefix("--root=").rstrip("/")
            is_model = option == "" and command in _OF_CHECKPOINTS
            wanted = remote_copy.checkpoints if is_model else remote_copy.numbers
            is_alone = is_model and remote_runs.holds(url, "config.json")
            if is_alone and (of := remote_copy.CHECKPOINT.fullmatch(url)) and remote_runs.holds(of["run"], "run.json"):
                url, wanted = of["run"], functools.partial(remote_copy.to_measure, of["name"])
            writes = option == "--root" if "--root" in places.values() else command in ("fit", *MEASURING)
            if not is_first:  # the first rank has it, and started this one
                folder = remote_copy.LocalCopy(url).folder
            elif writes and not is_alone and not _WRITES_NOTHING & {*argv}:
                wanted = remote_copy.to_resume if command == "fit" else wanted
                folder = held.enter_context(remote_runs.written(url, wanted))
            else:
                folder = remote_runs.read(url, wanted)
                copies.append(remote_runs.Additions(url))
            line[number] = argv[number].replace(url, str(folder))
        with _in_addresses(remote_runs.addressed, remote_runs.copies):
            yield line
        for copy in copies:
            copy.send()
    for url in dict.fromkeys(argv[number].removeprefix("--root=") for number in places) if is_first else ():
        print(f"{url}: all is there", file=sys.stderr)


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


def _option(before: str, word: str) -> str | None:
    """The option that a place on a store is the value of, "" where it is a word of its own; None: another word."""
    if word.startswith("--root=") and is_remote(word.removeprefix("--root=")):
        return "--root"
    if not is_remote(word) or word.startswith("-"):
        return None
    if before == "--root":
        return before
    return None if before.startswith("-") and "=" not in before else ""


def _refuse(command: str, argv: list[str], environment: Mapping[str, str]) -> None:
    if command not in ("fit", *MEASURING, *READING):
        raise InputError(f"{command} needs a local folder; a store can be the --root of fit, {', '.join(MEASURING)}")
    several = {"WORLD_SIZE": "RANK"}
    if _engine(argv) != "ray":  # `srun ... ray symmetric-run` starts the command in one of its tasks alone
        several["SLURM_NTASKS"] = "SLURM_PROCID"
    ranks = max((int(environment.get(name) or 1) for name, rank in several.items() if rank in environment), default=1)
    if ranks > 1 or int(environment.get("NODE_RANK") or 0):
        raise InputError(
            f"root: one process writes a run on a store, and {ranks} were started: leave torchrun and srun out (fit "
            "starts the ranks of one machine itself, --engine ray those of many), or name a folder that all see"
        )
    words = {word.partition("=")[0] for word in argv}
    if "--shard" in words:
        raise InputError("shard: one process writes a run on a store: leave it out; --engine ray divides the work")
    if command == "fit" and "--if_exists=overwrite" in _joined(argv):
        raise InputError("if_exists: no run on a store is overwritten: choose another root, or remove the run there")
    if command == "fit" and "--measure=async" in _joined(argv):
        raise InputError("measure: async writes into a local folder; with a root on a store leave it out")


def _engine(argv: list[str]) -> Any:
    """The engine that a command line asks for, itself or in its recipes: the last word counts."""
    import yaml

    engine = None
    for option, following in pairwise([*argv, ""]):
        name, is_joined, value = option.partition("=")
        value = value if is_joined else following
        if name == "--engine":
            engine = value
        elif name in ("-c", "--config"):
            with contextlib.suppress(OSError, UnicodeError, RecursionError, yaml.YAMLError):  # said by who reads it
                whole = Path(value).is_file()  # a pipe is read once, by who needs all of it
                recipe = yaml.safe_load(Path(value).read_text(encoding="utf-8")) if whole else None
                engine = recipe.get("engine", engine) if isinstance(recipe, dict) else engine
    return engine


def _joined(argv: list[str]) -> set[str]:
    """Options with their values, however they are written."""
    pairs = (f"{word}={value}" for word, value in pairwise(argv))
    return {word.replace("if-exists", "if_exists") for word in (*argv, *pairs)}
