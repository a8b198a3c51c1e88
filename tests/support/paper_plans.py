"""What each recipe of a published figure takes as published: `python -m tests.support.paper_plans DATA`.

The recipes' own `--plan` counts it, against a Hub with the config.json of every repository and no weights, and folders
of local data. It is written to `recipes/papers/plans.json`: bytes of memory and disk, and FLOP, which follow from
shapes and texts, and so are the same on any machine.
"""

import contextlib
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from lit_layers.analyses import Probe
from lit_layers.cli.main import main
from lit_layers.measuring import plan as planning
from lit_layers.measuring.plan import Plan, planned
from lit_layers.models.saved import outline
from lit_layers.models.view import LayeredModel
from lit_layers.models.workload import bytes_of_model
from lit_layers.papers import PaperRecipe, Step
from lit_layers.tasks.lm_eval_scorer import LmEvalScorer
from tests.support.data_mapping import linked
from tests.support.paper_tables import PLANS, ROOT, read, recipe_paths
from tests.support.papers_world import ROWS, wikitext_files, with_arc_to_train_on
from tests.support.recipe_costs import cost_of
from tests.support.series_hub import served

AT_A_TIME = 3  # checkpoints of a series on the disk
RATES = {"float32": 15e12, "bfloat16": 150e12}  # FLOP a second: of an A100 about three quarters and half of its most
GRIDS = {"vit_grid": (64, "recipes/deit/tiny_cifar10.yaml")}  # trained before the recipe's steps: runs, their recipe
PLANNED = ("analyze", "fit", "intervene", "mteb")  # commands with --plan


def _plain(kind: str, name: str, layers: int, dim: int, inner: int, heads: int, vocab: int, **more: Any) -> dict:
    shape = {"num_hidden_layers": layers, "hidden_size": dim, "intermediate_size": inner, "num_attention_heads": heads}
    return {"model_type": kind, "architectures": [name], "vocab_size": vocab, **shape, **more}


def _pythia(layers: int, dim: int, heads: int, vocab: int = 50304) -> dict:
    return _plain("gpt_neox", "GPTNeoXForCausalLM", layers, dim, 4 * dim, heads, vocab)


def _gpt2(layers: int, dim: int, heads: int) -> dict:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": layers,
        "n_embd": dim,
        "n_head": heads,
    }


def _qwen(layers: int, dim: int, inner: int, heads: int, vocab: int = 151936, **more: Any) -> dict:
    return _plain("qwen2", "Qwen2ForCausalLM", layers, dim, inner, heads, vocab, **more)


def _llama(layers: int, dim: int, inner: int, heads: int, vocab: int = 32000, **more: Any) -> dict:
    return _plain("llama", "LlamaForCausalLM", layers, dim, inner, heads, vocab, **more)


def _mistral(vocab: int = 32000) -> dict:
    return _plain("mistral", "MistralForCausalLM", 32, 4096, 14336, 32, vocab, num_key_value_heads=8)


def _phi(layers: int, dim: int) -> dict:
    return _plain("phi", "PhiForCausalLM", layers, dim, 4 * dim, 32, 51200)


def _phi3() -> dict:
    """Rotary frequencies for long texts are scaled by factors that are no part of a count."""
    factors = dict.fromkeys(("long_factor", "short_factor"), [1.0] * 48)
    return _plain("phi3", "Phi3ForCausalLM", 32, 3072, 8192, 32, 32064) | {
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "rope_scaling": {"type": "longrope", **factors},
        "sliding_window": 262144,
    }


def _gemma(layers: int, dim: int, inner: int, heads: int, keys: int) -> dict:
    more = {"num_key_value_heads": keys, "head_dim": 256}
    return _plain("gemma", "GemmaForCausalLM", layers, dim, inner, heads, 256000, **more)


def _bert(layers: int, dim: int, heads: int) -> dict:
    return _plain("bert", "BertForMaskedLM", layers, dim, 4 * dim, heads, 30522)


CONFIGS = {
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "Qwen/Qwen1.5-0.5B": _qwen(24, 1024, 2816, 16),
    "Qwen/Qwen1.5-1.8B": _qwen(24, 2048, 5504, 16),
    "Qwen/Qwen1.5-4B": _qwen(40, 2560, 6912, 20),
    "Qwen/Qwen1.5-7B": _qwen(32, 4096, 11008, 32),
    "Qwen/Qwen1.5-14B": _qwen(40, 5120, 13696, 40, 152064),
    "Qwen/Qwen2-7B": _qwen(28, 3584, 18944, 28, 152064, num_key_value_heads=4),
    "Qwen/Qwen2.5-7B": _qwen(28, 3584, 18944, 28, 152064, num_key_value_heads=4),
    "Qwen/Qwen2.5-Math-7B": _qwen(28, 3584, 18944, 28, 152064, num_key_value_heads=4),
    "allenai/OLMo-1B-hf": _plain("olmo", "OlmoForCausalLM", 16, 2048, 8192, 16, 50304),
    "allenai/OLMo-1.7-7B-hf": _plain("olmo", "OlmoForCausalLM", 32, 4096, 11008, 32, 50304),
    "microsoft/phi-1": _phi(24, 2048),
    "microsoft/phi-1_5": _phi(24, 2048),
    "microsoft/phi-2": _phi(32, 2560),
    "microsoft/Phi-3.5-mini-instruct": _phi3(),
    "google/gemma-2b": _gemma(18, 2048, 16384, 8, 1),
    "google/gemma-7b": _gemma(28, 3072, 24576, 16, 16),
    "meta-llama/Llama-2-7b-hf": _llama(32, 4096, 11008, 32),
    "meta-llama/Llama-2-13b-hf": _llama(40, 5120, 13824, 40),
    "meta-llama/Meta-Llama-3-8B": _llama(32, 4096, 14336, 32, 128256, num_key_value_heads=8),
    "meta-llama/Llama-3.1-8B-Instruct": _llama(32, 4096, 14336, 32, 128256, num_key_value_heads=8),
    "lmsys/vicuna-7b-v1.5": _llama(32, 4096, 11008, 32),
    "microsoft/Orca-2-7b": _llama(32, 4096, 11008, 32, 32003),
    "mistralai/Mistral-7B-v0.1": _mistral(),
    "mistralai/Mistral-7B-v0.3": _mistral(32768),
    "mistralai/Mistral-7B-Instruct-v0.1": _mistral(),
    "mistralai/Mistral-7B-Instruct-v0.2": _mistral(),
    "tiiuae/falcon-11B": {
        "model_type": "falcon",
        "architectures": ["FalconForCausalLM"],
        "num_hidden_layers": 60,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_kv_heads": 8,
        "new_decoder_architecture": True,
        "vocab_size": 65024,
    },
    "EleutherAI/gpt-neo-1.3B": {
        "model_type": "gpt_neo",
        "architectures": ["GPTNeoForCausalLM"],
        "num_layers": 24,
        "hidden_size": 2048,
        "num_heads": 16,
        "attention_types": [[["global", "local"], 12]],
        "vocab_size": 50257,
    },
    "state-spaces/mamba-370m-hf": {
        "model_type": "mamba",
        "architectures": ["MambaForCausalLM"],
        "num_hidden_layers": 48,
        "hidden_size": 1024,
        "vocab_size": 50280,
    },
    "bert-base-uncased": _bert(12, 768, 12),
    "bert-large-uncased": _bert(24, 1024, 16),
    "EleutherAI/pythia-14m": _pythia(6, 128, 4),
    "EleutherAI/pythia-70m": _pythia(6, 512, 8),
    "EleutherAI/pythia-160m": _pythia(12, 768, 12),
    "EleutherAI/pythia-410m": _pythia(24, 1024, 16),
    "EleutherAI/pythia-1b": _pythia(16, 2048, 8),
    "EleutherAI/pythia-1.4b": _pythia(24, 2048, 16),
    "EleutherAI/pythia-2.8b": _pythia(32, 2560, 32),
    "EleutherAI/pythia-6.9b": _pythia(32, 4096, 32, 50432),
    "EleutherAI/pythia-12b": _pythia(36, 5120, 40, 50688),
}
STORED_WHOLE = ("gpt2", "bert", "gpt_neo", "olmo")  # families that are stored in float32, others in half precision


@contextlib.contextmanager
def counted(data: Path) -> Iterator[list[Plan]]:
    """What is planned inside: against a Hub with configs alone, in a folder of its own; nothing is timed."""
    from lit_layers.cli import measuring

    plans: list[Plan] = []
    wikitext = SimpleNamespace(sha="abc", siblings=[])
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        hub, work = Path(folder, "hub"), Path(folder, "work")
        write_configs(hub, data / "tokenizers" / "gpt2")
        work.mkdir()
        for name in ("recipes", "checkpoints"):
            (work / name).symlink_to(ROOT / name)
        patch.setattr(Plan, "table", lambda plan: plans.append(plan))  # asked of each plan, to be shown
        patch.setattr(measuring, "show_table", lambda *_: None)
        patch.setattr(planning.Bench, "seconds", lambda *_: 0.0)
        patch.setattr(Plan, "refuse", lambda *_: None, raising=False)
        patch.setattr(LmEvalScorer, "requests", asked_once(LmEvalScorer.requests))
        files, load = wikitext_files(Path(folder, "wikitext")), datasets.load_dataset

        def of_wikitext(path: str, *config: str, **options: Any) -> Any:
            if path != "Salesforce/wikitext":
                return load(path, *config, **options)
            return load("parquet", data_files=files, split=options["split"], streaming=options["streaming"])

        patch.setattr(datasets, "load_dataset", of_wikitext)
        patch.setattr("huggingface_hub.HfApi.dataset_info", lambda *_, **__: wikitext)
        patch.setenv("LIT_LAYERS_BENCHMARKS", str(data))
        patch.setenv("LIT_LAYERS_CACHE", str(Path(folder, "cache")))
        patch.chdir(work)
        with served(hub, work / "home" / "hub", patch):
            yield plans


def asked_once(requests: Callable[[LmEvalScorer], list[Any]]) -> Callable[[LmEvalScorer], list[Any]]:
    """What the rows of a task ask of any model, made once: a dozen recipes ask the same."""
    known: dict[tuple, list[Any]] = {}

    def asked(scorer: LmEvalScorer) -> list[Any]:
        rows = None if scorer.rows is None else scorer.rows.content_hash()
        key = scorer.name, scorer.limit, scorer.max_new_tokens, rows
        if key not in known:
            known[key] = requests(scorer)
        return known[key]

    return asked


def write_configs(root: Path, tokenizer: Path) -> None:
    """Every repository with its config.json, a tokenizer, and weights that hold nothing; a branch for each step."""
    steps = sorted({step for path in recipe_paths() for step in read(path).sizes.get("steps", [])})
    for name, config in CONFIGS.items():
        branches = ["main", *(f"step{step}" for step in steps)] if "pythia" in name else ["main"]
        for branch in branches:
            folder = root / name / branch
            folder.mkdir(parents=True)
            (folder / "config.json").write_text(json.dumps(config))
            (folder / "model.safetensors").write_bytes(f"{name} {branch}".encode())
            for file in tokenizer.iterdir():
                (folder / file.name).write_bytes(file.read_bytes())


def plan_of(path: Path, data: Path, plans: list[Plan]) -> dict[str, float]:
    """Bytes of memory and disk, FLOP and hours of one recipe; of a training FLOP and hours alone."""
    recipe = read(path)
    plans.clear()
    steps = recipe.commands(Path(path.stem), path.parent, reduced=False)
    if path.stem in GRIDS:
        number, trained = GRIDS[path.stem]
        total = number * whole_flop(trained)
        return {"flop": total, "hours": total / RATES["float32"] / 3600}
    if total := sum(trained_flop(step) for step in steps):
        return {"flop": total, "hours": total / RATES["bfloat16"] / 3600}
    if any(step.verb == "select" for step in steps):
        plans += [plan for step in steps if step.verb == "select" for plan in selected(step, data)]
    else:
        for step in (step for step in steps if step.verb in PLANNED):
            file = Path(f"{path.stem}.yaml")  # `metrics` would read the texts of all tasks from the Hub
            file.write_text(yaml.safe_dump({name: value for name, value in step.options.items() if name != "metrics"}))
            assert main([*step.argv(file), "--plan"]) == 0, path
    memory, disk, flop = 0.0, 0.0, 0.0
    for plan in plans:
        assert not plan.unknown, (path, plan.unknown)
        memory = max(memory, plan.weights + plan.whole.device)
        disk += plan.whole.disk * plan.num_checkpoints
        flop += plan.num_checkpoints * sum(row.flop for row in plan.rows)
    disk = min(disk, 1e9 * recipe.sizes.get("cache_gb", float("inf")))  # of embeddings, the oldest give way
    rate = RATES["bfloat16" if "glue" in recipe.sizes else recipe.sizes.get("dtype", "float32")]
    return {"memory": memory, "disk": disk + downloads(recipe, plans), "flop": flop, "hours": flop / rate / 3600}


def whole_flop(recipe: str) -> float:
    return float(re.search(r"training ([\de.]+) FLOP", cost_of(recipe))[1])  # pyright: ignore[reportOptionalSubscript]


def trained_flop(step: Step) -> float:
    """Of a training; of another step none."""
    if step.verb == "fit":
        whole = whole_flop(step.configs[0])
        steps = yaml.safe_load((ROOT / step.configs[0]).read_text())["trainer"]["max_steps"]
        return whole * step.options["trainer"]["max_steps"] / steps
    return 0.0


def selected(step: Step, data: Path) -> Iterator[Plan]:
    """What `select` takes is what probes of its task do, on each model."""
    for name in [step.options["model"], *step.options.get("others", [])]:
        probe = Probe(
            task=step.options["task"],
            tokenizer=str(data / "tokenizers" / "gpt2"),
            folder=str(data),
            max_tokens=step.options["max_tokens"],
            random_labels=False,
        )
        yield planned(LayeredModel(outline(CONFIGS[name], name)), [probe], device=torch.device("cpu"))


def downloads(recipe: PaperRecipe, plans: list[Plan]) -> float:
    """Bytes of all checkpoints as they are stored; where they are removed once measured, of the largest few."""
    models = {(plan.model.model.config.model_type, bytes_of_model(plan.model)): plan.num_checkpoints for plan in plans}
    sizes = [
        size / (1 if kind in STORED_WHOLE else 2) for (kind, size), number in models.items() for _ in range(number)
    ]
    removed = "keep_downloads" in str(recipe.steps)
    return sum(sorted(sizes)[-AT_A_TIME:] if removed else sizes)


def whole(data: Path, folder: Path) -> Path:
    """Local data of which the benchmarks have as many rows as the published splits: copies stand for more."""
    linked(data, folder)
    with_arc_to_train_on(folder)
    (folder / "benchmarks").unlink()
    (folder / "benchmarks").mkdir()
    for file in (data / "benchmarks").iterdir():
        rows = pq.read_table(file).to_pylist() if file.suffix == ".parquet" else []
        if not (0 < len(rows) < (number := ROWS["benchmarks"].get(file.stem, 0))):
            (folder / "benchmarks" / file.name).symlink_to(file.resolve())
            continue
        named = "query" if "query" in rows[0] else "question"
        more = [{**rows[n % len(rows)], named: f"{rows[n % len(rows)][named]} {n}"} for n in range(number)]
        pq.write_table(pa.Table.from_pylist(more), folder / "benchmarks" / file.name)
        if file.stem == "arc_challenge_test":
            rows = more[: ROWS["benchmarks"]["arc_challenge_train"]]
            pq.write_table(pa.Table.from_pylist(rows), folder / "benchmarks" / "arc_challenge_train.parquet")
    return folder


def all_plans(data: Path) -> dict[str, dict[str, float]]:
    """By recipe, with three digits; of those that cannot be measured, and that take no model, nothing."""
    with tempfile.TemporaryDirectory() as folder, counted(whole(data, Path(folder))) as plans:
        found = {}
        for path in recipe_paths():
            recipe = read(path)
            if recipe.status != "cannot" and "data: published" not in path.read_text():
                plan = plan_of(path, Path(folder), plans)
                found[f"{recipe.paper}/{path.stem}"] = {name: float(f"{value:.3g}") for name, value in plan.items()}
                sys.stderr.write(f"{path.stem}: {plan}\n")
        return found


if __name__ == "__main__":
    PLANS.write_text(json.dumps(all_plans(Path(sys.argv[1]).resolve()), indent=1) + "\n")
