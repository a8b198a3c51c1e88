"""`lit-layers analyze`: measure a trained model, whole or block by block, or a series of checkpoints."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentParser, Namespace
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from lit_layers.analyses.base import Analysis
from lit_layers.cli.messages import one_sentence
from lit_layers.errors import InputError

FAILED, INTERRUPTED = 1, 130
CORPUS = "python"
OWN_TOKENIZER = "<the model's own tokenizer>"


class _Parser(ArgumentParser):
    """Says what is wrong in one sentence, not after fifty lines of usage."""

    def error(self, message: str, ex: Exception | None = None) -> None:  # pyright: ignore
        raise InputError(one_sentence(message, self.get_defaults(skip_validation=True).keys(branches=True))) from None


def main(argv: list[str]) -> int:
    """Measures what the options say, prints what came out; 130 where Ctrl-C cut it short, 1 if an analysis failed."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # they would write over ours; read at import
    options = _parse(argv)
    if _is_series(options):
        from lit_layers.cli.analyze_series import run

        return run(options, options.analyses or _usual(options.corpus, options.tokenizer), _bar)
    from lit_layers.offline import analyze

    root = Path(options.root) if options.root else Path("checkpoints") / _name(options.model)
    try:
        with _bar("opening the model") as show:
            found = analyze(
                options.model,
                options.analyses or _usual(options.corpus, options.tokenizer),
                root=root,
                revision=options.revision,
                stream_blocks=options.stream_blocks,
                device=options.device,
                dtype=options.dtype,
                progress=show,
            )
    except KeyboardInterrupt:
        print(f"interrupted: run the same command again to go on in {root}", file=sys.stderr)
        return INTERRUPTED
    for measurement in found:
        if measurement.error is not None:
            print(f"failed: {measurement.analysis}: {measurement.error}", file=sys.stderr)
        else:
            print(f"{measurement.analysis:20} {len(measurement.records):>7,} numbers {measurement.seconds:>9.1f} s")
    print(f"{root / 'measurements.jsonl'}; draw them with `lit-layers report {root}`")
    return FAILED if any(measurement.error is not None for measurement in found) else 0


def _parse(argv: list[str]) -> Namespace:
    parser = _parser()
    parser.set_defaults(tokenizer=OWN_TOKENIZER)
    try:
        options = parser.parse_args(argv)
        _refuse_what_does_not_fit(options)
        if options.tokenizer == OWN_TOKENIZER:
            if _is_series(options):
                from lit_layers.cli.analyze_series import text_of

                corpus, own = text_of(options)
                if corpus is not None and options.corpus == CORPUS:
                    parser.set_defaults(corpus=corpus)
            else:
                from lit_layers.offline import own_tokenizer

                own = own_tokenizer(options.model, options.revision)
            if own is None and (not options.analyses or OWN_TOKENIZER in parser.dump(options, skip_validation=True)):
                raise InputError(f"tokenizer: {options.model} carries none; name one with --tokenizer")
            parser.set_defaults(tokenizer=own)
            options = parser.parse_args(argv)
        return parser.instantiate_classes(options)  # pyright: ignore[reportReturnType]
    except (OmegaConfBaseException, YAMLError) as error:
        raise InputError(" ".join(str(error).split())) from error


def _parser() -> ArgumentParser:
    parser = _Parser(
        prog="lit-layers analyze",
        description="Measure every layer of a model, or of each checkpoint of a series. Run again it continues.",
        exit_on_error=False,
        parser_mode="omegaconf+",
    )
    parser.add_argument(
        "model",
        type=str,
        help="A folder with config.json and weights, or a name on the Hub. Of a series: a folder of steps, a name on "
        "the Hub with --steps, or a manifest.",
    )
    parser.add_argument(
        "--steps",
        type=list[int] | dict[str, int] | str | None,
        default=None,
        help="Of a series: all, a list, {log_spaced: N}, pythia, {every: N}.",
    )
    parser.add_argument(
        "--allow-suspect",
        "--allow_suspect",
        action="store_true",
        help="Measure checkpoints, too, that the audit of the series found suspect.",
    )
    parser.add_argument(
        "--keep-downloads",
        "--keep_downloads",
        type=bool,
        default=True,
        help="false: remove each checkpoint of a series from the Hub's cache once it is measured.",
    )
    parser.add_argument("--shard", type=str, default="0/1", help="i/n: every n-th checkpoint from the i-th, from 0.")
    parser.add_argument(
        "--config", action="config", help="A recipe with `analyses`, e.g. recipes/analyses/stream.yaml."
    )
    parser.add_argument(
        "--stream-blocks",
        "--stream_blocks",
        action="store_true",
        help="Read the model block by block: it is never in memory as a whole.",
    )
    parser.add_argument("--root", type=str | None, default=None, help="Results (default: checkpoints/NAME OF MODEL).")
    parser.add_argument("--revision", type=str | None, default=None, help="A branch, tag or commit of the Hub.")
    parser.add_argument(
        "--device", type=Literal["auto", "cpu", "cuda"], default="auto", help="auto: a GPU if there is one."
    )
    parser.add_argument(
        "--dtype", type=Literal["float32", "float64"], default="float32", help="What weights are converted to."
    )
    parser.add_argument("--corpus", type=str, default=CORPUS, help="Stands for ${corpus} in recipes.")
    parser.add_argument("--tokenizer", type=str | None, default=None, help="Stands for ${tokenizer} in recipes.")
    parser.add_argument(
        "--analyses", type=list[Analysis], default=[], help="Default: Trajectory, Representation and Coupling."
    )
    return parser


def _is_series(options: Any) -> bool:
    folder = Path(options.model)
    is_steps = folder.is_dir() and not (folder / "config.json").is_file()
    return options.steps is not None or is_steps or options.model.endswith((".yaml", ".yml"))


def _refuse_what_does_not_fit(options: Any) -> None:
    if not _is_series(options):
        if options.allow_suspect or options.shard != "0/1" or not options.keep_downloads:
            raise InputError("--allow-suspect, --keep-downloads and --shard are for series: name its --steps")
        return
    if options.stream_blocks:
        raise InputError("--stream-blocks reads one model: name one step's folder, or one --revision without --steps")
    if options.revision is not None:
        raise InputError(f"--revision {options.revision} is one model: leave it out, or leave --steps out")


def _name(model: str) -> str:
    """The folder's name or the repository's; step-000001000 alone would not say of which run."""
    path = Path(model).resolve()
    return f"{path.parent.name}-{path.name}" if path.name.startswith("step-") else path.name


def _usual(corpus: str, tokenizer: str) -> list[Analysis]:
    """What is measured where no recipe says otherwise."""
    from lit_layers.analyses import Coupling, Representation, Trajectory
    from lit_layers.data import EvalText

    text = EvalText(corpus, tokenizer, num_sequences=64, num_tokens=128)
    few = EvalText(corpus, tokenizer, num_sequences=8, num_tokens=64)
    return [Trajectory(batches=text), Representation(batches=text), Coupling(batches=few)]


@contextmanager
def _bar(opening: str) -> Iterator[Callable[[int, int, str], None]]:
    """How far a measurement has come, on standard error: a function of what is done, of how much, and what is next."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Drawn after each block and not by a thread of its own.
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as drawn:
        task = drawn.add_task(opening, total=None)

        def show(done: int, total: int, what: str) -> None:
            changes: dict[str, Any] = {"description": what} if what else {}
            drawn.update(task, total=total, completed=done, refresh=True, **changes)

        yield show
