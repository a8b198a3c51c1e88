"""Each documented command on published series and models: same names, families and recipes, tiny weights and data.

The documented commands take hours and hundreds of gigabytes. Here every size in a recipe has an upper limit (`LIMITS`),
a series has only a few of its steps (so that an audit finds gaps), and the corpus `wikitext` has a dozen articles.
Commands, recipes and everything else are unchanged.
"""

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
import yaml

from lit_layers import records
from lit_layers.cli.main import main
from lit_layers.data.tokenization import save_tokenizer, train_bpe
from lit_layers.series.opening import repositories_of
from tests.support.benchmark_files import write_benchmarks
from tests.support.documented_commands import documented_commands
from tests.support.papers_world import replace_wikitext
from tests.support.saved_models import saved
from tests.support.series_hub import let_downloads_end, make_series, served

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
SUITE = ROOT / "recipes" / "series" / "llm_suite.yaml"
STEPS = (0, 512, 1000, 143000)
STAGED = (0, 10000, 20000, 40000)
LIMITS = {"num_sequences": 8, "min_sequences": 6, "num_prompts": 6, "num_inputs": 4}
LIMITS |= {"num_tokens": 24, "num_classes": 3, "max_tokens": 12}
TEXT = [f"Article {n} counts {' '.join(str(n * k) for k in range(90))}." for n in range(22)]
QUICK = "analyze --config recipes/series/pythia_70m.yaml --config recipes/analyses/text.yaml"
# The suite is measured by its shards here, and test_analyze_suite measures each family.
WHOLE_SUITE = "analyze --config recipes/series/llm_suite.yaml"


# If several commands are on one line, only the first is run. Workers of Ray are left out, because they would ask the
# real Hub (see tests/test_engine).
COMMANDS = [
    re.sub(" & done; wait| --engine ray", "", command)
    for command in documented_commands()
    if command.startswith(("analyze", "audit", "report checkpoints/llm_suite")) and "RUN" not in command
]


def split_words(command: str) -> list[str]:
    """Split a command into words, as one task of an array job would see them."""
    task = {"$SLURM_ARRAY_TASK_ID": "3", "$SLURM_ARRAY_TASK_COUNT": "8", "$i": "3"}
    for name, value in task.items():
        command = command.replace(name, value)
    return shlex.split(command)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_bpe(TEXT, 280), folder)
    return folder


def save_model(folder: Path, family: str, tokenizer: Path, **options) -> Path:
    saved(folder, family, shard="1GB", vocab_size=300, **options)
    for file in tokenizer.iterdir():
        shutil.copy(file, folder)
    return folder


def save_pythia(folder: Path, tokenizer: Path) -> Path:
    return save_model(folder, "gpt_neox", tokenizer, max_position_embeddings=128)


@pytest.fixture(scope="module")
def published(tokenizer, tmp_path_factory) -> Path:
    """A folder of repositories. It begins with the series of the quick test."""
    root = tmp_path_factory.mktemp("hub")
    make_series(save_pythia(root.parent / "pythia", tokenizer), root / "EleutherAI" / "pythia-70m", STEPS)
    return root


@pytest.fixture(scope="module")
def everything(published, tokenizer, tmp_path_factory) -> None:
    """Add all other repositories that the commands name."""
    template = save_pythia(tmp_path_factory.mktemp("gpt_neox") / "model", tokenizer)
    for number, size in enumerate(("1.4b", "6.9b"), start=1):  # models of the suite, whose weights must differ
        moved = {step: number / 200 + (1 + index) / 64 for index, step in enumerate(STEPS)}
        make_series(template, published / "EleutherAI" / f"pythia-{size}", STEPS, values=moved)
    for name in repositories_of(ROOT / "checkpoints" / "pythia.yaml"):
        if not (published / name).exists():
            (published / name).symlink_to(published / "EleutherAI" / "pythia-70m")
    olmo = save_model(tmp_path_factory.mktemp("olmo2") / "model", "olmo2", tokenizer)
    for name in ("OLMo-2-0425-1B", "OLMo-2-1124-7B"):
        make_series(olmo, published / "allenai" / name, STAGED, name="stage1-step{}-tokens1B")
    save_model(published / "meta-llama" / "Llama-3.1-70B" / "main", "llama", tokenizer)
    text = SUITE.read_text()
    for number, (name, family) in enumerate(re.findall(r"^ +- (\S+) +# (\w+) ", text, re.MULTILINE)):
        if not (published / name).exists():
            # coupling.yaml needs blocks 5 and 6, and k as a fiftieth of the width.
            options = {"n_layer": 6, "n_embd": 64} if family == "gpt2" else {}
            save_model(published / name / "main", family, tokenizer, seed=number, **options)
    for name, other in yaml.safe_load(text)["series"]["init_args"]["tokenizers"].items():
        (published / name / "main" / "tokenizer.json").unlink()
        shutil.copytree(tokenizer, published / other / "main", dirs_exist_ok=True)


@pytest.fixture(scope="module")
def workdir(published, tmp_path_factory) -> Iterator[Path]:
    """A working directory with the recipes, the stand-in Hub and WikiText."""
    folder = tmp_path_factory.mktemp("work")
    shutil.copytree(ROOT / "checkpoints", folder / "checkpoints")
    for recipe in RECIPES:
        text = re.sub(r"\bk: \[10, 30, 76\]", "k: [2, 4, 8]", recipe.read_text())
        for name, most in LIMITS.items():
            text = re.sub(rf"\b{name}: (\d+)", lambda m, n=name, most=most: f"{n}: {min(int(m[1]), most)}", text)
        path = folder / recipe.relative_to(ROOT)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    files = {}
    for split, texts in (("train", TEXT[:2]), ("validation", TEXT[2:])):
        files[split] = str(folder / f"{split}.parquet")
        rows = [line for number, text in enumerate(texts) for line in (f" = Article {number} = \n", f" {text} \n")]
        pd.DataFrame({"text": rows}).to_parquet(files[split])
    with pytest.MonkeyPatch.context() as patch, served(published, folder / "home" / "hub", patch):
        replace_wikitext(patch, files)
        patch.setenv("LIT_LAYERS_BENCHMARKS", str(write_benchmarks(folder / "benchmarks")))
        patch.chdir(folder)
        yield folder


def measured(root: Path) -> set[tuple[str, int | None, str]]:
    found = records.read(root / "measurements.jsonl")
    assert [m.error for m in found] == [None] * len(found)
    return {(m.run, m.step, m.analysis) for m in found}


@pytest.mark.soak
def test_the_published_series_is_measured_by_its_documented_command(workdir):
    assert main(split_words(QUICK)) == 0
    names = {"trajectory", "representation", "lens", "coupling", "next_token_probe"}
    found = measured(workdir / "checkpoints" / "pythia_70m")
    assert found == {("pythia_70m", step, name) for step in STEPS for name in names}


@pytest.mark.nightly
def test_every_documented_command_on_published_models_runs(everything, workdir, capsys):
    for command in COMMANDS:
        if command == WHOLE_SUITE or "--follow" in command:  # waits for a training
            continue
        is_audit = command.startswith("audit")
        code = main([*split_words(command), *(["--json", "audit.json"] if is_audit else [])])
        let_downloads_end()
        output = capsys.readouterr()
        assert code == (1 if is_audit and "pythia" in command else 0), (command, output.err[-2000:], output.out[-2000:])
        if is_audit:
            found = json.loads(Path("audit.json").read_text())
            for audit in found if isinstance(found, list) else [found]:
                kinds = {finding["kind"] for finding in audit["findings"] if not finding["note"]}
                assert kinds == ({"gap"} if code else set()), (command, audit)
                assert audit["level"] == "listing"
    roots = {path.parent.name: measured(path.parent) for path in (workdir / "checkpoints").glob("*/measurements.jsonl")}
    assert {step for _, step, _ in roots["olmo2_1b"]} == {*STAGED}
    assert {step for _, step, _ in roots["pythia-6.9b"]} == {143000}
