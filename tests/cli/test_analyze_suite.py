"""`lit-layers analyze` on models of many families, each on the same prompts by its own tokenizer."""

import re
from pathlib import Path

import pytest
import torch
import yaml

from lit_layers import records
from lit_layers.analyses import Coupling, Trajectory
from lit_layers.cli.main import main
from lit_layers.data import BenchmarkPrompts
from lit_layers.data.tokenization import save_tokenizer, train_bpe
from lit_layers.series.checkpoint import Checkpoint
from tests.support.benchmark_files import write_benchmarks
from tests.support.measured_series import analyze as analyze_one
from tests.support.rounding import close_records
from tests.support.saved_models import saved
from tests.support.series_hub import let_downloads_end, served

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "series" / "llm_suite.yaml"
SUITE = ("gpt2", "gpt_neox", "gpt_neo", "llama", "mistral", "gemma", "phi", "qwen2", "olmo", "falcon", "mpt")
SIZE = {"num_prompts": 12, "max_tokens": 40}
WORDS = ["asks for number and one more, as each of the prompts says which benchmark it is from "] * 2  # what is read


@pytest.fixture(scope="module")
def repositories(tmp_path_factory) -> Path:
    """A tiny model of every family of the suite, each with a tokenizer of another size."""
    root = tmp_path_factory.mktemp("hub")
    for number, name in enumerate(SUITE):
        folder = root / "lab" / name / "main"
        saved(folder, name, shard="1GB", vocab_size=300, seed=number)
        save_tokenizer(train_bpe(WORDS, 280 + number), folder)
    config = root / "lab" / "mpt" / "main" / "config.json"  # as its makers spell it
    config.write_text(config.read_text().replace("MptForCausalLM", "MPTForCausalLM"))
    assert "MPTForCausalLM" in config.read_text()
    return root


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    return write_benchmarks(tmp_path_factory.mktemp("benchmarks"))


@pytest.fixture
def hub(repositories, tmp_path, monkeypatch):
    with served(repositories, tmp_path / "home" / "hub", monkeypatch) as hub:
        yield hub


@pytest.fixture
def suite(tmp_path, prompts):
    """Makes the command for some models."""

    def command(*models: str, **options) -> list[str]:
        text = {"tokenizer": "${tokenizer}", "folder": str(prompts), **SIZE}
        batches = {"class_path": "lit_layers.data.BenchmarkPrompts", "init_args": text}
        recipe = {
            "series": {
                "class_path": "lit_layers.series.Models",
                "init_args": {"name": "suite", "models": list(models), **options},
            },
            "root": str(tmp_path / "out"),
            "analyses": [
                {"class_path": "lit_layers.analyses.Trajectory", "init_args": {"batches": batches}},
                {
                    "class_path": "lit_layers.analyses.Coupling",
                    "init_args": {"batches": batches, "k": [0.1], "num_prompts": 2},
                },
            ],
        }
        (tmp_path / "suite.yaml").write_text(yaml.safe_dump(recipe))
        return ["analyze", "--config", str(tmp_path / "suite.yaml"), "--device", "cpu"]

    return command


def save_t5(folder: Path) -> None:
    """A model of an encoder and a decoder, with a tokenizer."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 300, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2}
    T5ForConditionalGeneration(T5Config(**sizes)).save_pretrained(folder)
    save_tokenizer(train_bpe(["strange text"], 257), folder)


def measured(root: Path) -> list[tuple[str, str]]:
    found = records.read(root / "measurements.jsonl")
    assert all(m.error is None for m in found), [m.error for m in found]
    return [(m.run, m.analysis) for m in found]


@pytest.mark.soak
def test_models_of_every_family_are_measured_interrupted_continued_and_compared(
    hub, repositories, prompts, suite, tmp_path, capsys, monkeypatch
):
    models = [f"lab/{name}" for name in SUITE]
    command = suite(*models)
    loads = []
    real = Checkpoint.load

    def interrupted(self, **options):
        loads.append(self.name)
        if len(loads) == 3:
            raise KeyboardInterrupt
        return real(self, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "load", interrupted)
        assert main(command) == 130
    let_downloads_end()
    both = ("trajectory", "coupling")
    assert measured(tmp_path / "out") == [(model, name) for model in models[:2] for name in both]
    for shard, new, known in (("1/2", 8, 2), ("0/2", 10, 2)):
        assert main([*command, "--shard", shard]) == 0
        assert f"{new} measured, {known} were known" in capsys.readouterr().out
    found = measured(tmp_path / "out")
    assert sorted(found) == sorted((model, name) for model in models for name in both), "each once"

    found = {(m.run, m.analysis): m for m in records.read(tmp_path / "out" / "measurements.jsonl")}
    for name in ("gpt2", "falcon", "mpt"):  # as a model alone in its folder is
        folder = repositories / "lab" / name / "main"
        batches = BenchmarkPrompts(str(folder), folder=str(prompts), **SIZE)
        these = [Trajectory(batches=batches), Coupling(batches=batches, k=(0.1,), num_prompts=2)]
        for alone in analyze_one(folder, these, root=tmp_path / "alone" / name, device="cpu"):
            close_records(alone.records, found[f"lab/{name}", alone.analysis].records)
            assert alone.provenance["data_hash"] == found[f"lab/{name}", alone.analysis].provenance["data_hash"]
    assert len({m.provenance["tokenizer_hash"] for m in found.values()}) == len(SUITE)
    assert len({m.provenance["data_hash"] for m in found.values() if m.analysis == "trajectory"}) > 1

    assert main(["report", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "report.html").read_text()
    assert all(re.search(rf"\b{name}\b", page) for name in SUITE)


@pytest.mark.soak
def test_what_cannot_be_had_is_named_and_the_others_are_measured(hub, repositories, suite, tmp_path, capsys):
    lab = repositories / "lab"
    for number, name in enumerate(("untold", "broken")):
        saved(lab / name / "main", "gpt2", shard="1GB", vocab_size=300, seed=100 + number)
    (lab / "broken" / "main" / "tokenizer.json").write_text("{")
    save_t5(lab / "strange" / "main")
    hub.fail(r"lab/refused", 403, times=100)
    hub.fail(r"lab/olmo/resolve/.*tokenizer", 404, times=100)
    models = ["nobody/nothing", "lab/refused", "lab/untold", "lab/broken", "lab/strange", "lab/olmo", "lab/phi@v9"]
    assert main(suite(*models, "lab/gpt2", "lab/phi")) == 1
    assert {run for run, _ in measured(tmp_path / "out")} == {"lab/gpt2", "lab/phi"}
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("failed: ")]
    assert len(said) == len(models)
    for parts in (
        ("cannot list the branches of nobody/nothing", "check the name"),
        ("cannot list the branches of lab/refused", "access is refused", "log in with `hf auth login`"),
        ("tokenizer: lab/untold carries none; name one with --tokenizer",),
        ("lab/broken: ", "is no fast tokenizer of the `tokenizers` library"),
        ("lab/strange: no layered view of T5ForConditionalGeneration", "an encoder and a decoder"),
        ("the tokenizer 'lab/olmo@", "cannot be had from the Hub"),
        ("models: lab/phi has no branch v9",),
    ):
        assert [line for line in said if all(part in line for part in parts)], parts
    assert main(suite("lab/untold", "lab/gpt2", tokenizers={"lab/untold": "lab/gpt2"})) == 0
    assert {run for run, _ in measured(tmp_path / "out")} == {"lab/gpt2", "lab/phi", "lab/untold"}


def test_a_model_that_the_options_or_the_memory_do_not_fit_is_named(suite, tmp_path, capsys, monkeypatch):
    for name, width in (("narrow", 16), ("large", 32), ("good", 32)):
        saved(tmp_path / name, "gpt2", vocab_size=300, n_embd=width, seed=len(name))
        save_tokenizer(train_bpe(WORDS, 290), tmp_path / name)
    real = Checkpoint.load

    def load(self, **options):
        if self.name.endswith("large"):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, **options)

    monkeypatch.setattr(Checkpoint, "load", load)
    command = suite(*(str(tmp_path / name) for name in ("narrow", "large", "good")))
    recipe = tmp_path / "suite.yaml"
    recipe.write_text(recipe.read_text().replace("- 0.1", "- 20"))
    assert main(command) == 1
    assert {Path(run).name for run, _ in measured(tmp_path / "out")} == {"good"}
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("failed: ")]
    assert "narrow: coupling: " in said[0]
    assert "the model is 16 wide" in said[0]
    assert said[1].endswith("large does not fit in the memory of cpu")
    assert len(said) == 2


def test_a_gated_model_is_named_and_one_is_told_to_log_in(hub, repositories, suite, tmp_path, capsys, monkeypatch):
    hub.set_token("hf_secret")
    command = suite("lab/llama", str(repositories / "lab" / "gpt2" / "main"))
    assert main(command) == 1
    (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("failed: ")]
    assert "lab/llama" in said
    assert said.endswith("access is refused: ask for it on the repository's page, then log in with `hf auth login` or "
                         "set HF_TOKEN")  # fmt: skip
    assert main(["analyze", "lab/llama", "--root", str(tmp_path / "one")]) == 2
    assert "access is refused: ask for it on the repository's page" in capsys.readouterr().err
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert main(command) == 0
