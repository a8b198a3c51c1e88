"""How long parts of the work of analyses take on this machine, by doing some of each."""

import functools
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lit_layers.analyses.readouts.readout_scores import rows_at_once
from lit_layers.functional.coupling import singular_factors
from lit_layers.functional.entropy import spectrum
from lit_layers.functional.jacobian import block_jacobian
from lit_layers.models.bfloat16 import BFloat16View
from lit_layers.models.truncation import truncate
from lit_layers.models.view import BlockCall, LayeredModel
from lit_layers.models.workload import Part, flop

LONGEST = 1e10  # FLOP of what is timed at once: larger work is a multiple of it
ENOUGH = 0.03  # seconds that a size is timed for
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
        if part.kind == "steps":
            return part.count * self._seconds_of_a_step()
        each = part._replace(count=1)
        shapes = [tuple(p.shape) for p in self.model.blocks[0].parameters()]
        sizes = self.model.dim, str(shapes), part.kind, part.size, part.call
        key = (str(self.device), self.rounded, *sizes, self._dtype)
        if key not in _TIMED:
            call, timed = self._call(each)
            _TIMED[key] = self._time(call) / timed
        return flop(self.model, part) * _TIMED[key]

    @property
    def _dtype(self) -> torch.dtype:
        """float32 at least: most analyses convert a model in half precision."""
        return torch.float32 if self.rounded else torch.promote_types(self.model.dtype, torch.float32)

    def _seconds_of_a_step(self) -> float:
        key = str(self.device), "steps"
        if key not in _TIMED:
            states = torch.linspace(-1, 1, 16 * 64).view(16, 64).to(self.device)

            def several() -> None:
                for _ in range(_AT_ONCE):
                    _step(states)

            _TIMED[key] = self._time(several) / _AT_ONCE
        return _TIMED[key]

    def _call(self, part: Part) -> tuple[Callable[[], Any], float]:
        """What is timed, and its FLOP."""
        dim, generator = self.model.dim, torch.Generator().manual_seed(0)

        wide = self._dtype

        def random(*shape: int, dtype: torch.dtype = wide) -> Tensor:
            return torch.randn(*shape, generator=generator).to(self.device, dtype)

        def fewest_rows(rows: int, of: Callable[[int], Part]) -> int:
            """So few rows that it is done soon."""
            while rows > 8 and flop(self.model, of(rows)) > LONGEST:
                rows //= 2
            return rows

        match part.kind:
            case "blocks":
                texts, tokens = part.size
                texts = fewest_rows(texts, lambda rows: Part("blocks", 1, (rows, tokens)))
                block, _ = self._block(tokens)
                hidden = random(texts, tokens, dim)
                return lambda: block(hidden), flop(self.model, Part("blocks", 1, (texts, tokens)))
            case "jacobians" if flop(self.model, part) < LONGEST:
                block, mask = self._block(8)
                texts = 2 if not part.size and 2 * flop(self.model, part) < LONGEST else 1  # some analyses take batches
                hidden, mask = random(texts, mask.shape[1], dim), mask.expand(texts, -1)
                inputs = range(-1, -1 - min(part.size[0], mask.shape[1]), -1) if part.size else ()
                how: dict[str, Any] = {"out_tokens": -1, "in_tokens": [*inputs]} if inputs else {}
                timed = texts * max(1, len(inputs)) * flop(self.model, part)
                return lambda: block_jacobian(block, hidden, mask=mask, **how), timed
            case "directions" if dim <= 1024:
                matrix = random(1, dim, dim) * torch.arange(1, dim + 1, dtype=wide, device=self.device) ** -0.7
                return lambda: singular_factors(matrix, part.size[0]), flop(self.model, part)
            case "spectra" if min(part.size[0], dim) <= 1024:
                rows = fewest_rows(part.size[0], lambda rows: Part("spectra", 1, (rows,)))
                one = flop(self.model, Part("spectra", 1, (rows,)))
                sets = max(1, min(8, int(LONGEST / 10 // one)))  # as texts come in batches, and halves all at once
                states, mask = random(sets, rows, dim), torch.ones(sets, rows, dtype=torch.bool, device=self.device)
                return lambda: spectrum(states, mask).effective_rank(), sets * one
            case "calls" if part.call is not None:
                rows = fewest_rows(part.size[0], lambda rows: Part("calls", 1, (rows,)))
                points = random(rows, dim, dtype=torch.float64)
                return functools.partial(part.call, points), flop(self.model, Part("calls", 1, (rows,)))
            case "evaluations":
                rows = fewest_rows(part.size[0], lambda rows: Part("evaluations", 1, (rows, part.size[1])))
                inputs, weights = random(rows, dim), random(dim, part.size[1])
                return lambda: inputs.T @ _slope(inputs @ weights), flop(
                    self.model, Part("evaluations", 1, (rows, part.size[1]))
                )
        # a plain product, as wide as the model: also what decompositions of wide models are taken to run at
        columns = part.size[0] if part.size and part.kind != "jacobians" else dim
        columns = self.model.vocab_size or self.model.num_classes or dim if part.kind == "head" else min(columns, dim)
        rows = int(max(8, min(1024, LONGEST / 10 // (2 * dim * columns))))
        dtype = torch.float64 if part.kind in ("wide products", "spectra") else torch.float32
        left, right = random(rows, dim, dtype=dtype), random(dim, columns, dtype=dtype)
        if part.kind == "head":
            at_once = rows_at_once(rows, columns, self.device)
            return lambda: [_scores(some) for some in (left @ right).split(at_once)], 2.0 * rows * dim * columns
        return lambda: left @ right, 2.0 * rows * dim * columns

    def _block(self, tokens: int) -> tuple[BlockCall, Tensor]:
        """A block with random weights, as it is called on texts of that length."""
        cut: Any = truncate(self.model.model, 1, head=False)
        cut = cut if self.rounded else cut.to(self._dtype)
        cut = cut.to_empty(device=self.device) if self.model.device.type == "meta" else cut.to(self.device)
        generator = torch.Generator(self.device).manual_seed(0)  # a training's own random numbers stay as they are
        if self.model.origin == "structure":  # which weights show, but not those of memory that may hold zeros
            with torch.no_grad():
                for tensor in (*cut.parameters(), *cut.buffers()):
                    if tensor.is_floating_point():
                        tensor.normal_(std=0.02, generator=generator)
                    else:  # positions and kinds, which are looked up in tables
                        tensor.zero_()
        view = LayeredModel(cut)
        with torch.no_grad():
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


def _scores(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The best one and an entropy, as costly as losses, hits and divergences."""
    log_proba = logits.log_softmax(-1)
    return log_proba.amax(-1), torch.linalg.vecdot(log_proba.exp(), log_proba)


_AT_ONCE = 20  # steps that are timed together, as one is over in less than a clock can tell


def _step(states: Tensor) -> tuple[float, int]:
    """What analyses do again and again with few numbers: means of what is defined, brought to the host."""
    defined = states.isfinite()
    means = states.where(defined, 0.0).sum(-1) / defined.sum(-1)
    return float(torch.stack([means, means.abs()]).cpu()[0].mean()), int((~defined).sum())


def _slope(logits: Tensor) -> Tensor:
    """The gradient of a mean cross-entropy, as costly as any."""
    log_proba = logits.log_softmax(-1)
    slope = log_proba.exp()
    slope[:, 0] -= 1
    return slope / len(slope)
