"""Measuring one model that is already trained: loaded whole, or read block by block."""

import contextlib
import hashlib
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from lit_layers import emergence, records, run_lock
from lit_layers.analyses.base import Analysis, LayerwiseAnalysis
from lit_layers.analyses.streamed import STATE, Progress, layerwise, walk
from lit_layers.errors import InputError
from lit_layers.identity import UNKNOWN, settings_name, settings_of
from lit_layers.models.build import load, weights_hash
from lit_layers.models.shard_files import ShardFiles
from lit_layers.models.streaming import StreamedModel
from lit_layers.models.view import LayeredModel
from lit_layers.records import Measurement
from lit_layers.series.known import Origin, refuse_another_model
from lit_layers.series.local import run_in

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["float32", "float64"]
UNFINISHED = ".stream"  # folder in the root: what a streamed measurement has found so far


def analyze(
    model: str | Path,
    analyses: Sequence[Analysis],
    *,
    root: str | Path,
    revision: str | None = None,
    stream_blocks: bool = False,
    device: Device = "auto",
    dtype: Dtype = "float32",
    progress: Progress | None = None,
) -> list[Measurement]:
    """What the analyses find on one model; each measurement is also a line of `root/measurements.jsonl`.

    What is there already, of the same options and weights, is not measured again. With `stream_blocks` the model is
    never in memory as a whole, and an interrupted call goes on behind the last finished block.

    Args:
        model: a folder with config.json and weights, or the name of a model of the Hub.
        analyses: what to measure; names are unique. Streamed: Trajectory, Representation, Coupling.
        root: the folder of the results; its name is the run's.
        revision: a branch, tag or commit of the Hub.
        stream_blocks: whether to read the model block by block.
        device: "auto" is a GPU where there is one.
        dtype: what the weights are converted to, however they are stored.
        progress: told what is done and what comes next.

    Raises:
        InputError: a model that is not there or damaged, options that do not fit it, an analysis that cannot stream; a
            root that holds the measurements of another model.
    """
    refuse_missing_data(analyses)
    selected = layerwise(analyses) if stream_blocks else []
    place, number = device_of(device), {"float32": torch.float32, "float64": torch.float64}[dtype]
    files, root = ShardFiles(model, revision=revision), Path(root)
    tell = progress or (lambda done, total, what: None)
    with run_lock.writing(root):
        if not stream_blocks:
            return _whole(files, analyses, root, revision, place, number, tell)
        with contextlib.closing(StreamedModel(files, device=place, dtype=number)) as view, _plain_numbers(place):
            return _streamed(view, selected, root, revision, tell)


def refuse_double_names(analyses: Sequence[Analysis]) -> None:
    """Refuses an empty list, and two analyses that would write under one name."""
    names = [analysis.name for analysis in analyses]
    if double := {name for name in names if names.count(name) > 1}:
        raise InputError(f"analyses: two are named {sorted(double)[0]!r}; give each a name of its own")
    if not analyses:
        raise InputError("analyses: expected at least one, got none")


def refuse_missing_data(analyses: Sequence[Analysis]) -> None:
    """Refuses what is wrong with the analyses whatever the model is, before one is opened or downloaded."""
    refuse_double_names(analyses)
    for analysis in analyses:
        analysis.check_data()


def own_tokenizer(model: str | Path, revision: str | None = None) -> str | None:
    """Where the tokenizer that a model was saved with is found, as recipes name it; None where it has none."""
    files = ShardFiles(model, revision=revision)
    if not files.has("tokenizer.json"):
        return None
    return files.model if files.local or revision is None else f"{files.model}@{files.commit}"


def _whole(
    files: ShardFiles,
    analyses: Sequence[Analysis],
    root: Path,
    revision: str | None,
    device: torch.device,
    dtype: torch.dtype,
    tell: Progress,
) -> list[Measurement]:
    view = LayeredModel(_loaded(files, dtype).to(device))
    for analysis in analyses:
        analysis.check(view)
    kept = _Kept(files, root, revision, weights_hash(view.model))
    for place, analysis in enumerate(analyses):
        tell(place, len(analyses), analysis.name)
        if not kept.is_done(analysis):
            kept.add(
                emergence.measure(
                    view,
                    analysis,
                    run=kept.run,
                    step=kept.step,
                    provenance=kept.source,
                    weights_hash=kept.weights_hash,
                )
            )
    tell(len(analyses), len(analyses), "")
    return kept.of(analyses)


def _streamed(
    view: StreamedModel, analyses: list[LayerwiseAnalysis], root: Path, revision: str | None, tell: Progress
) -> list[Measurement]:
    for analysis in analyses:
        analysis.check(view)
    kept = _Kept(view.files, root, revision, _hash_of_weights(view, root / UNFINISHED, tell), streamed=True)
    pending = [analysis for analysis in analyses if not kept.is_done(analysis)]
    # A kill between the first line and the last one leaves the blocks of all of them.
    together = root / UNFINISHED / _key(view, analyses)
    wanted = analyses if pending and (together / STATE).is_file() else pending
    if wanted:
        folder = root / UNFINISHED / _key(view, wanted)
        found = walk(view, wanted, folder, tell)
        for analysis in pending:
            mine = found[analysis.name]
            kept.add(
                Measurement(
                    run=kept.run,
                    step=kept.step,
                    tokens=None,
                    analysis=analysis.name,
                    records=mine.records,
                    seconds=mine.seconds,
                    error=mine.error,
                    provenance={**emergence.describe_run(view, analysis, kept.weights_hash), **kept.source},
                )
            )
        shutil.rmtree(folder)
    for leftover in (root / UNFINISHED).glob(f"*-{_fingerprint(view)}.txt"):
        leftover.unlink()
    with contextlib.suppress(OSError):  # another measurement is under way there
        (root / UNFINISHED).rmdir()
    return kept.of(analyses)


class _Kept:
    """The measurements of one model: those in the file, and those that are added."""

    def __init__(
        self, files: ShardFiles, root: Path, revision: str | None, weights_hash: str, *, streamed: bool = False
    ) -> None:
        self.file, self.run, self.weights_hash = root / "measurements.jsonl", run_in(root), weights_hash
        self.step = _step_of(revision or files.model)
        self.source: dict[str, Any] = {"checkpoint": files.model, "streamed": streamed}
        if files.commit is not None:
            self.source |= {"revision": revision or "main", "commit": files.commit}
        self.measurements = records.read(self.file)
        origin = Origin(self.step, self.source, lambda: ("weights_hash", weights_hash))
        refuse_another_model(root, self.run, self.measurements, [origin])

    def is_done(self, analysis: Analysis) -> bool:
        return records.is_done(
            self.measurements,
            run=self.run,
            step=self.step,
            analysis=analysis.name,
            config_hash=analysis.config_hash(),
            data_hash=analysis.data_hash(),
            weights_hash=self.weights_hash,
        )

    def add(self, measurement: Measurement) -> None:
        records.append(self.file, measurement)
        self.measurements.append(measurement)

    def of(self, analyses: Sequence[Analysis]) -> list[Measurement]:
        """The last measurement of each analysis with its own settings, or that failed before they were known."""
        last = {(m.analysis, settings_of(m)): m for m in self.measurements if (m.run, m.step) == (self.run, self.step)}
        names = [(each.name, settings_name(each.config_hash(), each.data_hash())) for each in analyses]
        return [last.get((name, settings)) or last[name, UNKNOWN] for name, settings in names]


def _loaded(files: ShardFiles, dtype: torch.dtype) -> nn.Module:
    return load(files.model, revision=files.commit, dtype=dtype)


def _hash_of_weights(view: StreamedModel, folder: Path, tell: Progress) -> str:
    """From the files, all of which it takes to read; or from an interrupted measurement of the same files."""
    path = folder / f"weights-{_fingerprint(view)}.txt"
    if not path.is_file():
        tell(0, 1, "hashing the weights")
        found = view.weights_hash()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".part")
            partial.write_text(found)
            partial.replace(path)
        except OSError as error:
            raise InputError(f"root: cannot write {path}: {(error.strerror or str(error)).lower()}") from error
    return path.read_text()


def _fingerprint(view: StreamedModel) -> str:
    return f"{view.files.fingerprint()}-{str(view.dtype).removeprefix('torch.')}"


def _key(view: StreamedModel, analyses: Sequence[Analysis]) -> str:
    """What blocks already measured depend on: files, options, data, precision, kind of device."""
    parts = [_fingerprint(view), view.device.type, *(f"{a.config_hash()} {a.data_hash()}" for a in analyses)]
    return hashlib.sha256("/".join(parts).encode()).hexdigest()[:16]


def _step_of(name: str) -> int | None:
    """The training step that a folder or revision is named after: step-000001000, step1000."""
    found = re.fullmatch(r"step-?(\d+)", Path(name).name)
    return int(found[1]) if found else None


def device_of(name: Device) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("device: cuda was asked for and torch sees no GPU: use cpu or auto")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")


@contextlib.contextmanager
def _plain_numbers(device: torch.device) -> Iterator[None]:
    """What `emergence.measure` gives an analysis: fixed seeds, derivatives on, no autocast, full float32 precision."""
    with (
        emergence.kept_random_state(),
        emergence.full_float32_precision(),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.autocast(device.type, enabled=False),
    ):
        yield
