"""A model that is read block by block: the layered view of one that need not fit into memory."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lit_layers.errors import InputError, refused
from lit_layers.files.durable import replace_file
from lit_layers.machine import free_memory
from lit_layers.models.block_calls import BlockCall, entered, hooked, mask_of
from lit_layers.models.build import TIMM_OPTIONS, refuse_beyond_memory, untrained
from lit_layers.models.families import Network
from lit_layers.models.families.proof import NotShown
from lit_layers.models.families.structure import is_proven, taken_apart, untouched
from lit_layers.models.pixels import PREPROCESSOR, keep_pixel_statistics_, keep_preprocessor_
from lit_layers.models.saved import is_timm, outline
from lit_layers.models.shard_files import Prefetch, Room, ShardFiles, named_in_files
from lit_layers.models.view import Batch, LayeredModel, evaluating

META = torch.device("meta")


@dataclass(frozen=True, eq=False)
class Entered:
    """One batch before block 1, and what each block is called with besides the hidden states."""

    hidden: Tensor  # (batch, tokens, dim): layer 0
    mask: Tensor  # (batch, tokens), False on padding
    calls: tuple[BlockCall, ...]


class StreamedModel(LayeredModel):
    """The layered view of a checkpoint of which only one block is resident.

    All modules are there, but hold no memory (meta device), until `resident(layer)` reads a block and converts it to
    `dtype`; leaving it frees the block. `enter` gives layer 0 of a batch and the arguments of every block: masks and
    rotary tables do not depend on the states. What stands before block 1 is read when a batch passes it, of embeddings
    only the rows that are looked up; the final norm is always there. The head is not: no logits, no logit lens. A model
    without a row is proven first, on all its weights.

    Raises:
        InputError: a model that is no row of blocks, weights that do not fill it, a block too large for the device.
    """

    def __init__(self, files: ShardFiles, *, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.files, self._device, self._dtype = files, device, dtype
        network = skeleton(files, device=device, dtype=dtype)
        super().__init__(network)
        self._stored = self._find_tensors()
        self._paths = {id(block): path for path, block in network.named_modules()}
        self._expect_every_tensor()
        self.num_loads = 0
        self._prefetch, self._room = Prefetch(files, device), Room(device)
        if not is_proven(self.family):
            self._prove()
        if (norm := self.family.final_norm(network)) is not None:
            self._fill_(norm)

    def _prove(self) -> None:
        """Shows on all its weights that a model without a row is one of blocks. Each block is read once, and so is the
        head, which stays until then; of states that are held otherwise (`Layout`) as often as the proof runs a block.

        Raises:
            InputError: it is none, or uses weights of modules that it does not call.
        """
        kind, outlined = type(self.model).__name__, self.family
        try:
            with untouched(self.model), _Lookups(self), self._filled_on_the_way(blocks_too=True):
                self.family = taken_apart(self.model, self._device, outlined=outlined)
        except NotShown as reason:
            advice = (
                "; open it whole" if reason.__cause__ is not None else ""
            )  # it cannot be called where no weights lie
            raise InputError(f"no layered view of {kind} block by block: {reason}{advice}") from reason
        if self.family.blocks != outlined.blocks:
            raise InputError(
                f"no layered view of {kind} block by block: without weights its blocks seem to be {outlined.blocks}, "
                f"and with them {self.family.blocks}; open it whole"
            )
        self.blocks = self.family.block_list(self.model)

    @property
    def device(self) -> torch.device:
        return self._device

    def block_bytes(self, layer: int) -> int:
        """Bytes of a block as it is resident."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.blocks[layer - 1].state_dict().values())

    def enter(self, batch: Batch) -> Entered:
        """Layer 0 of a batch, and the calls of all blocks.

        Raises:
            InputError: a text longer than the model takes.
            ValueError: a missing column, or a text without a real token.
        """
        with torch.inference_mode(False), torch.no_grad(), evaluating(self.model):
            inputs, alignment = self._inputs(batch)
            made = None
            for in_tuple in (False, True):  # what blocks return is only seen in what their model makes of it
                returned = self.family.num_returned(self.num_layers, in_tuple=in_tuple)
                with _Lookups(self), self._filled_on_the_way():
                    made = made or entered(self.blocks, returned, partial(self.family.logits, self.model, inputs))
            if made is None:
                raise RuntimeError(f"the blocks of {type(self.model).__name__} are not called one after the other")
            hidden, calls = made
            layout = self._layout(hidden, inputs)
            if layout is not None:
                hidden = layout.taken(hidden, calls[0].args)
                calls = [replace(call, layout=layout) for call in calls]
            mask = mask_of(inputs, hidden)
            if alignment is not None:
                hidden, mask = alignment.restored(hidden), alignment.given_mask
                calls = [replace(call, alignment=alignment) for call in calls]
        return Entered(hidden, mask, tuple(calls))

    @contextmanager
    def resident(self, layer: int, *, following: int | None = None) -> Iterator[None]:
        """Block `layer` (1..L) is in memory inside, and `following` is being read meanwhile.

        Raises:
            InputError: the block does not fit, or a file with a part of it is damaged.
        """
        block = self.blocks[layer - 1]
        self._expect_room(layer, following)
        ready = self._prefetch.take(layer)
        before = self._fill_(block, ready, into=self._room)
        del ready
        self.num_loads += 1
        if following is not None:
            self._prefetch.start(following, self._names(self.blocks[following - 1]))
        try:
            yield
        finally:
            for module, name, tensor in before:
                _put_(module, name, tensor)

    def weights_hash(self) -> str:
        """As `lit_layers.models.weights_hash` of the whole model in this dtype; reads every file once, in pieces."""
        digest = hashlib.blake2b(digest_size=8)
        for name, tensor in sorted(self.model.state_dict().items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
            for piece in self.files.pieces(self._stored[name]):
                digest.update(piece.to(tensor.dtype).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def kept_weights_hash(self, folder: Path, starting: Callable[[], None]) -> str:
        """`weights_hash`, or what an interrupted call for the same files has left in the folder."""
        path = folder / f"weights-{self.fingerprint()}.txt"
        if not path.is_file():
            starting()
            hashed = self.weights_hash()
            with refused(f"root: cannot write {path}"):
                folder.mkdir(parents=True, exist_ok=True)
                replace_file(path, hashed)
        return path.read_text()

    def fingerprint(self) -> str:
        """Of the files, without reading them, and of the precision."""
        return f"{self.files.fingerprint()}-{str(self.dtype).removeprefix('torch.')}"

    def close(self) -> None:
        """Ends the thread that reads ahead."""
        self._prefetch.close()

    def rows(self, weight: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of an embedding that are looked up, and `ids` as places among them."""
        name = next(name for name, tensor in self.model.state_dict(keep_vars=True).items() if tensor is weight)
        numbers, places = ids.unique(return_inverse=True)
        rows = self.files.read(self._stored[name])[numbers.cpu()]
        return rows.to(self._device, self._dtype), places

    def _find_tensors(self) -> dict[str, str]:
        """The name in the files of every parameter and buffer; tied ones are saved once."""
        if self.family.package == "timm":
            stored_as = {stored: stored for stored in self.files.shard_of}
        else:
            stored_as = named_in_files(self.model, self.files)
        groups: dict[int, list[str]] = {}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            groups.setdefault(id(tensor), []).append(name)
        stored_names = {}
        for names in groups.values():
            stored = next((stored_as[name] for name in names if name in stored_as), None)
            if stored is not None:
                stored_names.update(dict.fromkeys(names, stored))
        return stored_names

    def _expect_every_tensor(self) -> None:
        kind = type(self.model).__name__
        for name, tensor in self.model.state_dict().items():
            if name not in self._stored:
                raise InputError(f"the weights of {self.files.model} do not fill {kind}: no tensor {name}")
            if self._stored[name] in self.files.put_together:
                continue  # its shape is seen when it is read
            if self.files.local and (shape := self.files.shape(self._stored[name])) != tuple(tensor.shape):
                raise InputError(
                    f"the weights of {self.files.model} do not fit {kind}: {name} has the shape {shape}, its "
                    f"config.json asks for {tuple(tensor.shape)}"
                )

    def _expect_room(self, layer: int, following: int | None) -> None:
        needed, free = self.block_bytes(layer), free_memory(self._device)
        if following is not None and self._device.type == "cuda":  # where it is read ahead as it is stored
            needed += sum(self.files.num_bytes(name) for name in self._names(self.blocks[following - 1]))
        if free is not None and needed > free + self._room.num_bytes:
            raise InputError(
                f"block {layer} of {self.files.model} takes {needed / 1e9:.2f} GB in {str(self._dtype)[6:]}, and "
                f"{free / 1e9:.2f} GB are free on {self._device}: use a device with more memory"
            )

    def _names(self, module: nn.Module) -> list[str]:
        """Names in the files of what a module and its parts hold."""
        path = self._paths[id(module)]
        return [self._stored[f"{path}.{name}" if path else name] for name in module.state_dict()]

    def _fill_(
        self,
        module: nn.Module,
        ready: dict[str, Tensor] | None = None,
        *,
        recurse: bool = True,
        into: Room | None = None,
    ) -> list[tuple]:
        """Reads what a module holds; (module, name, tensor) of what was there before."""
        before, room = [], into or Room(self._device)
        room.clear(sum(tensor.numel() for part in module.modules() for tensor in _held_by(part).values()), self._dtype)
        for path, part in module.named_modules() if recurse else [("", module)]:
            for name, tensor in _held_by(part).items():
                if tensor.device != META:
                    continue
                full = ".".join(filter(None, (self._paths[id(module)], path, name)))
                stored = self._stored[full]
                source = self.files.read(stored) if ready is None else ready[stored]
                if source.is_cuda:  # of another stream, which must not have its memory back before it is copied
                    source.record_stream(torch.cuda.current_stream(self._device))
                if source.shape != tensor.shape:
                    raise InputError(
                        f"{full} of {self.files.model} has the shape {tuple(source.shape)}, its config.json asks for "
                        f"{tuple(tensor.shape)}"
                    )
                before.append((part, name, tensor))
                # a copy even where nothing is converted: a view would keep the file's pages
                _put_(part, name, room.take(tensor).copy_(source))
        return before

    @contextmanager
    def _filled_on_the_way(self, *, blocks_too: bool = False) -> Iterator[None]:
        """Whatever is called before the blocks has its own tensors by then; embeddings are looked up without. A block
        has them too, if wanted, as long as its call lasts, and whatever else is called then as long as this does."""
        blocks = dict.fromkeys(self.blocks)
        inside = {id(part) for block in blocks for part in block.modules()}
        before: dict[nn.Module, list[tuple]] = {}

        def fill(module: nn.Module, args: tuple) -> None:
            hands_on = getattr(vars(module).get("forward"), "hands_on", False)
            if not isinstance(module, nn.Embedding) and not hands_on and module not in before:
                before[module] = self._fill_(module, recurse=module in blocks)

        def empty(module: nn.Module, args: tuple, output: Any) -> None:
            for part, name, tensor in before.pop(module, ()):
                _put_(part, name, tensor)

        called = [module for module in self.model.modules() if id(module) not in inside]
        called += blocks if blocks_too else []
        handles = [module.register_forward_pre_hook(fill) for module in called]
        if blocks_too:
            handles += [block.register_forward_hook(empty, always_call=True) for block in blocks]
        try:
            with hooked(handles):
                yield
        finally:
            for module in list(before) if blocks_too else ():
                empty(module, (), None)


class _Lookups(TorchFunctionMode):
    """Looks up embeddings that are not in memory: the rows are read, and no more."""

    def __init__(self, model: StreamedModel) -> None:
        super().__init__()
        self.model = model

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is F.embedding and args[1].device == META:
            rows, places = self.model.rows(args[1], args[0])
            return F.embedding(places, rows)  # where padding is plays no part in a lookup
        return func(*args, **(kwargs or {}))


def _held_by(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers that a module holds itself and a checkpoint does too."""
    held: dict[str, Tensor | None] = {**module._parameters, **module._buffers}
    return {
        name: tensor
        for name, tensor in held.items()
        if tensor is not None and name not in module._non_persistent_buffers_set
    }


def _put_(module: nn.Module, name: str, tensor: Tensor) -> None:
    if name in module._buffers:
        module._buffers[name] = tensor
    else:
        module._parameters[name] = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, False)


# The modules of a checkpoint without their memory.


def initialised(files: ShardFiles, *, seed: int, dtype: torch.dtype) -> nn.Module:
    """The model that a config.json describes as its library initialises it, on the CPU; no weights are read.

    Raises:
        InputError: a config.json that neither transformers nor timm knows, sizes beyond the memory.
    """
    try:
        refuse_beyond_memory(SimpleNamespace(**files.config))
    except ValueError as error:
        raise InputError(f"the config.json of {files.model} cannot be built: {error}") from error
    return untrained(skeleton(files, device=torch.device("cpu"), dtype=dtype), seed=seed)


def skeleton(files: ShardFiles, *, device: torch.device, dtype: torch.dtype) -> Network:
    """The model in evaluation mode, every parameter without memory; what no file holds, rotary frequencies, is real.

    Raises:
        InputError: a config.json that neither transformers nor timm knows, or of a quantized model.
    """
    network = (_timm_skeleton if is_timm(files.config) else _transformers_skeleton)(files, dtype)
    for module in network.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != META:
                module._buffers[name] = buffer.to(device)
    return network.requires_grad_(False).eval()


def _transformers_skeleton(files: ShardFiles, dtype: torch.dtype) -> Network:
    network: Any = outline(files.config, files.model, dtype)
    if files.config.get("quantization_config"):
        raise InputError(f"{files.model} is quantized, and only plain weights are read: use the model it was made from")
    _compute_buffers_(network)
    if network.main_input_name == "pixel_values" and files.has(PREPROCESSOR):
        keep_preprocessor_(network, json.loads(files.fetch(PREPROCESSOR).read_text(encoding="utf-8")))
    return network


_UNSET = {True: torch.nan, False: -(2**30)}  # by whether a buffer is of floating point


@torch.no_grad()
def _compute_buffers_(network: Network) -> None:
    """Gives buffers that no file holds their values, as from_pretrained does: by each model's own `_init_weights`, of a
    part or of what holds it.

    Raises:
        InputError: a buffer that is then as it was.
    """
    buffers: dict[str, Tensor] = {}
    for path, module in network.named_modules():
        for name in module._non_persistent_buffers_set:
            if (buffer := module._buffers[name]) is not None:
                unset = 0 if buffer.dtype == torch.bool else _UNSET[buffer.is_floating_point()]
                module._buffers[name] = buffers[f"{path}.{name}"] = torch.full_like(buffer, unset, device="cpu")
    if buffers:
        _initialise_(network, network)
    for name, buffer in buffers.items():
        is_unset = buffer.isnan() if buffer.is_floating_point() else buffer == _UNSET[False]
        if bool(is_unset.any()):
            raise InputError(
                f"{type(network).__name__} cannot be read block by block: no file holds its buffer {name}, and nothing "
                "computes it; open it whole"
            )


def _initialise_(module: nn.Module, model: Network) -> None:
    """Parts before what holds them, each by the innermost model that it is in."""
    model = module if hasattr(module, "_init_weights") else model
    for part in module.children():
        _initialise_(part, model)
    model._init_weights(module)


def _timm_skeleton(files: ShardFiles, dtype: torch.dtype) -> Network:
    import timm

    folder = os.fspath(files.fetch("config.json").parent)
    outline(files.config, files.model)  # which refuses what is none
    with META:
        model = timm.create_model(f"local-dir:{folder}", pretrained=False).to(dtype)
    setattr(model, TIMM_OPTIONS, files.config.get("model_args", {}))
    keep_pixel_statistics_(model, files.config)
    return model
