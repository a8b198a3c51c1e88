"""Coupling as published code computes it against ours: same inputs, same numbers, one run.

    python benchmarks/coupling.py                          GPT-2 small sizes, 2 blocks, 64 tokens (some minutes)
    python benchmarks/coupling.py --tokens 512 --blocks 1
    python benchmarks/coupling.py --model vit              DeiT-tiny sizes, 197 tokens

The published way is written afresh here: the graph of the whole model over all tokens, eager attention, all rows of
a Jacobian by chunked vector-Jacobian products to the whole input, full decompositions, a loop over pairs. Each way
runs in a process of its own, so that peak memory is its own. The floor is the matrix products of 24 dim^3 per Jacobian,
those that reverse mode through one token of a block of this family needs. Times are CPU seconds of the process, so that
other work on the machine does not count: run it with OMP_NUM_THREADS=1.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn

SIZES = {
    "gpt2": {"n_embd": 768, "n_head": 12, "vocab_size": 1024, "n_positions": 1024},
    "gpt_neox": {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096, "vocab_size": 1024},
    "vit": {"img_size": 224, "patch_size": 16, "embed_dim": 192, "num_heads": 3, "num_classes": 10},
}
WORDS = {"bos_token_id": 0, "eos_token_id": 0}


def build(name: str, blocks: int, attention: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "vit":
        from timm.models.vision_transformer import VisionTransformer

        model = VisionTransformer(depth=blocks, **SIZES[name])
        for block in model.blocks:
            block.attn.fused_attn = attention == "sdpa"
        return model.eval()
    import transformers

    depth = {"n_layer": blocks} if name == "gpt2" else {"num_hidden_layers": blocks}
    config = transformers.AutoConfig.for_model(name, **SIZES[name], **depth, **WORDS)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def inputs(name: str, prompts: int, tokens: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if name == "vit":
        return {"pixel_values": torch.randn(prompts, 3, 224, 224, generator=generator)}
    return {"input_ids": torch.randint(1, 1024, (prompts, tokens), generator=generator)}


class Clock:
    def __init__(self) -> None:
        self.stages: dict[str, float] = {}

    def stage(self, name: str, since: float) -> float:
        now = time.process_time()
        self.stages[name] = self.stages.get(name, 0) + now - since
        return now


def published(options: argparse.Namespace, clock: Clock) -> tuple[Tensor, Tensor]:
    """One prompt at a time: (prompts, blocks, dim, dim) Jacobians and (k, prompts, blocks, blocks) miscouplings."""
    model = build(options.model, options.blocks, "eager")
    batch, chunk = inputs(options.model, options.prompts, options.tokens), 64
    modules = list(model.blocks if options.model == "vit" else model.base_model.get_submodule(
        "h" if options.model == "gpt2" else "layers"))  # fmt: skip
    jacobians, miscouplings = [], []
    for prompt in range(options.prompts):
        since = time.process_time()
        states: list[Tensor] = []

        def keep(module: nn.Module, args: tuple, output: Tensor, states: list[Tensor] = states) -> None:
            states.extend([output] if states else [args[0], output])

        handles = [block.register_forward_hook(keep) for block in modules]
        one = {name: values[prompt : prompt + 1] for name, values in batch.items()}
        if options.model == "vit":
            model(one["pixel_values"])
        else:
            model(**one, use_cache=False)
        for handle in handles:
            handle.remove()
        since = clock.stage("forward", since)
        found = []
        for layer in range(options.blocks):
            dim = states[0].shape[-1]
            rows = []
            for basis in torch.eye(dim).split(chunk):
                (grads,) = torch.autograd.grad(
                    states[layer + 1][0, -1], states[layer], basis, is_grads_batched=True, retain_graph=True
                )
                rows.append(grads[:, 0, -1])
            found.append(torch.cat(rows) - torch.eye(dim))
        jacobians.append(torch.stack(found))
        since = clock.stage("jacobians", since)
        factors = [torch.linalg.svd(jacobian) for jacobian in found]
        since = clock.stage("singular vectors", since)
        pairs = torch.zeros(len(options.k), options.blocks, options.blocks)
        for position, k in enumerate(options.k):
            for i, first in enumerate(found):
                for j, (u, _, vh) in enumerate(factors):
                    values = factors[i][1][:k]
                    compressed = u[:, :k].T @ first @ vh[:k].T
                    pairs[position, i, j] = (compressed - torch.diag(values)).norm() / values.norm()
        miscouplings.append(pairs)
        clock.stage("pairs", since)
    return torch.stack(jacobians), torch.stack(miscouplings, 1)


def ours(options: argparse.Namespace, clock: Clock) -> tuple[Tensor, Tensor]:
    from lit_layers.functional.coupling import Factors, miscoupling_from_factors, singular_factors
    from lit_layers.functional.jacobian import block_jacobian
    from lit_layers.models.view import LayeredModel

    model = LayeredModel(build(options.model, options.blocks, "sdpa"))
    batch = inputs(options.model, options.prompts, options.tokens)
    since = time.process_time()
    trajectory = model.trajectory(batch)
    since = clock.stage("forward", since)
    for stage in ("self-checks, once", "jacobians"):  # the first call of a block holds its route against the block
        found = [block_jacobian(trajectory.block(1 + b), trajectory.hidden[b]) for b in range(options.blocks)]
        since = clock.stage(stage, since)
    clock.stages["self-checks, once"] -= clock.stages["jacobians"]
    parts = [singular_factors(jacobians, max(options.k)) for jacobians in found]
    factors = Factors(*(torch.stack(part, 1) for part in zip(*parts, strict=True)))
    since = clock.stage("singular vectors", since)
    jacobians = torch.stack(found, 1)
    wide = jacobians.to(factors.left.dtype)
    pairs = miscoupling_from_factors(wide, factors.values[..., : max(options.k)], factors, k=options.k)
    clock.stage("pairs", since)
    return jacobians, pairs


def floor(dim: int) -> float:
    """Seconds for 24 dim^3 floating-point operations as products of a square with a four times wider matrix."""
    square, wide = torch.randn(dim, dim), torch.randn(dim, 4 * dim)
    times = []
    for _ in range(5):
        since = time.process_time()
        for _ in range(3):
            square @ wide  # 8 dim^3 each
        times.append(time.process_time() - since)
    return min(times)


def one_way(options: argparse.Namespace) -> None:
    clock = Clock()
    options.warm_up and globals()[options.way](
        argparse.Namespace(**{**vars(options), "blocks": 1, "prompts": 1}), Clock()
    )
    jacobians, pairs = globals()[options.way](options, clock)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    torch.save({"jacobians": jacobians, "pairs": pairs, "stages": clock.stages, "peak": peak}, options.result)


def main() -> None:
    parser = argparse.ArgumentParser(description="Coupling: the published way against ours.")
    parser.add_argument("--model", choices=list(SIZES), default="gpt2")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=1)
    parser.add_argument("--k", type=int, nargs="+", default=[10, 30, 76])
    parser.add_argument("--way", choices=["published", "ours"], help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    parser.add_argument("--warm-up", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        one_way(options)
        return
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for way in ("published", "ours"):
            path = str(Path(folder) / way)
            extra = ["--warm-up"] if way == "ours" else []
            command = [sys.executable, __file__, *sys.argv[1:], "--way", way, "--result", path, *extra]
            subprocess.run(command, check=True)
            found[way] = torch.load(path)
    theirs, mine = found["published"], found["ours"]
    count = options.blocks * options.prompts
    error = (mine["jacobians"] - theirs["jacobians"]).norm() / theirs["jacobians"].norm()
    print(
        f"{options.model}, {options.prompts} prompts x {options.tokens} tokens, {options.blocks} blocks, K {options.k}"
    )
    print(f"Jacobians differ by {error:.1e}, miscouplings by {(mine['pairs'] - theirs['pairs']).abs().max():.1e}")
    print(f"{'stage':<18}{'published s':>12}{'ours s':>10}{'ratio':>8}")
    for stage, seconds in theirs["stages"].items():
        print(f"{stage:<18}{seconds:>12.3f}{mine['stages'][stage]:>10.3f}{seconds / mine['stages'][stage]:>8.1f}")
    once = mine["stages"].pop("self-checks, once")
    totals = sum(theirs["stages"].values()), sum(mine["stages"].values())
    print(f"{'total':<18}{totals[0]:>12.3f}{totals[1]:>10.3f}{totals[0] / totals[1]:>8.1f}")
    print(f"{'peak memory MiB':<18}{theirs['peak']:>12.0f}{mine['peak']:>10.0f}{theirs['peak'] / mine['peak']:>8.1f}")
    print(f"self-checks, once per block and layout of inputs, not in the total: {once:.3f} s")
    seconds = floor(mine["jacobians"].shape[-1])
    print(f"matrix products of 24 dim^3: {seconds:.4f} s, a Jacobian: {mine['stages']['jacobians'] / count:.4f} s, "
          f"{mine['stages']['jacobians'] / count / seconds:.2f} x the floor")  # fmt: skip


if __name__ == "__main__":
    main()
