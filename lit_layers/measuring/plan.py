"""What a command will cost, before it begins: counts from shapes, seconds from a short calibration on this machine."""

import functools
import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path

import torch

from lit_layers.analyses.base import NUM_CHECKED, Analysis, DividedAnalysis, RoundedAnalysis, describe
from lit_layers.errors import InputError
from lit_layers.machine import free_memory
from lit_layers.measuring.calibration import Bench
from lit_layers.models.costs import this_machine
from lit_layers.models.view import LayeredModel
from lit_layers.models.workload import Part, Work, around, bytes_of, bytes_of_model, flop, trained

UNKNOWN = "unknown: timed when it first runs"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One analysis on one checkpoint; `work` is None where it is unknown."""

    name: str
    work: Work | None
    flop: float = 0.0
    seconds: float = 0.0
    how: str = UNKNOWN


@dataclass(kw_only=True)
class Plan:
    """What a command does, on `num_checkpoints` of one model.

    `num_reads`: how often the weights are read block by block; 0: they are held as a whole.
    """

    model: LayeredModel
    device: torch.device
    rows: list[Row] = field(default_factory=list)
    num_checkpoints: int = 1
    num_reads: int = 0

    @property
    def weights(self) -> int:
        """Bytes of weights that are held at a time; of blocks the one that is read ahead, too."""
        whole = bytes_of_model(self.model)
        return min(whole, 2 * max(map(bytes_of, self.model.blocks))) if self.num_reads else whole

    @property
    def unknown(self) -> list[str]:
        """The analyses that nobody knows the cost of."""
        return [row.name for row in self.rows if row.work is None]

    @property
    def whole(self) -> Work:
        """Of one checkpoint; memory is that of the most demanding analysis, block by block of all together."""
        works = [row.work for row in self.rows if row.work is not None]
        whole = functools.reduce(Work.__add__, works, Work())
        if not self.num_reads:
            return whole
        return replace(whole, device=sum(work.device for work in works), host=sum(work.host for work in works))

    @property
    def seconds(self) -> float:
        """Of one checkpoint."""
        return sum(row.seconds for row in self.rows)

    def costliest(self) -> Row:
        """The analysis that takes longest."""
        return max(self.rows, key=lambda row: row.seconds)

    def table(self) -> list[dict[str, str]]:
        """A row for each analysis on one checkpoint, then one checkpoint, then all of them."""
        lines = [_cells(row.name, row.work, row.flop, row.seconds) for row in self.rows]
        total = sum(row.flop for row in self.rows)
        lines.append(_cells("one checkpoint", self.whole, total, self.seconds))
        if self.num_checkpoints > 1:
            n, whole = self.num_checkpoints, self.whole
            several = replace(whole, texts=n * whole.texts, tokens=n * whole.tokens, parts=whole.parts * n)
            lines.append(_cells(f"{n} checkpoints", several, n * total, n * self.seconds))
        return lines

    def notes(self) -> list[str]:
        """How the numbers came about, a sentence each."""
        layers, dim = self.model.num_layers, self.model.dim
        machine, weights = this_machine(str(self.device)), f"its weights take {size(self.weights)} more on the device"
        if self.num_reads:
            weights += f"; all {size(bytes_of_model(self.model))} are read {self.num_reads} times, not in the seconds"
        threads = f"{machine.num_threads} thread{'s' if machine.num_threads > 1 else ''}"
        yours = [f"{row.name}: {row.how}" for row in self.rows]
        return [
            f"{type(self.model.model).__name__}, {layers} blocks of width {dim}; {weights}",
            f"seconds: timed now on {machine.processor}, {threads}, torch {machine.torch}, at these sizes",
            *yours,
        ]

    def refuse(self, root: Path) -> None:
        """Refuses what cannot end on this machine.

        Raises:
            InputError: memory or disk that is not there.
        """
        for row in [Row(name="all blocks", work=self.whole)] if self.num_reads else self.rows:
            if row.work is None:
                continue
            on_cpu = self.device.type == "cpu"
            device = self.weights + row.work.device + (row.work.host if on_cpu else 0)
            rooms = [("device memory", device, free_memory(self.device))]
            if not on_cpu:
                rooms.append(("memory", row.work.host, free_memory(torch.device("cpu"))))
            rooms.append(("disk", row.work.disk, free_disk(root)))
            for what, needed, free in rooms:
                if free is not None and needed > free:
                    raise InputError(
                        f"{row.name}: takes {size(needed)} of {'memory' if on_cpu and 'memory' in what else what}, and "
                        f"{size(free)} are free: ask for fewer or shorter texts, or leave it out"
                    )


def planned(
    model: LayeredModel,
    analyses: Sequence[Analysis],
    *,
    device: torch.device,
    num_checkpoints: int = 1,
) -> Plan:
    """What analyses take on a model that may hold no weights.

    Raises:
        InputError: options that do not fit the model, data that cannot be had or of which there cannot be enough.
    """
    plan = Plan(model=model, device=device, num_checkpoints=num_checkpoints)
    bench = Bench(model, device)
    passed: dict[str, tuple[str, float]] = {}  # by the texts: which analysis they are booked to, how many block runs
    for analysis in analyses:
        analysis.check_options(model)
        work = analysis.work(model)
        if work is None:
            plan.rows.append(Row(name=analysis.name, work=None))
            continue
        work += around(model, work)
        if isinstance(analysis, RoundedAnalysis) and analysis.dtype == "bfloat16":
            plan.rows.append(_rounded(analysis.name, work, bench))
            continue
        first, others = _first_pass(model, work, texts_of(analysis)), {}
        for key, part in first.items():  # a text goes through the blocks once, whoever asked for it
            owner, count = passed.get(key, (analysis.name, 0.0))
            if part.count * part.size[0] <= count:
                work, others[owner] = replace(work, parts=tuple(each for each in work.parts if each is not part)), None
            else:
                passed[key] = analysis.name, part.count * part.size[0]
        shared = f"passes of {' and '.join(others)}" if others else ""
        plan.rows.append(_row(analysis.name, work, bench, shared))
    return plan


def texts_of(analysis: Analysis) -> tuple[str, ...]:
    """The sets of texts of which an analysis shares a pass with the others that look at them, in the order of its
    work."""
    shares = isinstance(analysis, DividedAnalysis) or type(analysis).announced is not Analysis.announced
    data = getattr(analysis, "batches", None) if shares else None
    return tuple(map(_described, getattr(analysis, "texts_read", [] if data is None else [data])))


def _described(data: object) -> str:
    # what is no dataclass does not say all that it holds
    return json.dumps(describe(data), sort_keys=True) if is_dataclass(data) or isinstance(data, list) else str(id(data))


def counted(model: LayeredModel, analyses: Sequence[Analysis]) -> tuple[float, float]:
    """The operations of analyses on one model, and the bytes that they hold beside its weights, by its shapes alone.

    What nobody knows counts as infinitely many operations and no bytes.

    Raises:
        InputError: options that do not fit the model.
    """
    operations, held = 0.0, 0.0
    for analysis in analyses:
        analysis.check_options(model)
        work = analysis.work(model)
        if work is None:
            operations = math.inf
            continue
        operations += sum(flop(model, part) for part in work.parts)
        held = max(held, work.device + work.host)
    return operations, held


def _first_pass(model: LayeredModel, work: Work, texts: tuple[str, ...]) -> dict[str, Part]:
    """By sets of texts the parts with which its work begins, if these are one pass of each of its texts."""
    first = work.parts[: len(texts)]
    runs = sum(part.count * part.size[0] for part in first if part.kind == "blocks")
    return dict(zip(texts, first, strict=True)) if round(runs) == work.texts * model.num_layers else {}


def merged(parts: Sequence[Part]) -> list[Part]:
    """Parts of one kind and size together."""
    counts: dict[Part, float] = {}
    for part in parts:
        key = part._replace(count=1)
        counts[key] = counts.get(key, 0.0) + part.count
    return [part._replace(count=count) for part, count in counts.items()]


def training(
    model: LayeredModel,
    *,
    steps: int,
    samples: int,
    tokens: int,
    micro_batch: int,
    device: torch.device,
    share: int = 1,
) -> Row:
    """All steps of a training, or this process' share of them; on the disk two checkpoints to resume from."""
    work = trained(model, samples=steps * samples / share, tokens=tokens, micro_batch=micro_batch)
    work = replace(work, texts=steps * samples, tokens=steps * samples * tokens, disk=6 * bytes_of_model(model))
    return _row("training", work, Bench(model, device))


def _row(name: str, work: Work, bench: Bench, shared: str = "") -> Row:
    """With the seconds of each part; `shared` says which are another's."""
    parts = merged(work.parts)
    times = [bench.seconds(part) for part in parts]
    how = ", ".join(filter(None, [shared, *map(_explained, parts, times)]))
    return Row(name=name, work=work, flop=sum(flop(bench.model, part) for part in parts), seconds=sum(times), how=how)


def _rounded(name: str, work: Work, bench: Bench) -> Row:
    """With its blocks in bfloat16, by passes and a copy of their matrices of its own, and a sample in float32."""
    share = min(1.0, NUM_CHECKED / max(1, work.texts))
    sample = replace(work, parts=tuple(part._replace(count=share * part.count) for part in work.parts))
    exact, rows = _row(name, sample, bench), _row(name, work, Bench(bench.model, bench.device, rounded=True))
    matrices = sum(map(bytes_of, bench.model.blocks)) / 2
    return Row(
        name=name,
        work=replace(work, parts=work.parts + sample.parts, device=work.device + matrices),
        flop=rows.flop + exact.flop,
        seconds=rows.seconds + exact.seconds,
        how=f"blocks in bfloat16: {rows.how}; a sample in float32: {exact.how}",
    )


def share_of(budget: str | float) -> float:
    """A budget such as 5% or 0.05 as a share.

    Raises:
        InputError: it is none between 0 and 100%, or 1, which is as likely 1%.
    """
    text = str(budget).strip()
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = math.nan
    if not 0 < share <= 1 or (share == 1 and not text.endswith("%")):
        raise InputError(
            f"budget: expected a share of the training such as 5% or 0.05, or 100% for all of it, got {budget!r}"
        )
    return share


def stride_within(budget: str | float, plan: Plan, trained: Row) -> int:
    """Of how many scheduled checkpoints one is measured, a power of two, so that all take no more than their share.

    Raises:
        InputError: even the first and the last cost more; the sentence names the costliest analysis.
    """
    allowed, stride, scheduled = share_of(budget) * trained.seconds, 1, plan.num_checkpoints
    while (number := -(-(scheduled - 1) // stride) + 1) * plan.seconds > allowed:
        if number <= 2:
            worst = plan.costliest()
            raise InputError(
                f"budget: measuring the first and the last step takes {duration(number * plan.seconds)} of the "
                f"{duration(trained.seconds)} that training takes, more than {100 * share_of(budget):.3g}% of it; most "
                f"is {worst.name}, {duration(worst.seconds)} a checkpoint: give it fewer texts, or train longer"
            )
        stride *= 2
    return stride


def free_disk(folder: Path) -> int | None:
    """Bytes that are free where a folder is or will be."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def _explained(part: Part, seconds: float) -> str:
    if part.kind == "blocks":
        texts, tokens = part.size
        what = f"{part.count * texts:,.0f} block runs on texts of {tokens} tokens, {texts} at a time"
    elif part.kind == "steps":
        what = f"{part.count:,.0f} small steps"
    elif part.kind in ("products", "wide products"):
        what = f"{part.kind} of {part.count:.2g} FLOP"
    elif part.kind == "head":
        what = f"{part.count:,.0f} rows through the head"
    else:
        sizes = {
            "directions": "{} vectors",
            "spectra": "{} rows",
            "calls": "{} rows",
            "evaluations": "{} rows and {} classes",
        }
        of = f" of {sizes[part.kind].format(*part.size)}" if part.kind in sizes else ""
        what = f"{part.count:,.0f} {part.kind}{of}"
    return f"{what} ({duration(seconds)})"


def _cells(name: str, work: Work | None, operations: float, seconds: float) -> dict[str, str]:
    if work is None:
        return {"": name, "texts": UNKNOWN}
    most = "<= " if work.at_most else ""
    return {
        "": name,
        "texts": f"{most}{work.texts:,}",
        "tokens": f"{most}{work.tokens:,}",
        "block runs": f"{work.block_runs():,.0f}",
        "FLOP": f"{operations:.2g}",
        "time": duration(seconds),
        "device": size(work.device),
        "host": size(work.host),
        "disk": size(work.disk),
    }


def size(number: float) -> str:
    """Bytes in words."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if number >= factor:
            return f"{number / factor:.3g} {unit}"
    return f"{number / 1e3:.0f} kB" if number else "-"


def duration(seconds: float) -> str:
    """Seconds in words."""
    for unit, factor in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * factor:
            return f"{seconds / factor:.1f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"
