"""Cost of offloading: peak memory, CPU seconds and bytes read of one analysis, with the model in memory and offloaded.

    OMP_NUM_THREADS=1 python benchmarks/offload.py --layers 2          # a minute
    OMP_NUM_THREADS=1 python benchmarks/offload.py                     # a Llama of 1.03 G parameters

The weights are random. Each way runs in a separate process, which opens the saved model and measures it. Its memory is
the peak above the memory of the process before. The records of both ways must be equal.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

import lit_layers
from lit_layers.analyses import Coupling, Lens, Trajectory
from lit_layers.models import LayeredModel, load
from lit_layers.models.offload import Offload, is_offloaded
from tests.support.listed_batches import Listed

STATUS = Path("/proc/self/status")


def save_llama(folder: str, layers: int, width: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 9 // 4,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        vocab_size=32_000,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def resident(field: str) -> int:
    return next(int(line.split()[1]) * 1024 for line in STATUS.read_text().splitlines() if line.startswith(field))


def measured(folder: str, scratch: str, analysis: str, prompts: int, tokens: int) -> dict[str, Any]:
    """Open and measure the saved model in this process, offloaded if `scratch` is given."""
    from accelerate.utils import OffloadedWeightsLoader

    count = {"bytes": 0}
    read = OffloadedWeightsLoader.__getitem__

    def counted(self: Any, key: str) -> Tensor:
        tensor = read(self, key)
        count["bytes"] += tensor.nbytes
        return tensor

    generator = torch.Generator().manual_seed(1)
    data = Listed({"input_ids": torch.randint(32_000, (prompts, tokens), generator=generator)})
    kind = {"trajectory": Trajectory, "lens": Lens, "coupling": Coupling}[analysis]
    before, began = resident("VmRSS"), time.process_time()
    model = load(folder, offload=Offload(Path(scratch), torch.device("cpu")) if scratch else None)
    if is_offloaded(model) != bool(scratch):
        raise SystemExit("the model is not where it should be")
    view = LayeredModel(model)
    OffloadedWeightsLoader.__getitem__ = counted
    found = lit_layers.measure(view, kind(batches=data), run="llama", step=0, raises=True)
    records = hashlib.sha256("".join(map(repr, found.records)).encode()).hexdigest()
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "peak MB": round((resident("VmHWM") - before) / 1e6),
        "CPU s": round(time.process_time() - began, 1),
        "read MB": round(count["bytes"] / 1e6),
        "records": (len(found.records), records),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--analysis", choices=("trajectory", "lens", "coupling"), default="coupling")
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--prompts", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--one", nargs=2, metavar=("FOLDER", "SCRATCH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        folder, scratch = options.one
        print(json.dumps(measured(folder, scratch, options.analysis, options.prompts, options.tokens)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        save_llama(f"{folder}/model", options.layers, options.width)
        records = []
        for way, scratch in {"offloaded": f"{folder}/scratch", "whole": ""}.items():
            command = [sys.executable, *sys.argv, "--one", f"{folder}/model", scratch]
            row = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
            records.append(row.pop("records"))
            print(way, row, f"{records[-1][0]} records", flush=True)
    print("all records are equal" if records[0] == records[1] else "RECORDS DIFFER")
    return int(records[0] != records[1])


if __name__ == "__main__":
    sys.exit(main())
