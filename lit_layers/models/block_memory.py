"""Where blocks are read to: memory that is used again for each, and a thread that reads the next one meanwhile."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from lit_layers.models.shard_files import ShardFiles


class Room:
    """Memory that one block after the other is read into: taken anew for each it would be scattered over the heap."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.memory, self.taken = device, torch.empty(0), 0

    @property
    def num_bytes(self) -> int:
        return self.memory.numel() * self.memory.element_size()

    def clear(self, count: int, dtype: torch.dtype) -> None:
        """Makes room for `count` numbers; what was there is overwritten."""
        count, self.taken = count + 16 * 256, 0  # tensors begin at multiples of 16 numbers
        if len(self.memory) < count:
            self.memory = torch.empty(0)  # first let go, then take
            self.memory = torch.empty(count, dtype=dtype, device=self.device)

    def take(self, like: Tensor) -> Tensor:
        """A tensor of the same shape and type as one on the meta device."""
        start, stop = self.taken, self.taken + like.numel()
        if like.dtype != self.memory.dtype or stop > len(self.memory):
            return torch.empty_like(like, device=self.device)
        self.taken = -(-stop // 16) * 16
        return self.memory[start:stop].view(like.shape)


class Prefetch:
    """A thread that reads the next block while this one is at work.

    For a GPU its tensors are copied there as stored. On a CPU a second block in memory would double what is resident:
    its pages are read into the system's page cache instead, which takes only memory that nobody asks for.
    """

    def __init__(self, files: ShardFiles, device: torch.device) -> None:
        self.files, self.device = files, device
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="next-block")
        self.stop = threading.Event()
        self.job: tuple[int, Future[dict[str, Tensor] | None]] | None = None

    def start(self, layer: int, names: list[str]) -> None:
        self.job = (layer, self.pool.submit(self._read, names))

    def take(self, layer: int) -> dict[str, Tensor] | None:
        """The tensors of a block where they are on the device already; waits for those that are on their way."""
        if self.job is None:
            return None
        (which, future), self.job = self.job, None
        found = future.result()
        return found if which == layer else None

    def close(self) -> None:
        self.stop.set()
        self.pool.shutdown(cancel_futures=True)

    def _read(self, names: list[str]) -> dict[str, Tensor] | None:
        found = {}
        for name in names:
            if self.stop.is_set():
                break
            if self.device.type != "cuda":
                self.files.warm(name)
            else:
                stream = torch.cuda.Stream(self.device)  # beside the one that is at work
                with torch.cuda.stream(stream):
                    found[name] = self.files.read(name).to(self.device)
                stream.synchronize()
        return found if self.device.type == "cuda" else None


def free_memory(device: torch.device) -> int | None:
    """Bytes that could be taken on a device now; None where the system does not say."""
    if device.type == "cuda":
        reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reusable
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
