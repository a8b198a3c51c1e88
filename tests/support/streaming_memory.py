"""A process that streams a model made on the spot, and prints how much memory that took: started by a test.

python -m tests.support.streaming_memory FOLDER BLOCKS DIM PROMPTS TOKENS coupling|no
"""

import ctypes
import gc
import json
import multiprocessing
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

from lit_layers.analyses import Coupling, Representation, Trajectory
from lit_layers.measuring.offline import analyze
from tests.support.listed_batches import Listed

VOCAB = 512


def write_model(folder: Path, blocks: int, dim: int) -> int:
    """A Llama with a shard for each block, of which one at a time is in memory; bytes of a block in float32."""
    folder.mkdir(parents=True)
    options = {"hidden_size": dim, "num_hidden_layers": blocks, "num_attention_heads": dim // 64, "vocab_size": VOCAB}
    config = transformers.LlamaConfig(
        **options, intermediate_size=4 * dim, max_position_embeddings=256, architectures=["LlamaForCausalLM"]
    )
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {n: t.shape for n, t in transformers.LlamaForCausalLM(config).state_dict().items()}
    shards: dict[str, list[str]] = {}
    for name in shapes:
        shards.setdefault(name.split(".")[2] if ".layers." in name else "rest", []).append(name)
    generator, weight_map = torch.Generator().manual_seed(0), {}
    for shard, names in shards.items():
        file = f"model-{shard}.safetensors"
        scale = {name: 1.0 if "norm" in name else dim**-0.5 for name in names}
        tensors = {n: (torch.randn(shapes[n], generator=generator) * scale[n]).bfloat16() for n in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return sum(4 * shapes[name].numel() for name in shards["0"])


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def peak_of(call) -> int:
    """Most memory that was resident while `call` ran, looked at each millisecond."""
    peak, done = resident(), threading.Event()

    def watch():
        nonlocal peak
        while not done.is_set():
            peak = max(peak, resident())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        call()
    finally:
        done.set()
        watcher.join()
    return peak


def main(folder: str, blocks: int, dim: int, prompts: int, tokens: int, coupling: bool) -> None:
    torch.set_num_threads(1)
    root = Path(folder)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        # elsewhere: what making a model leaves in the heap would be taken again, and not be seen
        pool.submit(write_model, root / "warm", 2, 64).result()
        block = pool.submit(write_model, root / "model", blocks, dim).result()

    def measured(name: str, width: int) -> None:
        ids = torch.randint(VOCAB, (prompts, tokens), generator=torch.Generator().manual_seed(1))
        data = Listed(*({"input_ids": part} for part in ids.split(4)))
        analyses = [Trajectory(batches=data), Representation(batches=data, num_halves=0)]
        if coupling:
            analyses.append(Coupling(batches=data, k=(width // 32,), num_prompts=4))
        found = analyze(root / name, analyses, root=root / f"run-{name}", stream_blocks=True, device="cpu")
        assert [m.error for m in found] == [None] * len(found)

    measured("warm", 64)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = resident()
    started = time.perf_counter()
    peak = peak_of(lambda: measured("model", dim))
    states = prompts * tokens * dim * 4
    factors = 2 * 4 * blocks * dim * (dim // 32 + 1) * 4 if coupling else 0
    facts = {"block": block, "model": blocks * block, "states": states, "factors": factors, "peak": peak - before}
    sys.stdout.write(json.dumps(facts | {"seconds": time.perf_counter() - started}))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:6]), sys.argv[6] == "coupling")
