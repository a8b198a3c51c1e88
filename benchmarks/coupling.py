"""Coupling in the published way against ours: one run, same inputs, equal results.

    python benchmarks/coupling.py                              GPT-2 small sizes, one block, 64 tokens
    python benchmarks/coupling.py --tokens 512
    python benchmarks/coupling.py --blocks 12 --prompts 8      end to end: the published way takes 15 minutes a round
    python benchmarks/coupling.py --size pythia-410m           or deit-tiny, llama-8b (one block: --device cuda)
    python benchmarks/coupling.py --size deit-tiny --ours      without the published way

This file reimplements the published way: the graph of the whole model over all tokens, eager attention, all rows of a
Jacobian by chunked vector-Jacobian products to the whole input, full decompositions, a loop over pairs. Each way runs
in a separate process. Its memory is the peak of each stage above the memory of the process before the forward pass
(interpreter, libraries and weights). The floor is the time of the matrix products that reverse mode through one token
of a GPT-2 block needs: 24 dim^3 per Jacobian. Times on a CPU are process times, so other work on the machine does not
count: run it with OMP_NUM_THREADS=1. "Self-checks" is the extra cost of the first call of each block.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rounds import Row, add_options, clock, finish, ratios
from torch import Tensor, nn

WORDS = {"vocab_size": 1024, "bos_token_id": 0, "eos_token_id": 0}
SIZES: dict[str, tuple[str, str, dict[str, Any]]] = {  # model type, path of the blocks, options
    "gpt2-small": ("gpt2", "h", {"n_embd": 768, "n_head": 12, "n_positions": 1024}),
    "pythia-410m": ("gpt_neox", "layers", {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}),
    "llama-8b": (
        "llama",
        "layers",
        {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336},
    ),
    "deit-tiny": ("vit", "blocks", {"embed_dim": 192, "num_heads": 3, "num_classes": 10}),
    "warm-up": ("gpt2", "h", {"n_embd": 64, "n_head": 2, "n_positions": 64}),
}


def build(size: str, blocks: int, attention: str) -> nn.Module:
    torch.manual_seed(0)
    kind, _, options = SIZES[size]
    if kind == "vit":
        from timm.layers import set_fused_attn
        from timm.models.vision_transformer import VisionTransformer

        set_fused_attn(attention == "sdpa")  # for attention modules built after this line
        return VisionTransformer(depth=blocks, **options).eval()
    import transformers

    depth = {"n_layer": blocks} if kind == "gpt2" else {"num_hidden_layers": blocks}
    config = transformers.AutoConfig.for_model(kind, **options, **depth, **WORDS)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def inputs(size: str, prompts: int, tokens: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if size == "deit-tiny":
        return {"pixel_values": torch.randn(prompts, 3, 224, 224, generator=generator)}
    return {"input_ids": torch.randint(1, 1024, (prompts, tokens), generator=generator)}


class Clock:
    """Measures seconds and peak memory (MiB) of each stage."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.stages: dict[str, tuple[float, float]] = {}
        self._start()
        self.before = self._peak()

    def stage(self, name: str) -> None:
        """End a stage and start the next."""
        now = clock(self.device)
        spent, peak = self.stages.get(name, (0.0, 0.0))
        self.stages[name] = spent + now - self.since, max(peak, self._peak() - self.before)
        self._start()

    def _start(self) -> None:
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # Linux: resets the peak
        self.since = clock(self.device)

    def _peak(self) -> float:
        if self.device == "cuda":
            return torch.cuda.max_memory_allocated() / 2**20
        (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 2**10


def published(options: argparse.Namespace, model: nn.Module, clock: Clock) -> tuple[list[Tensor], Tensor]:
    """Return the Jacobians of the last prompt, and miscouplings (prompts, k, blocks, blocks), one prompt at a time."""
    path, chunk = SIZES[options.size][1], 64
    trunk: Any = getattr(model, "base_model", model)
    everything, found = [], []
    for prompt in range(options.prompts):
        states: list[Tensor] = []

        def keep(module: nn.Module, args: tuple, output: Tensor, states: list[Tensor] = states) -> None:
            states.extend([output] if states else [args[0], output])

        handles = [block.register_forward_hook(keep) for block in trunk.get_submodule(path)]
        one = {name: values[prompt : prompt + 1] for name, values in options.batch.items()}
        model(one["pixel_values"]) if "pixel_values" in one else model(**one, use_cache=False)
        for handle in handles:
            handle.remove()
        clock.stage("forward")
        found = []
        for layer in range(options.blocks):
            dim = states[0].shape[-1]
            rows = []
            for basis in torch.eye(dim, device=options.device).split(chunk):
                (grads,) = torch.autograd.grad(
                    states[layer + 1][0, -1], states[layer], basis, is_grads_batched=True, retain_graph=True
                )
                rows.append(grads[:, 0, -1])
            found.append(torch.cat(rows) - torch.eye(dim, device=options.device))
        clock.stage("Jacobians")
        factors = [torch.linalg.svd(jacobian) for jacobian in found]
        clock.stage("singular vectors")
        pairs = torch.zeros(len(options.k), options.blocks, options.blocks)
        for position, k in enumerate(options.k):
            for i, first in enumerate(found):
                for j, (u, _, vh) in enumerate(factors):
                    values = factors[i][1][:k]
                    compressed = u[:, :k].T @ first @ vh[:k].T
                    pairs[position, i, j] = (compressed - torch.diag(values)).norm() / values.norm()
        everything.append(pairs)
        clock.stage("pairs")
    return found, torch.stack(everything)


def ours(options: argparse.Namespace, model: nn.Module, clock: Clock) -> tuple[list[Tensor], Tensor]:
    """Return the same as `published` from our code, on a GPU for all prompts together."""
    from lit_layers.functional.coupling import Factors, miscoupling_of_factors, singular_factors
    from lit_layers.functional.jacobian.block_jacobians import block_jacobian
    from lit_layers.models.view import LayeredModel

    view = LayeredModel(model)
    everything, found = [], []
    size = options.prompts if options.device == "cuda" else 1
    for start in range(0, options.prompts, size):
        trajectory = view.trajectory({name: values[start : start + size] for name, values in options.batch.items()})
        clock.stage("forward")
        if not start:  # the first call of a block compares our forward pass with the block's
            for block in range(options.blocks):
                block_jacobian(trajectory.block(1 + block), trajectory.hidden[block])
            clock.stage("self-checks")
        found = [block_jacobian(trajectory.block(1 + b), trajectory.hidden[b]) for b in range(options.blocks)]
        clock.stage("Jacobians")
        parts = [singular_factors(jacobians, max(options.k)) for jacobians in found]
        factors = Factors(*(torch.stack(part, 1) for part in zip(*parts, strict=True)))
        clock.stage("singular vectors")
        jacobians = torch.stack(found, 1).to(factors.left.dtype)
        pairs = miscoupling_of_factors(jacobians, factors.values[..., : max(options.k)], factors, k=options.k)
        everything.append(pairs.transpose(0, 1).cpu())  # (prompts, k, blocks, blocks)
        clock.stage("pairs")
    first, peak = clock.stages["self-checks"]
    clock.stages["self-checks"] = first - clock.stages["Jacobians"][0] * size / options.prompts, peak
    return [jacobian[-1] for jacobian in found], torch.cat(everything)


def floor(dim: int, device: str) -> float:
    """Return the seconds of 24 dim^3 floating-point operations: products of a square with a four times wider matrix."""
    square, wide = torch.randn(dim, dim, device=device), torch.randn(dim, 4 * dim, device=device)
    times = []
    for _ in range(5):
        since = clock(device)
        for _ in range(3):
            torch.mm(square, wide)  # 8 dim^3 operations
        times.append(clock(device) - since)
    return min(times)


def one_way(options: argparse.Namespace) -> None:
    way = {"published": published, "ours": ours}[options.way]
    attention = "eager" if options.way == "published" else "sdpa"
    small = argparse.Namespace(**{**vars(options), "size": "warm-up", "blocks": 1, "prompts": 1, "k": [4]})
    small.batch = {name: values.to(options.device) for name, values in inputs("warm-up", 1, 16).items()}
    way(small, build("warm-up", 1, attention).to(options.device), Clock(options.device))
    batch = inputs(options.size, options.prompts, options.tokens)
    options.batch = {name: values.to(options.device) for name, values in batch.items()}
    model = build(options.size, options.blocks, attention).to(options.device)
    for parameter in model.parameters():
        parameter.requires_grad_(options.way == "published")
    clock = Clock(options.device)
    jacobians, pairs = way(options, model, clock)
    torch.save({"jacobians": torch.stack(jacobians).cpu(), "pairs": pairs, "stages": clock.stages,
                "floor": floor(jacobians[0].shape[-1], options.device)}, options.result)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description="Coupling: the published way against ours.")
    parser.add_argument("--size", choices=[name for name in SIZES if name != "warm-up"], default="gpt2-small")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=1)
    parser.add_argument("--k", type=int, nargs="+", default=[10, 30, 76])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    add_options(parser)
    parser.add_argument("--ours", action="store_true", help="leave the published way out")
    parser.add_argument("--way", choices=["published", "ours"], help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        one_way(options)
        return 0
    ways = ["ours"] if options.ours else ["published", "ours"]
    rounds: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            for way in ways if number % 2 else ways[::-1]:
                path = str(Path(folder) / way)
                subprocess.run([sys.executable, __file__, *sys.argv[1:], "--way", way, "--result", path], check=True)
                rounds[way].append(torch.load(path))
    return finish("coupling", rows_of(options, rounds["ours"], rounds.get("published")), options, device=options.device)


def rows_of(options: argparse.Namespace, ours: list[dict[str, Any]], theirs: list[dict[str, Any]] | None) -> list[Row]:
    """Return a row for each stage, published over ours, and one for the Jacobian over its floor."""
    tokens = "197" if options.size == "deit-tiny" else options.tokens
    what = f"{options.size}, {options.blocks} x {options.prompts} x {tokens}"
    rows = [_stage_row(what, stage, theirs, ours) for stage in [*theirs[0]["stages"], "in total"]] if theirs else []
    each = [run["stages"]["Jacobians"][0] / (options.blocks * options.prompts) for run in ours]
    others = {"seconds: published, ours": f"ours {statistics.median(each):.4f} a Jacobian"}
    return [*rows, Row(f"{what}: over the floor", ratios(each, (run["floor"] for run in ours)), others=others)]


def _stage_row(what: str, stage: str, theirs: list[dict[str, Any]], ours: list[dict[str, Any]]) -> Row:
    sides = [[stage_of(run, stage) for run in runs] for runs in (theirs, ours)]
    seconds, memory = ([statistics.median(run[part] for run in side) for side in sides] for part in (0, 1))
    others = {
        "seconds: published, ours": f"{seconds[0]:.3f}, {seconds[1]:.3f}",
        "MiB": f"{memory[0]:.0f}, {memory[1]:.0f}",
    }
    if stage == "in total":
        far = [
            (one["jacobians"] - other["jacobians"]).norm() / other["jacobians"].norm()
            for one, other in zip(ours, theirs, strict=True)
        ]
        differences = [(one["pairs"] - other["pairs"]).abs().max() for one, other in zip(ours, theirs, strict=True)]
        others |= {"Jacobians differ by": f"{max(far):.1e}", "miscouplings by": f"{max(differences):.1e}"}
    return Row(f"{what}: {stage}", ratios(*([run[0] for run in side] for side in sides)), others=others)


def stage_of(run: dict[str, Any], stage: str) -> tuple[float, float]:
    """Return seconds and peak MiB of a stage."""
    if stage != "in total":
        return run["stages"][stage]
    stages = run["stages"].values()
    return sum(spent for spent, _ in stages), max(peak for _, peak in stages)


if __name__ == "__main__":
    raise SystemExit(main())
