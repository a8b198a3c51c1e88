"""One pass over the texts that several readers look at: each goes through the blocks once, whoever asks for it."""

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lit_layers.models.block_calls import now
from lit_layers.models.offload import is_offloaded
from lit_layers.models.view import Batch, LayeredModel, Trajectory

KEPT_BYTES = 2**28  # of states that several analyses look at
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class _Row(NamedTuple):
    """Where a row's states are."""

    trajectory: Trajectory
    index: int


@dataclass
class _Ledger:
    """Who reads what, by the content of a row; shared by the views of a model in several precisions."""

    reader: str = ""
    readers: dict[bytes, list[str]] = field(default_factory=dict)  # who is still to ask for a row, and how often
    places: dict[bytes, int] = field(default_factory=dict)  # in the order in which rows were announced
    rows: dict[bytes, _Row] = field(default_factory=dict)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))


class SharedPass(LayeredModel):
    """The layered view of a model, whose readers share their passes.

    Readers announce the batches that they will ask for. A row (a text with its padding, an image) that goes through the
    blocks is kept, on the device, until the last of them has had it, whichever batch it then comes in; one that nobody
    announced is passed on asking, and let go. What is more than `KEPT_BYTES` is let go, and computed again. The states
    of an equal batch are the same bits; a row that comes from another batch
    differs by rounding, as products of other sizes do. Every reader is given states of its own, to which it may write.

    While a model differs from what it was at the beginning (a hook, a weight), whoever asks has a pass of its own.
    """

    def __init__(
        self,
        view: LayeredModel,
        *,
        ledger: _Ledger | None = None,
    ) -> None:
        super().__init__(view.model)
        self.view = view
        self._ledger = ledger or _Ledger()
        self._before = fingerprints(self.model), hook_ids(self.model)
        self._converted: SharedPass | None = None
        self._convert: Callable[[LayeredModel], LayeredModel] = lambda view: view

    @classmethod
    def of(cls, view: LayeredModel) -> "SharedPass":
        return view if isinstance(view, SharedPass) else cls(view)

    def converted(self, convert: Callable[[LayeredModel], LayeredModel]) -> "SharedPass":
        """The view of the model in another precision, made once for all readers."""
        if self._converted is None:
            self._converted, self._convert = SharedPass(convert(self.view), ledger=self._ledger), convert
        return self._converted

    def renew(self) -> None:
        """Makes the view in another precision anew where a reader has changed its model: nobody else has that model."""
        copy = self._converted
        if copy is None or (copy._is_as_before() and copy.attention == self.attention and not copy.model.training):
            return
        copy.__init__(self._convert(self.view), ledger=self._ledger)
        self._ledger.rows.clear()  # their blocks are the changed ones

    def announce(self, reader: str, batches: Iterable[Batch]) -> None:
        """Says that a reader will ask for these batches."""
        for key in self.rows(batches):
            self._ledger.readers.setdefault(key, []).append(reader)
            self._ledger.places.setdefault(key, len(self._ledger.places))

    def rows(self, batches: Iterable[Batch]) -> list[bytes]:
        """What tells the rows of batches apart, by their content: equal for equal ones."""
        return self._digests(batches) if self._is_as_before() else []

    def _digests(self, batches: Iterable[Batch]) -> list[bytes]:
        return [key for batch in batches for key in self._digests_of(batch) or ()]

    def place(self, batches: Sequence[Batch]) -> float:
        """Where in the order of all announced rows these batches begin; behind all where nothing is known of them."""
        return min((self._ledger.places.get(key, torch.inf) for key in self._digests(batches)), default=torch.inf)

    def turn(self, reader: str) -> None:
        """Says who asks from now on."""
        self._ledger.reader = reader

    def leave(self, reader: str) -> float:
        """Lets go what was kept for a reader that asks no more. Returns what to add to the seconds that it was at work.

        The time of a pass is borne in equal parts by all who had announced its rows, whoever asked first.
        """
        for key, readers in list(self._ledger.readers.items()):
            if reader in readers:
                self._set_readers(key, [each for each in readers if each != reader])
        return self._ledger.seconds.pop(reader, 0.0)

    def trajectory(self, batch: Batch) -> Trajectory:
        keys = self._keys(batch)
        if keys is None:
            return self.view.trajectory(batch)
        rows = self._ledger.rows
        first = {key: number for number, key in reversed([*enumerate(keys)])}  # a text may be there twice
        missing = sorted(number for key, number in first.items() if key not in rows)
        fresh = self._passed(batch, missing, keys) if missing else None
        if fresh is not None and len(missing) == len(keys):
            trajectory, sources = fresh, []
        else:
            passed = {keys[number]: _Row(fresh, index) for index, number in enumerate(missing) if fresh is not None}
            sources = [passed.get(key) or rows[key] for key in keys]
            trajectory = None
        for key in keys:
            self._asked(key)
        if trajectory is None:
            trajectory = self._together(batch, sources)
        if fresh is not None:
            self._keep(fresh, [keys[number] for number in missing])
        return trajectory

    def pass_states(self, batch: Batch, look: Callable[[int, Tensor, Tensor], None]) -> None:
        keys = self._keys(batch)
        waiting = self._ledger.readers
        is_large = keys is not None and len(keys) * _row_bytes(self, batch) > KEPT_BYTES
        shared = (key in self._ledger.rows or len({*waiting.get(key, ())}) > 1 for key in keys or ())
        if is_large or not any(shared):  # then one layer at a time is in memory
            self.view.pass_states(batch, look)
            for key in keys or ():
                self._asked(key)
            return
        trajectory = self.trajectory(batch)
        for layer, hidden in enumerate(trajectory.hidden):
            look(layer, hidden, trajectory.mask)

    def _keys(self, batch: Batch) -> list[bytes] | None:
        """What tells rows apart; None where a batch is no affair of others."""
        return self._digests_of(batch) if self._is_as_before() else None

    def _digests_of(self, batch: Batch) -> list[bytes] | None:
        columns = {name: batch[name] for name in self.family.columns if name in batch}
        if self.family.inputs[0] not in columns or not all(isinstance(column, Tensor) for column in columns.values()):
            return None
        if len({len(column) for column in columns.values()}) > 1:
            return None
        return row_digests(columns, f"{self.attention} {self.dtype}")

    def _is_as_before(self) -> bool:
        return (fingerprints(self.model), hook_ids(self.model)) == self._before

    def _passed(self, batch: Batch, numbers: list[int], keys: list[bytes]) -> Trajectory:
        """Some rows of a batch, through the blocks."""
        whole = len(numbers) == len(keys)
        started = now(self.device)
        fresh = self.view.trajectory(batch if whole else _some(batch, numbers, len(keys)))
        seconds, ledger = now(self.device) - started, self._ledger
        ledger.seconds[ledger.reader] -= seconds
        for number in numbers:
            bearers = {ledger.reader, *ledger.readers.get(keys[number], ())}
            for bearer in bearers:
                ledger.seconds[bearer] += seconds / len(numbers) / len(bearers)
        return fresh

    def _together(self, batch: Batch, rows: list[_Row]) -> Trajectory:
        """The trajectory of a batch whose rows were passed before, in whatever batches."""
        source = rows[0].trajectory
        in_order = [row.index for row in rows] == list(range(source.hidden.shape[1]))
        if in_order and source.calls and all(row.trajectory is source for row in rows):
            if not any(row.trajectory is source for row in self._ledger.rows.values()):
                return source  # the last to ask has what was kept
            # Without the logits that another reader asked for.
            return replace(source, hidden=source.hidden.to(self.device, copy=True), mask=source.mask.clone())
        hidden = torch.stack([row.trajectory.hidden[:, row.index] for row in rows], dim=1)
        return self.view.with_states(batch, hidden.to(self.device), in_tuple=source.in_tuple)

    def _asked(self, key: bytes) -> None:
        readers = list(self._ledger.readers.get(key, ()))
        if self._ledger.reader in readers:
            readers.remove(self._ledger.reader)
        self._set_readers(key, readers)

    def _set_readers(self, key: bytes, readers: list[str]) -> None:
        """Notes who still waits for a row, which is let go where nobody does."""
        if readers:
            self._ledger.readers[key] = readers
        else:
            self._ledger.readers.pop(key, None)
            self._ledger.rows.pop(key, None)

    def _keep(self, fresh: Trajectory, keys: list[bytes]) -> None:
        ledger = self._ledger
        asked_for = [index for index, key in enumerate(keys) if key in ledger.readers]
        if not asked_for:
            return
        held = {id(row.trajectory): row.trajectory.hidden.nbytes for row in ledger.rows.values()}
        is_full = sum(held.values()) + fresh.hidden.nbytes * len(asked_for) // len(keys) > KEPT_BYTES
        # What its own reader goes on with, prompt by prompt, is held all the same.
        if is_full and not any(ledger.reader in ledger.readers[keys[index]] for index in asked_for):
            return
        if len(asked_for) == len(keys):
            hidden, mask, calls = fresh.hidden, fresh.mask.clone(), fresh.calls
        else:  # what nobody waits for is not held with the rest
            hidden, mask, calls = fresh.hidden[:, asked_for], fresh.mask[asked_for], ()
        hidden = hidden.clone() if calls else hidden
        fresh = replace(fresh, hidden=hidden, mask=mask, calls=calls)
        for index, number in enumerate(asked_for):
            ledger.rows[keys[number]] = _Row(fresh, index)


def row_digests(columns: Mapping[str, Tensor], how: str = "") -> list[bytes]:
    """What tells the rows of a batch apart, whatever stands beside them."""
    digests = [hashlib.blake2b(how.encode(), digest_size=16) for _ in next(iter(columns.values()))]
    for name, column in columns.items():
        about = f"{name} {column.dtype} {tuple(column.shape[1:])}".encode()
        width = math.prod(column.shape[1:])
        flat = column.detach().cpu().clone(memory_format=torch.contiguous_format).view(-1)  # in strides of 1
        rows = flat.view(torch.uint8).view(len(column), width * column.itemsize).numpy()
        is_left_out = [False] * len(column)
        if name == "attention_mask":  # without one all is real
            is_left_out = flat.view(len(column), width).bool().all(1).tolist()
        for digest, row, left_out in zip(digests, rows, is_left_out, strict=True):
            if not left_out:
                digest.update(about + row.tobytes())
    return [digest.digest() for digest in digests]


def fingerprints(model: nn.Module) -> dict[str, tuple]:
    """For each parameter and buffer what changes when it is written to (version) or exchanged (identity, memory); of
    rotary frequencies, which some models write anew at each call, the values."""
    seen: set[int] = set()  # a tied one once
    prints: dict[str, tuple] = {}
    for module, path in _modules(model):
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    prints[path + name] = "meta", tensor.shape  # accelerate exchanges it at each call
                elif tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    is_table = name in module._non_persistent_buffers_set and tensor.ndim == 1
                    prints[path + name] = id(tensor), tensor.data_ptr(), _written(tensor, is_table)
    return prints


def _written(tensor: Tensor, is_table: bool) -> int | bytes:
    if is_table:
        return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return 0 if tensor.is_inference() else tensor._version


def hook_ids(model: nn.Module) -> dict[str, set]:
    """Of the modules that bear hooks."""
    return {path + kind: set(of) for part, path in _modules(model) for kind in HOOKS if (of := getattr(part, kind))}


def _modules(model: nn.Module) -> Iterable[tuple[nn.Module, str]]:
    """`named_modules` without a generator for each level, as every turn of an analysis asks; paths end in a dot."""
    paths: dict[nn.Module, str] = {}
    waiting = [(model, "")]
    while waiting:
        module, path = waiting.pop()
        if module not in paths:
            paths[module] = path
            for name, child in reversed(module._modules.items()):
                if child is not None:
                    waiting.append((child, f"{path}{name}."))
    return paths.items()


def remove_new_hooks_(model: nn.Module, before: dict[str, set]) -> list[str]:
    """Takes off the hooks that were not there before; the modules that bore them."""
    left = []
    for part, path in _modules(model):
        for kind in HOOKS:
            hooks = getattr(part, kind)
            for key in set(hooks) - before.get(path + kind, set()):
                del hooks[key]
                left.append(path.removesuffix(".") or type(model).__name__)
    return left


# Most bytes of the states of a piece: on a CPU; on a GPU, or where each piece reads all blocks from the disk.
PIECE_BYTES = 2**26, 2**28


def _row_bytes(model: LayeredModel, batch: Batch) -> int:
    """Of the states of one row of a batch at all layers."""
    column = batch[model.family.inputs[0]]
    tokens = column.shape[1]
    if model.family.sees_images:
        tokens = model.num_patches(column.shape[-1]) + model.num_prefix_tokens
    itemsize = max(4, torch.empty((), dtype=model.dtype).element_size())
    return (model.num_layers + 1) * tokens * model.dim * itemsize


def _some(batch: Batch, numbers: Any, count: int) -> Batch:
    """Some of a batch's rows; what holds none of them, such as one number for all, stays."""
    rows = {name for name, values in batch.items() if isinstance(values, Tensor) and values.shape[:1] == (count,)}
    return {name: values[numbers] if name in rows else values for name, values in batch.items()}


def pieces(model: LayeredModel, batches: Iterable[Batch]) -> Iterator[Batch]:
    """The batches, in parts whose states at all layers are not large; how many rows depends on nothing else."""
    needed = model.family.inputs[0]
    most = PIECE_BYTES[model.device.type != "cpu" or is_offloaded(model.model)]
    for batch in batches:
        count = len(batch[needed])
        size = max(1, most // _row_bytes(model, batch))
        for start in range(0, count, size):
            yield batch if size >= count else _some(batch, slice(start, start + size), count)
