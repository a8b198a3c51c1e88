"""`lit-layers analyze` on several models, some of which are unavailable."""

from pathlib import Path

import pytest
import torch
import yaml

from lit_layers import records
from lit_layers.cli.main import main
from lit_layers.data.tokenization import save_tokenizer, train_bpe
from lit_layers.series.checkpoint import Checkpoint
from tests.support.benchmark_files import write_benchmarks
from tests.support.saved_models import saved
from tests.support.series_hub import served

SIZE = {"num_prompts": 12, "max_tokens": 40}
WORDS = ["asks for number and one more, as each of the prompts says which benchmark it is from "] * 2  # their text


@pytest.fixture(scope="module")
def repositories(tmp_path_factory) -> Path:
    """Tiny models of several families, each with a tokenizer of another size."""
    root = tmp_path_factory.mktemp("hub")
    for number, name in enumerate(("gpt2", "llama", "phi", "olmo")):
        folder = root / "lab" / name / "main"
        saved(folder, name, shard="1GB", vocab_size=300, seed=number)
        save_tokenizer(train_bpe(WORDS, 280 + number), folder)
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
    """A function that writes a recipe for the named models and returns its command."""

    def command(*models: str, **options) -> list[str]:
        text = {"tokenizer": "${tokenizer}", "folder": str(prompts), **SIZE}
        batches = {"class_path": "lit_layers.data.BenchmarkPrompts", "init_args": text}
        series = {"name": "suite", "models": list(models), **options}
        coupling = {"batches": batches, "k": [0.1], "num_prompts": 2}
        recipe = {
            "series": {"class_path": "lit_layers.series.Models", "init_args": series},
            "root": str(tmp_path / "out"),
            "analyses": [
                {"class_path": "lit_layers.analyses.Trajectory", "init_args": {"batches": batches}},
                {"class_path": "lit_layers.analyses.Coupling", "init_args": coupling},
            ],
        }
        (tmp_path / "suite.yaml").write_text(yaml.safe_dump(recipe))
        return ["analyze", "--config", str(tmp_path / "suite.yaml"), "--device", "cpu"]

    return command


def save_t5(folder: Path) -> None:
    """Save a model with an encoder and a decoder, and a tokenizer."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 300, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2}
    T5ForConditionalGeneration(T5Config(**sizes)).save_pretrained(folder)
    save_tokenizer(train_bpe(["strange text"], 257), folder)


def measured(root: Path) -> list[tuple[str, str]]:
    found = records.read(root / "measurements.jsonl")
    assert all(m.error is None for m in found), [m.error for m in found]
    return [(m.run, m.analysis) for m in found]


@pytest.mark.soak
def test_unavailable_models_are_reported_and_the_others_are_measured(
    hub, repositories, suite, tmp_path, capsys, monkeypatch
):
    lab = repositories / "lab"
    for number, name in enumerate(("untold", "broken", "large")):
        saved(lab / name / "main", "gpt2", shard="1GB", vocab_size=300, seed=100 + number)
    (lab / "broken" / "main" / "tokenizer.json").write_text("{")
    save_tokenizer(train_bpe(WORDS, 290), lab / "large" / "main")
    save_t5(lab / "strange" / "main")
    real = Checkpoint.load

    def load(self, **options):
        if "large" in self.name:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, **options)

    monkeypatch.setattr(Checkpoint, "load", load)
    hub.fail(r"lab/refused", 403, times=100)
    hub.fail(r"lab/olmo/resolve/.*tokenizer", 404, times=100)
    models = [
        "nobody/nothing",
        "lab/refused",
        "lab/untold",
        "lab/broken",
        "lab/strange",
        "lab/large",
        "lab/olmo",
        "lab/phi@v9",
    ]
    assert main(suite(*models, "lab/gpt2", "lab/phi")) == 1
    assert {run for run, _ in measured(tmp_path / "out")} == {"lab/gpt2", "lab/phi"}
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("failed: ")]
    assert len(errors) == len(models)
    for parts in (
        ("cannot list the branches of nobody/nothing", "check the name"),
        ("cannot list the branches of lab/refused", "access is refused", "log in with `hf auth login` or set HF_TOKEN"),
        ("tokenizer: lab/untold carries none; name one with --tokenizer",),
        ("lab/broken: ", "is no fast tokenizer of the `tokenizers` library"),
        ("lab/strange: no layered view of T5ForConditionalGeneration", "an encoder and a decoder"),
        ("lab/large", "does not fit in the memory of cpu"),
        ("the tokenizer 'lab/olmo@", "cannot be had from the Hub"),
        ("models: lab/phi has no branch v9",),
    ):
        assert [line for line in errors if all(part in line for part in parts)], parts
    assert main(suite("lab/untold", "lab/gpt2", tokenizers={"lab/untold": "lab/gpt2"})) == 0
    assert {run for run, _ in measured(tmp_path / "out")} == {"lab/gpt2", "lab/phi", "lab/untold"}
