"""A process that opens one saved model, runs one batch and prints how much memory that took; see `costs.py`.

python -m lit_layers.models._peak_memory FOLDER INPUTS.safetensors head|trunk DEVICE THREADS
"""

import contextlib
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from lit_layers.models.costs import call_of
from lit_layers.models.plain import import_code_of, open_plainly

STATUS = Path("/proc/self/status")


def resident(field: str) -> int:
    """A field of Linux' account of this process, in bytes: VmRSS now, VmHWM the most there was."""
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{STATUS} has no {field}")


def most_ever() -> int:
    # Not getrusage where it can be helped: on Linux its maximum begins with that of the process that started this one.
    if STATUS.exists():
        return resident("VmHWM")
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def forget_most() -> int:
    """What is resident now; where the system allows it, the most there was is counted from here."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS") if STATUS.exists() else most_ever()


def main(folder: str, inputs: str, part: str, device: str, threads: int) -> None:
    torch.set_num_threads(threads)
    batch, on_gpu = load_file(inputs), torch.device(device).type == "cuda"
    import_code_of(folder, head=part == "head")  # the libraries are not its cost
    torch.mm(torch.ones(64, 64), torch.ones(64, 64))  # so are the buffers of its linear algebra
    if on_gpu:
        torch.cuda.init()
        torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device) if on_gpu else forget_most()
    with torch.inference_mode():
        call_of(open_plainly(folder, head=part == "head").to(device), batch)()
    after = torch.cuda.max_memory_allocated(device) if on_gpu else most_ever()
    sys.stdout.write(json.dumps({"peak": after - before}))


if __name__ == "__main__":
    main(*sys.argv[1:5], threads=int(sys.argv[5]))
