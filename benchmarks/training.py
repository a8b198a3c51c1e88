"""Training speed: our trainer against two plain loops, in one run.

Contenders, all with the same weights, tokens, AdamW, clipping and learning rates, on the same device:
  lit_layers   LitCausalLM in a Lightning Trainer, with the options, loader and callbacks of `lit-layers fit`
  bare loop    a few lines of PyTorch around the very same Hugging Face model
  nanoGPT      a few lines of PyTorch around a GPT of equal size written out in nn.Linear, without any library; with
               --chunked_loss it never holds all logits (torch's linear_cross_entropy)

They take turns: the Trainer pauses after each step (after ten on a GPU, whose queue must stay filled) while the others
run as many steps, in alternating order. Each round of some steps gives one ratio, and the median over rounds is
reported, so that other work on the machine slows all of them. All must reach the same loss, otherwise the run ends with
an error.

    python benchmarks/training.py --size quickstart
    python benchmarks/training.py --size 124m --device cuda
"""

import argparse
import copy
import logging
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import torch
from rounds import Row, add_options, finish, ratios
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from lit_layers import records
from lit_layers.models import true_vocab_size
from lit_layers.training import LitCausalLM, LitTextData
from lit_layers.training.modules import adamw, warmup_cosine
from lit_layers.training.run_log import RunLog
from lit_layers.training.trainer import DEFAULTS, StepSampler

Loss = Callable[[Tensor, Tensor], Tensor]  # of tokens (sequences, positions) and the next tokens, flattened
OURS, BARE, NANO = "lit_layers", "bare loop", "nanoGPT"
TARGETS = {BARE: 0.95, NANO: 1.0}
MFU = {False: 0.45, True: 0.5}  # target on a GPU, without and with --compile
CLIP, WARMUP = 1.0, 40


@dataclass(frozen=True)
class Size:
    """Shape of a model and of its batches, and the number of steps in a round."""

    layers: int
    dim: int
    heads: int
    context: int
    vocabulary: int
    batch: int
    round: int


SIZES = {
    "quickstart": Size(layers=6, dim=128, heads=4, context=128, vocabulary=2048, batch=16, round=10),
    "small": Size(layers=6, dim=384, heads=6, context=256, vocabulary=8192, batch=4, round=4),
    "124m": Size(layers=12, dim=768, heads=12, context=1024, vocabulary=50257, batch=16, round=20),
}


# ------------------------------------------------------------------------------------------------ the nanoGPT model


class NanoBlock(nn.Module):
    """A pre-norm block: attention through scaled_dot_product_attention, then a GELU MLP."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.attention_out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.expand, self.gelu, self.contract = (
            nn.Linear(dim, 4 * dim),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * dim, dim),
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, dim = x.shape
        q, k, v = self.qkv(self.ln_1(x)).split(dim, dim=2)
        q, k, v = (part.view(batch, tokens, self.heads, -1).transpose(1, 2) for part in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (batch, heads, tokens, dim / heads)
        x = x + self.attention_out(mixed.transpose(1, 2).contiguous().view(batch, tokens, dim))
        return x + self.contract(self.gelu(self.expand(self.ln_2(x))))


class NanoGPT(nn.Module):
    """GPT-2 as in nanoGPT: tied embedding and head, learned positions, no key-value cache, no masks."""

    def __init__(self, size: Size, rows: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(rows, size.dim), nn.Embedding(size.context, size.dim)
        self.blocks = nn.ModuleList(NanoBlock(size.dim, size.heads) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.dim)
        self.head = nn.Linear(size.dim, rows, bias=False)
        self.head.weight = self.token.weight

    def states(self, tokens: Tensor) -> Tensor:
        """Return the states before the head."""
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.states(tokens))

    @torch.no_grad()
    def copy_from(self, gpt2: Any) -> "NanoGPT":
        """Copy the weights of a Hugging Face GPT-2, whose Conv1D stores the transpose of a Linear."""
        body = gpt2.transformer
        pairs = [(self.token, body.wte), (self.position, body.wpe), (self.norm, body.ln_f)]
        for mine, theirs in zip(self.blocks, body.h, strict=True):
            pairs += [(mine.ln_1, theirs.ln_1), (mine.ln_2, theirs.ln_2)]
            pairs += [(mine.qkv, theirs.attn.c_attn), (mine.attention_out, theirs.attn.c_proj)]
            pairs += [(mine.expand, theirs.mlp.c_fc), (mine.contract, theirs.mlp.c_proj)]
        for mine, theirs in pairs:
            transposed = isinstance(mine, nn.Linear)
            mine.weight.copy_(theirs.weight.T if transposed else theirs.weight)
            if getattr(mine, "bias", None) is not None:
                mine.bias.copy_(theirs.bias)
        return self


# ------------------------------------------------------------------------------------------------ data


class RandomBlocks(Dataset):
    """Random token ids with frequencies 1 / rank, as of words, so that the loss can fall. Read as from shards."""

    def __init__(self, size: Size, count: int = 2048) -> None:
        frequencies = 1 / torch.arange(1, size.vocabulary + 1)
        draws = torch.multinomial(
            frequencies, count * (size.context + 1), replacement=True, generator=torch.Generator().manual_seed(7)
        )
        self.tokens = draws.view(count, size.context + 1).numpy().astype(np.uint16)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": torch.from_numpy(self.tokens[index].astype(np.int64))}


class RandomText(LitTextData):
    """The real data module with random tokens in place of a prepared corpus."""

    def __init__(self, size: Size) -> None:
        super().__init__("random", "none", num_tokens=size.context, global_batch_size=size.batch)
        self.shards: Any = SimpleNamespace(vocab_size=size.vocabulary)
        self.train: Any = RandomBlocks(size)

    def prepare_data(self) -> None:
        """Nothing to prepare."""

    def setup(self, stage: str) -> None:
        """Nothing to open."""


# ------------------------------------------------------------------------------------------------ contenders


class Loop:
    """A bare training loop over the same batches as the Trainer."""

    def __init__(self, loss: Loss, model: nn.Module, lit: LitCausalLM, data: RandomText) -> None:
        self.loss, self.model, self.device = loss, model, lit.device
        self.tokens = torch.from_numpy(data.train.tokens.astype(np.int64))
        self.sampler = StepSampler(len(data.train), global_batch_size=data.global_batch_size, seed=data.seed)
        self.optimizer = adamw(model, lr=lit.lr, weight_decay=lit.weight_decay, betas=lit.betas)
        factor = warmup_cosine(
            warmup_steps=lit.warmup_steps, decay_steps=lit.trainer.max_steps, min_ratio=lit.min_lr_ratio
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)
        self.autocast = torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()
        self.losses: list[Tensor] = []

    def run(self, steps: int) -> None:
        for _ in range(steps):
            tokens = self.tokens[self.sampler.global_batch(len(self.losses))].to(self.device, non_blocking=True)
            with self.autocast:
                loss = self.loss(tokens[:, :-1], tokens[:, 1:].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.losses.append(loss.detach())


def plain_loops(lit: LitCausalLM, data: RandomText, size: Size, chunked: bool) -> dict[str, Loop]:
    """Return the two plain loops, with models equal to the trainer's current model."""
    bare: Any = copy.deepcopy(lit.model)
    nano = NanoGPT(size, rows=bare.config.vocab_size).to(lit.device).copy_from(bare)
    assert sum(p.numel() for p in bare.parameters()) == sum(p.numel() for p in nano.parameters())
    network = torch.compile(bare) if lit.compile_model else bare
    nano_call = nano.states if chunked else nano
    forward = torch.compile(nano_call) if lit.compile_model else nano_call
    words = true_vocab_size(bare)

    def bare_loss(tokens: Tensor, targets: Tensor) -> Tensor:
        logits = network(input_ids=tokens, use_cache=False).logits[..., :words]
        return F.cross_entropy(logits.flatten(0, 1), targets)

    def nano_loss(tokens: Tensor, targets: Tensor) -> Tensor:
        states = forward(tokens).flatten(0, 1)  # logits, unless `chunked`
        if not chunked:
            return F.cross_entropy(states, targets)
        # Autocast does not reach this function.
        dtype = torch.bfloat16 if torch.is_autocast_enabled(states.device.type) else states.dtype
        options = nn.LinearCrossEntropyOptions()
        return F.linear_cross_entropy(states.to(dtype), nano.head.weight.to(dtype), targets, options=options).float()

    return {BARE: Loop(bare_loss, bare, lit, data), NANO: Loop(nano_loss, nano, lit, data)}


# Dense bf16 and float16 operations per second, by the exact name that CUDA reports, because a similar name may be
# another GPU. Source: NVIDIA's datasheets, which from Hopper on and for L4, L40S give twice these numbers, "with
# sparsity": A100 (312), A10 (125), L4 (242), L40 (181 dense), L40S (362 dense), H100 (SXM 1,979, PCIe 1,513, NVL
# 1,671), H200 (SXM 1,979, NVL 1,671), GH200 (1,979), HGX B200 (4,500 a GPU) and GB200 NVL72 (5,000 a GPU), in
# teraflops.
_PEAKS = {
    **dict.fromkeys(("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB", "NVIDIA A100-PCIE-40GB"), 312e12),
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA A10": 125e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40": 181e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA H100 PCIe": 756e12,
    **dict.fromkeys(("NVIDIA H100 NVL", "NVIDIA H200 NVL"), 835e12),
    **dict.fromkeys(("NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA GH200 480GB"), 989e12),
    "NVIDIA B200": 2250e12,
    "NVIDIA GB200": 2500e12,
}


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Return the peak operations per second of a GPU in Lightning's `precision`, or None if unknown."""
    peak = _PEAKS.get(torch.cuda.get_device_name(device))
    if peak is None or "16" in precision:
        return peak
    # TF32 reaches half of it. Plain float32 is about ten times slower and not worth a target.
    return peak / 2 if precision.startswith("32") and torch.get_float32_matmul_precision() != "highest" else None


_POSITIONS = ("wpe.weight", "embed_positions.weight", "position_embeddings.weight")


def flops_per_token(model: Any, num_tokens: int) -> float:
    """Return floating-point operations per trained token: 6 N + 12 L d T, N without position embeddings.

    Source: Chowdhery et al. 2022 (PaLM), appendix B.
    """
    size = sum(each.numel() for name, each in model.named_parameters() if not name.endswith(_POSITIONS))
    return 6 * size + 12 * model.config.num_hidden_layers * model.config.hidden_size * num_tokens


class TakeTurns(L.Callback):
    """Callback that stops the trainer's clock every `turn` steps and runs the plain loops for as many steps.

    Attributes:
        seconds: per contender, the wall and processor time of each of its turns.
        paused_seconds: time that RunLog excludes from its own tokens per second.
    """

    def __init__(self, size: Size, turn: int, chunked: bool) -> None:
        self.size, self.turn, self.chunked = size, turn, chunked
        self.paused_seconds = 0.0
        self.mfu_of_a_token_a_second: float | None = None
        self.seconds: dict[str, list[tuple[float, float]]] = {OURS: [], BARE: [], NANO: []}
        self.loops: dict[str, Loop] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.loops = plain_loops(pl_module, trainer.datamodule, self.size, self.chunked)  # pyright: ignore
        device = trainer.strategy.root_device
        peak = peak_flops(device, str(trainer.precision)) if device.type == "cuda" else None
        if peak is not None:
            self.mfu_of_a_token_a_second = flops_per_token(pl_module.model, self.size.context) / peak
        self._started = self._clock()

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx and batch_idx % self.turn == 0:
            self._others_turn()

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._others_turn()

    def _others_turn(self) -> None:
        now = self._clock()
        self.seconds[OURS].append(_difference(now, self._started))
        backwards = -1 if len(self.seconds[OURS]) % 2 else 1
        for name, loop in list(self.loops.items())[::backwards]:
            started = self._clock()
            loop.run(self.turn)
            self.seconds[name].append(_difference(self._clock(), started))
        self._started = self._clock()
        self.paused_seconds += self._started[0] - now[0]

    def _clock(self) -> tuple[float, float]:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter(), time.process_time()


def _difference(end: tuple[float, float], start: tuple[float, float]) -> tuple[float, float]:
    return end[0] - start[0], end[1] - start[1]


# ------------------------------------------------------------------------------------------------ run and report


def compete(
    size: Size, *, steps: int, turn: int, device: str, compile: bool, chunked: bool
) -> tuple[TakeTurns, Tensor]:
    """Train all contenders, and return the timings and the losses that the trainer logged."""
    shape = {"n_layer": size.layers, "n_embd": size.dim, "n_head": size.heads, "n_positions": size.context}
    no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    lit = LitCausalLM("gpt2", shape | no_dropout, warmup_steps=WARMUP, compile=compile)
    with tempfile.TemporaryDirectory() as root:
        run_log = RunLog(root)
        turns = TakeTurns(size, turn, chunked)
        trainer = L.Trainer(
            **DEFAULTS,
            accelerator=device,
            devices=1,
            precision="bf16-mixed" if device == "cuda" else "32-true",
            gradient_clip_val=CLIP,
            limit_val_batches=0,
            max_steps=steps,
            default_root_dir=root,
            callbacks=[turns, run_log],
        )
        trainer.fit(lit, datamodule=RandomText(size))
        losses = [row["train/loss"] for row in records.rows(run_log.file)]
    return turns, torch.tensor(losses, dtype=torch.float64)


def compare_losses(turns: TakeTurns, losses: Tensor, device: str) -> dict[str, float]:
    """Return the relative difference between each loop's loss and the trainer's, over the last quarter of the steps.

    Raises:
        SystemExit: if the contenders did not do the same work.
    """
    differences = {}
    # nanoGPT includes the padding rows in its softmax: log(1 + 47 / 50257) = 0.0009 of 10.8 nats at the first step.
    at_first, at_last = (2e-4, 1e-3) if device == "cpu" else (1e-3, 1e-2)
    for name, loop in turns.loops.items():
        theirs = torch.stack(loop.losses).double().cpu()
        if len(theirs) != len(losses):
            sys.exit(f"{name} took {len(theirs)} steps, lit_layers {len(losses)}: the comparison is void")
        first = float((theirs[0] / losses[0] - 1).abs())
        # Rounding errors grow with every step, and are larger in single steps than in their mean.
        quarter = -(len(losses) // 4) or None
        differences[name] = float((theirs[quarter:].mean() / losses[quarter:].mean() - 1).abs())
        if first > at_first or differences[name] > at_last:
            sys.exit(
                f"losses of {name} and lit_layers differ by {first:.1e} at the first step and by "
                f"{differences[name]:.1e} at the end: the comparison is void"
            )
    return differences


def rounds_of(turns: list[tuple[float, float]], per_round: int) -> list[tuple[float, float]]:
    """Return the wall and processor seconds of each round."""
    return [
        (sum(wall for wall, _ in part), sum(processor for _, processor in part))
        for part in (turns[start : start + per_round] for start in range(0, len(turns), per_round))
    ]


def rows_of(name: str, turns: TakeTurns, differences: dict[str, float], warmup: int, wanted_mfu: float) -> list[Row]:
    """Return rows of our tokens per second over each loop's, by wall time, and of the MFU if the peak is known."""
    size = turns.size
    tokens = size.round * size.batch * size.context
    timings = {of: rounds_of(taken, size.round // turns.turn)[warmup:] for of, taken in turns.seconds.items()}
    walls = {of: [wall for wall, _ in taken] for of, taken in timings.items()}
    rows = []
    for other, target in TARGETS.items():
        processor = [theirs[1] / ours[1] for theirs, ours in zip(timings[other], timings[OURS], strict=True)]
        others = {
            "tokens/s: ours, theirs": ", ".join(
                f"{tokens / statistics.median(walls[of]):,.0f}" for of in (OURS, other)
            ),
            "in CPU time": f"{statistics.median(processor):.3f}",
            "losses differ by": f"{differences[other]:.0e}",
        }
        rows.append(Row(f"{name}, over {other}", ratios(walls[other], walls[OURS]), target, others=others))
    if turns.mfu_of_a_token_a_second is not None:
        for of, target in ((OURS, wanted_mfu), (BARE, None), (NANO, None)):
            mfu = [turns.mfu_of_a_token_a_second * tokens / wall for wall in walls[of]]
            rows.append(Row(f"{name}, MFU of {of}", mfu, target))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description="Training speed of lit_layers, a bare loop and a nanoGPT-style model.")
    parser.add_argument("--size", choices=SIZES, default="quickstart")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    add_options(parser, rounds=12)
    parser.add_argument("--warmup", type=int, default=1, help="rounds before them that do not")
    parser.add_argument("--batch", type=int, help="sequences a step, instead of the size's own")
    parser.add_argument("--turn", type=int, help="steps before the others take over: a divisor of the round")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch on the CPU")
    parser.add_argument("--compile", action="store_true", help="torch.compile for all three")
    parser.add_argument("--chunked_loss", action="store_true", help="linear_cross_entropy in the nanoGPT loop")
    options = parser.parse_args()
    if options.rounds < 2 or options.warmup < 0 or min(options.threads, options.batch or 1, options.turn or 1) < 1:
        parser.error("expected at least 2 rounds, no negative warm-up, and positive threads, batch and turn")
    size = SIZES[options.size]
    size = replace(size, batch=options.batch or size.batch)
    turn = options.turn or (10 if options.device == "cuda" else 1)
    if size.round % turn:
        parser.error(f"expected a turn that divides the round of {size.round} steps, got {turn}")
    torch.set_num_threads(options.threads)
    torch.set_float32_matmul_precision("high" if options.device == "cuda" else "highest")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    turns, losses = compete(
        size,
        steps=(options.warmup + options.rounds) * size.round,
        turn=turn,
        device=options.device,
        compile=options.compile,
        chunked=options.chunked_loss,
    )
    print(f"{options.size}: {size}")
    differences = compare_losses(turns, losses, options.device)
    rows = rows_of(options.size, turns, differences, options.warmup, MFU[options.compile])
    return finish("training", rows, options, device=options.device)


if __name__ == "__main__":
    sys.exit(main())
