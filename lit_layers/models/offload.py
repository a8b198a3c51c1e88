"""Models that do not fit into memory: accelerate reads the weights of a block from the disk when the block runs."""

import contextlib
import importlib.util
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lit_layers.errors import InputError, refused


@dataclass(frozen=True)
class Offload:
    """Options for a model with its blocks on the disk: the folder on the disk and the device that computes.

    Blocks are read from the model's safetensors files. Weights stored in another form (a pickle, one tensor per expert)
    are first written to a new folder inside `folder`. That folder is deleted when the model is freed.
    """

    folder: Path
    device: torch.device  # device on which blocks compute

    def open(self, read: Callable[..., tuple[Any, Any]], model: nn.Module) -> tuple:
        """Load a model with its blocks on the disk.

        Args:
            read: `from_pretrained` with all its arguments except those for offloading.
            model: the same model on the meta device, from which the device map is made.

        Returns:
            The model and the load report.

        Raises:
            InputError: if accelerate is missing, or the folder cannot be written.
        """
        if importlib.util.find_spec("accelerate") is None:
            raise InputError("offload: needs the package accelerate: pip install lit_layers[offload]")
        with refused(f"offload: cannot write {self.folder}"):
            self.folder.mkdir(parents=True, exist_ok=True)
            folder = tempfile.mkdtemp(prefix="weights-", dir=self.folder)
        try:
            with warnings.catch_warnings():
                # accelerate warns about single parameters in the map, although it places them.
                warnings.filterwarnings("ignore", message="The following device_map keys do not match any submodules")
                opened, report = read(device_map=self._device_map(model), offload_folder=folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        weakref.finalize(opened, shutil.rmtree, folder, ignore_errors=True)
        return opened, report

    def _device_map(self, model: nn.Module) -> dict[str, str]:
        """Map modules in lists (the blocks) to the disk and all others (embedding, norm, head) to the device."""
        device, device_map = str(self.device), {}
        if device == "cuda":  # name one GPU: "cuda" is the first one for safetensors, but the current one for torch
            device = f"cuda:{torch.cuda.current_device()}"

        def place(module: nn.Module, path: str) -> None:
            if isinstance(module, nn.ModuleList):
                device_map.update({f"{path}.{index}": "disk" for index in range(len(module))})
            elif any(isinstance(part, nn.ModuleList) for part in module.modules()):
                for name, _ in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
                    device_map[_joined(path, name)] = device
                for name, child in module.named_children():
                    place(child, _joined(path, name))
            else:
                device_map[path] = device

        place(model, "")
        return device_map


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def execution_device(model: nn.Module) -> torch.device:
    """Return the device on which a model computes; "meta" if its weights are neither in memory nor offloaded."""
    device = next(model.parameters()).device
    if device.type != "meta":
        return device
    named = (getattr(hook, "execution_device", None) for module in model.modules() for hook in _hooks(module))
    return torch.device(next((each for each in named if each is not None), device))


def weight(model: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """Return a weight of the model: `tensor`, or the weight that accelerate has stored if `tensor` is on meta.

    Raises:
        InputError: if accelerate does not store it.
    """
    if not tensor.is_meta:
        return tensor
    parts = name.split(".")
    for depth in range(len(parts) - 1, -1, -1):
        for hook in _hooks(model.get_submodule(".".join(parts[:depth]))):
            if (stored := getattr(hook, "weights_map", None)) is not None:
                return stored[".".join(parts[depth:])]
    raise InputError(f"{type(model).__name__} has no weights in {name}: load them first")


def is_offloaded(model: nn.Module) -> bool:
    """Return whether weights of the model are read from the disk at each call."""
    return any(getattr(hook, "offload", False) for module in model.modules() for hook in _hooks(module))


def _hooks(module: nn.Module) -> Iterator[Any]:
    """Yield the hooks that accelerate has put on a module."""
    hook = getattr(module, "_hf_hook", None)
    if hook is not None:
        yield from getattr(hook, "hooks", [hook])


def free_memory(device: torch.device, system: Path = Path("/")) -> int | None:
    """Return the free memory of a device in bytes; None if the system does not report it."""
    if device.type == "cuda":
        # The driver counts memory in torch's cache as used, but torch can allocate it again.
        reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reusable
    with contextlib.suppress(OSError):
        for line in (system / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None
