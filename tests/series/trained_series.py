"""Tiny models that are really trained, as series of step folders: schedules, rates, restarts, averages, precisions."""

import copy
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from torch import nn

from lit_layers.models.build import causal_lm, save

VOCABULARY = 61
SIZES = {
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16},
    "llama": {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
}
SIZES["gpt2"] |= dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
SIZES["llama"] |= {"num_key_value_heads": 2, "max_position_embeddings": 16}
DENSE = tuple(range(13))
EVEN = tuple(range(0, 121, 20))
LOG = (0, 1, 2, 4, 8, 16, 32, 64, 120)
SPARSE = (0, 40, 120)
UNEVEN = (0, 10, 15, 40, 70, 110, 120)


@dataclass(frozen=True)
class Training:
    """One way to train.

    The final checkpoint is the mean of the last `merged` ones. `average` is the decay of a moving mean.
    """

    schedule: str = "cosine"
    lr: float = 3e-3
    optimizer: str = "adamw"
    steps: tuple[int, ...] = EVEN
    weight_decay: float = 0.1
    architecture: str = "gpt2"
    tied: bool = True
    dtype: torch.dtype = torch.float32
    merged: int = 1
    average: float | None = None
    begun: bool = False  # starts with another run's weights, saved in bfloat16
    spike: tuple[int, int, float] = (0, 0, 1.0)  # first step, end, factor of the learning rate
    seed: int = 0


def rate(schedule: str, step: int, total: int) -> float:
    """Return the learning rate as a share of its peak."""
    done = step / total
    return {
        "constant": 1.0,
        "linear": 1 - done,
        "cosine": 0.5 * (1 + math.cos(math.pi * done)),
        "warm-up": min(1.0, (step + 1) / 20) * (1 - done),
        "wsd": min(1.0, (step + 1) / 10) * min(1.0, 5 * (1 - done)),
        "restarts": 0.5 * (1 + math.cos(math.pi * (step % 40) / 40)),
        "quick restarts": 0.5 * (1 + math.cos(math.pi * (step % 15) / 15)),
    }[schedule]


def states(training: Training) -> Iterator[tuple[int, nn.Module]]:
    """Yield each saved step with the model at that step."""
    torch.manual_seed(training.seed)
    sizes = {"vocab_size": VOCABULARY, "tie_word_embeddings": training.tied, **SIZES[training.architecture]}
    model = causal_lm(training.architecture, seed=training.seed, **sizes)
    if training.begun:
        earlier = replace(training, begun=False, seed=training.seed + 50, steps=(0, 60), merged=1, average=None)
        *_, (_, source) = states(earlier)
        model.load_state_dict({name: tensor.bfloat16().float() for name, tensor in source.state_dict().items()})
    options = {"lr": training.lr, "weight_decay": training.weight_decay}
    momentum = {"sgd": {"momentum": 0.0}, "momentum": {"momentum": 0.9}}
    if training.optimizer == "adamw":
        optimizer = torch.optim.AdamW(model.parameters(), **options)
    else:
        optimizer = torch.optim.SGD(model.parameters(), **momentum[training.optimizer], **options)
    generator = torch.Generator().manual_seed(training.seed + 1)
    chain = torch.softmax(3 * torch.randn(VOCABULARY, VOCABULARY, generator=generator), -1)
    total, average = training.steps[-1], None
    for step in range(total + 1):
        if training.average is not None:
            now = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
            share = training.average if average is not None else 0.0
            average = {name: share * (average or now)[name] + (1 - share) * tensor for name, tensor in now.items()}
        if step in training.steps:
            shown = model if average is None else copy.deepcopy(model)
            shown.load_state_dict(average or model.state_dict())
            yield step, shown
        tokens = torch.randint(VOCABULARY, (8, 1), generator=generator)
        for _ in range(11):
            tokens = torch.cat([tokens, torch.multinomial(chain[tokens[:, -1]], 1, generator=generator)], 1)
        for group in optimizer.param_groups:
            first, end, times = training.spike
            high = times if first <= step < end else 1.0
            group["lr"] = training.lr * high * rate(training.schedule, step, total)
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()


def series(root: Path, training: Training) -> Path:
    """Train, and write every step as a folder with config, tokenizer and weights."""
    root.mkdir(parents=True)
    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0"))
    recent: list[dict[str, torch.Tensor]] = []
    for step, model in states(training):
        folder = root / f"step-{step:09d}"
        if not recent:
            save(model, folder)
            first = folder
        else:
            folder.mkdir()
            for name in ("config.json", "generation_config.json"):
                shutil.copyfile(first / name, folder / name)
        tokenizer.save(str(folder / "tokenizer.json"))
        state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        if training.tied:
            state.pop("lm_head.weight")
        recent.append(state)
        if step == training.steps[-1]:
            merged = recent[-training.merged :]
            state = {name: sum(each[name] for each in merged) / len(merged) for name in state}
        stored = {name: tensor.to(training.dtype).contiguous() for name, tensor in state.items()}
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return root


def healthy_trainings() -> list[Training]:
    """Return trainings that differ in every setting that may differ."""
    schedules = ("constant", "linear", "cosine", "warm-up", "wsd", "restarts", "quick restarts")
    rates = (1e-4, 1e-3, 3e-3, 1e-2, 3e-2)
    spacings = (EVEN, DENSE, LOG, SPARSE, UNEVEN)
    bfloat16 = torch.bfloat16
    return [
        *(
            Training(schedule, rates[number % 5], steps=spacings[number // 2 % 5], seed=number)
            for number, schedule in enumerate([*schedules, *schedules])
        ),
        Training("constant", 1e-4, "sgd", DENSE),
        Training("linear", 1e-2, "sgd", LOG),
        Training("constant", 3e-2, "momentum", DENSE),
        Training("quick restarts", 3e-2, "momentum", tuple(range(0, 121, 5))),
        Training("constant", 3e-2, steps=tuple(range(0, 121, 4)), weight_decay=1.0),
        Training("constant", 1e-2, weight_decay=0.0, architecture="llama", tied=False),
        Training("wsd", 3e-2, steps=UNEVEN, architecture="llama"),
        Training("cosine", 3e-3, dtype=bfloat16),
        Training("linear", 1e-4, "sgd", dtype=bfloat16, steps=DENSE),
        Training("wsd", 3e-2, merged=3, steps=UNEVEN),
        Training("constant", 1e-2, merged=2, steps=LOG),
        Training("cosine", 3e-2, average=0.97, steps=DENSE),
        Training("constant", 1e-4, begun=True, steps=LOG),
    ]


def extreme_trainings() -> list[Training]:
    """Return healthy trainings in which weights change strongly: spikes, and long gaps with strong weight decay."""
    gaps = (0, 1, 2, 4, 8, 16, 160, 164, 168, 172)
    return [
        Training("constant", spike=(60, 80, 10.0)),
        Training("constant", 1e-2, spike=(60, 80, 10.0), architecture="llama", tied=False),
        Training("wsd", 3e-2, weight_decay=3.0, steps=gaps),
        Training("cosine", 3e-2, "momentum", steps=(0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)),
    ]
