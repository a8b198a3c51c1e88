"""What a command will cost, before it begins: counts from shapes, seconds from a short calibration on this machine."""

import functools
import json
import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_layers.analyses.base import NUM_CHECKED, Analysis, DividedAnalysis, RoundedAnalysis, describe
from lit_layers.analyses.layerwise import LayerwiseAnalysis, layerwise
from lit_layers.errors import InputError
from lit_layers.functional.coupling import singular_factors
from lit_layers.functional.entropy import spectrum
from lit_layers.functional.jacobian import block_jacobian
from lit_layers.models.bfloat16 import BFloat16View
from lit_layers.models.costs import this_machine
from lit_layers.models.shard_files import free_memory
from lit_layers.models.truncation import truncate
from lit_layers.models.view import BlockCall, LayeredModel
from lit_layers.models.workload import OF_A_BLOCK, Part, Work, bytes_of, bytes_of_model, flop, trained

LONGEST = 1e10  # FLOP of what is timed at once: larger work is a multiple of it
ENOUGH = 0.03  # seconds that a size is timed for
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
    stream_blocks: bool = False,
) -> Plan:
    """What analyses take on a model that may hold no weights, or that is read block by block.

    Raises:
        InputError: options that do not fit the model, data of which there cannot be enough, an analysis that cannot
            stream.
    """
    streamed = {each.name: each for each in layerwise(analyses)} if stream_blocks else {}
    num_reads = max((each.passes for each in streamed.values()), default=-1) + 1  # once more for their hash
    plan = Plan(model=model, device=device, num_checkpoints=num_checkpoints, num_reads=num_reads)
    bench = Bench(model, device)
    passed: dict[str, tuple[str, int]] = {}  # by the texts: which analysis they are booked to, and how many
    for analysis in analyses:
        analysis.check_options(model)
        work = analysis.work(model)
        if work is None:
            plan.rows.append(Row(name=analysis.name, work=None))
            continue
        if isinstance(analysis, RoundedAnalysis) and analysis.dtype == "bfloat16":
            plan.rows.append(_rounded(analysis.name, work, bench))
            continue
        shared, key = "", texts_of(analysis)
        if key is not None and _passes_once(model, work):
            first, number = passed.get(key, (analysis.name, 0))
            if work.texts <= number:  # a text goes through the blocks once, whoever asked for it
                work, shared = replace(work, parts=work.parts[1:]), f"passes of {first}"
            else:
                passed[key] = analysis.name, work.texts
        if streamed:
            work = _streamed(model, work, streamed[analysis.name], shared=bool(shared), on_cpu=device.type == "cpu")
        plan.rows.append(_row(analysis.name, work, bench, shared))
    return plan


def texts_of(analysis: Analysis) -> str | None:
    """Which texts an analysis shares a pass over with the others that look at them; None where it shares none."""
    shares = isinstance(analysis, DividedAnalysis) or type(analysis).announced is not Analysis.announced
    data = getattr(analysis, "batches", None) if shares else None
    if data is None:
        return None
    # what is no dataclass does not say all that it holds
    return json.dumps(describe(data), sort_keys=True) if is_dataclass(data) else str(id(data))


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


def _streamed(model: LayeredModel, work: Work, analysis: LayerwiseAnalysis, *, shared: bool, on_cpu: bool) -> Work:
    """One block at a time on all texts, whose states, unless another has them, stay on the device and are written
    after each block.

    In a second pass every block runs again and has its Jacobians again; the directions of the first wait on the disk.
    """
    parts = [
        part._replace(count=analysis.passes * part.count) if part.kind in ("blocks", "jacobians") else part
        for part in work.parts
    ]
    states = (analysis.carried + (0.0 if shared else 4.0)) * work.tokens * model.dim
    together = max((part.size[0] * part.size[1] for part in parts if part.kind == "blocks"), default=0)
    jacobians = work.device / model.num_layers if any(part.kind == "jacobians" for part in parts) else 0.0
    directions = sum(8.0 * part.count * model.dim * part.size[0] for part in parts if part.kind == "directions")
    return replace(
        work,
        parts=tuple(parts),
        device=states + OF_A_BLOCK * 4.0 * together * model.dim + jacobians,
        host=work.host + (0.0 if on_cpu else states),  # a copy, to be written
        disk=2 * states + (directions if analysis.passes > 1 else 0.0),
    )


def _passes_once(model: LayeredModel, work: Work) -> bool:
    """Whether its work begins with one pass of each of its texts."""
    first = work.parts[0]
    return first.kind == "blocks" and round(first.count * first.size[0]) == work.texts * model.num_layers


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


def _row(name: str, work: Work, bench: "Bench", shared: str = "") -> Row:
    """With the seconds of each part; `shared` says which are another's."""
    parts = merged(work.parts)
    times = [bench.seconds(part) for part in parts]
    how = ", ".join(filter(None, [shared, *map(_explained, parts, times)]))
    return Row(name=name, work=work, flop=sum(flop(bench.model, part) for part in parts), seconds=sum(times), how=how)


def _rounded(name: str, work: Work, bench: "Bench") -> Row:
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
        InputError: it is none between 0 and 100%.
    """
    text = str(budget).strip()
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = math.nan
    if not 0 < share <= 1:
        raise InputError(f"budget: expected a share of the training such as 5% or 0.05, got {budget!r}")
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


clock = time.perf_counter
_TIMED: dict[tuple[Any, ...], float] = {}  # seconds a FLOP, for the session


class Bench:
    """Seconds of parts on a device: each kind is done once, with random weights, at its size or the largest timed.

    Args:
        rounded: whether blocks multiply in bfloat16
    """

    def __init__(self, model: LayeredModel, device: torch.device, *, rounded: bool = False) -> None:
        self.model, self.device, self.rounded = model, device, rounded

    def seconds(self, part: Part) -> float:
        """What a part takes."""
        each = part._replace(count=1)
        shapes = [tuple(p.shape) for p in self.model.blocks[0].parameters()]
        key = (str(self.device), self.rounded, self.model.dim, str(shapes), part.kind, part.size, part.call)
        if key not in _TIMED:
            call, timed = self._call(each)
            _TIMED[key] = self._time(call) / timed
        return flop(self.model, part) * _TIMED[key]

    def _call(self, part: Part) -> tuple[Callable[[], Any], float]:
        """What is timed, and its FLOP."""
        dim, generator = self.model.dim, torch.Generator().manual_seed(0)

        def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.randn(*shape, generator=generator).to(self.device, dtype)

        def shrunk(rows: int, of: Callable[[int], Part]) -> int:
            """So few rows that it is done soon."""
            while rows > 8 and flop(self.model, of(rows)) > LONGEST:
                rows //= 2
            return rows

        match part.kind:
            case "blocks":
                texts, tokens = part.size
                texts = shrunk(texts, lambda rows: Part("blocks", 1, (rows, tokens)))
                block, _ = self._block(tokens)
                hidden = random(texts, tokens, dim)
                return lambda: block(hidden), flop(self.model, Part("blocks", 1, (texts, tokens)))
            case "jacobians" if flop(self.model, part) < LONGEST:
                block, mask = self._block(8)
                hidden = random(*mask.shape, dim)
                return lambda: block_jacobian(block, hidden, mask=mask), flop(self.model, part)
            case "directions" if dim <= 1024:
                matrix = random(1, dim, dim) * torch.arange(1, dim + 1, device=self.device) ** -0.7
                return lambda: singular_factors(matrix, part.size[0]), flop(self.model, part)
            case "spectra" if min(part.size[0], dim) <= 1024:
                rows = shrunk(part.size[0], lambda rows: Part("spectra", 1, (rows,)))
                states, mask = random(1, rows, dim), torch.ones(1, rows, dtype=torch.bool, device=self.device)
                return lambda: spectrum(states, mask).effective_rank(), flop(self.model, Part("spectra", 1, (rows,)))
            case "calls" if part.call is not None:
                rows = shrunk(part.size[0], lambda rows: Part("calls", 1, (rows,)))
                points = random(rows, dim, dtype=torch.float64)
                return functools.partial(part.call, points), flop(self.model, Part("calls", 1, (rows,)))
            case "evaluations":
                rows = shrunk(part.size[0], lambda rows: Part("evaluations", 1, (rows, part.size[1])))
                inputs, weights = random(rows, dim), random(dim, part.size[1])
                return lambda: inputs.T @ _slope(inputs @ weights), flop(
                    self.model, Part("evaluations", 1, (rows, part.size[1]))
                )
        # a plain product, as wide as the model: also what decompositions of wide models are taken to run at
        columns = part.size[0] if part.size else dim
        columns = self.model.vocab_size or self.model.num_classes or dim if part.kind == "head" else min(columns, dim)
        rows = int(max(8, min(1024, LONGEST / 10 // (2 * dim * columns))))
        dtype = torch.float64 if part.kind in ("wide products", "spectra") else torch.float32
        left, right = random(rows, dim, dtype=dtype), random(dim, columns, dtype=dtype)
        if part.kind == "head":
            return lambda: (left @ right).log_softmax(-1).exp(), 2.0 * rows * dim * columns
        return lambda: left @ right, 2.0 * rows * dim * columns

    def _block(self, tokens: int) -> tuple[BlockCall, Tensor]:
        """A block with random weights, as it is called on texts of that length."""
        cut: Any = truncate(self.model.model, 1, head=False)
        cut = cut.to_empty(device=self.device) if self.model.device.type == "meta" else cut.to(self.device)
        if self.model.origin == "structure":  # which weights show, whatever they are
            with torch.no_grad():
                for tensor in filter(torch.is_floating_point, (*cut.parameters(), *cut.buffers())):
                    tensor.nan_to_num_(0.02, 0.02, 0.02).clamp_(-0.02, 0.02)
        view = LayeredModel(cut)
        with torch.no_grad():
            generator = torch.Generator(self.device).manual_seed(0)  # a training's own random numbers stay as they are
            for parameter in view.blocks[0].parameters():
                parameter.normal_(std=0.02, generator=generator)
            for buffer in cut.buffers():
                buffer.zero_()
        view = BFloat16View(view) if self.rounded else view
        if view.family.sees_images:
            side = view.image_size or int(math.sqrt(tokens)) * 16
            batch = {"pixel_values": torch.zeros(1, 3, side, side)}
        else:
            batch = {name: torch.ones(1, tokens, dtype=torch.long) for name in ("input_ids", "attention_mask")}
        trajectory = view.trajectory(batch)
        return trajectory.block(1), trajectory.mask

    def _time(self, call: Callable[[], Any]) -> float:
        """Seconds of a call: the shortest of some, as others only make it longer; the first is not counted."""
        times: list[float] = []
        with torch.no_grad():
            call()
            while sum(times) < ENOUGH or len(times) < 3:
                self._wait()
                started = clock()
                call()
                self._wait()
                times.append(clock() - started)
                if sum(times) > 10 * ENOUGH:
                    break
        return min(times)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _slope(logits: Tensor) -> Tensor:
    """The gradient of a mean cross-entropy, as costly as any."""
    log_proba = logits.log_softmax(-1)
    slope = log_proba.exp()
    slope[:, 0] -= 1
    return slope / len(slope)


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
