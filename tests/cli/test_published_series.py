"""Each documented command on published series and models runs: same names, families, recipes; tiny weights and data.

What the documentation asks for takes hours and hundreds of gigabytes. Here every size of a recipe is lowered to one
that a test can pay for (`LIMITS`), the series have a few of their steps (so that an audit finds gaps), the corpus
`wikitext` a dozen articles. Commands, recipes and all else are as they are written.
"""

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import yaml

from lit_layers import records
from lit_layers.cli.main import main
from lit_layers.data.tokenization import save_tokenizer, train_bpe
from lit_layers.series.opening import repositories_of
from tests.support.benchmark_files import write_benchmarks
from tests.support.documented_commands import documented_commands
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
# What the command would measure is measured by its shares here, and of each family in test_analyze_suite.
WHOLE_SUITE = "analyze --config recipes/series/llm_suite.yaml"


# Of several on one line the first, and no workers of Ray, who would ask the real Hub: see tests/test_engine.
COMMANDS = [
    re.sub(" & done; wait| --engine ray", "", command)
    for command in documented_commands()
    if command.startswith(("analyze", "audit", "report checkpoints/llm_suite")) and "RUN" not in command
]


def words(command: str) -> list[str]:
    """As one task of an array would have them."""
    task = {"$SLURM_ARRAY_TASK_ID": "3", "$SLURM_ARRAY_TASK_COUNT": "8", "$i": "3"}
    for name, value in task.items():
        command = command.replace(name, value)
    return shlex.split(command)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_bpe(TEXT, 280), folder)
    return folder


def model(folder: Path, family: str, tokenizer: Path, **options) -> Path:
    saved(folder, family, shard="1GB", vocab_size=300, **options)
    for file in tokenizer.iterdir():
        shutil.copy(file, folder)
    return folder


def pythia(folder: Path, tokenizer: Path) -> Path:
    return model(folder, "gpt_neox", tokenizer, max_position_embeddings=128)


@pytest.fixture(scope="module")
def published(tokenizer, tmp_path_factory) -> Path:
    """A folder of repositories, the one of the quick test's series first."""
    root = tmp_path_factory.mktemp("hub")
    make_series(pythia(root.parent / "pythia", tokenizer), root / "EleutherAI" / "pythia-70m", STEPS)
    return root


@pytest.fixture(scope="module")
def everything(published, tokenizer, tmp_path_factory) -> None:
    """All the others that the commands name."""
    template = pythia(tmp_path_factory.mktemp("gpt_neox") / "model", tokenizer)
    for number, size in enumerate(("1.4b", "6.9b"), start=1):  # among the models of the suite, where none is another's
        moved = {step: number / 200 + (1 + index) / 64 for index, step in enumerate(STEPS)}
        make_series(template, published / "EleutherAI" / f"pythia-{size}", STEPS, values=moved)
    for name in repositories_of(ROOT / "checkpoints" / "pythia.yaml"):
        if not (published / name).exists():
            (published / name).symlink_to(published / "EleutherAI" / "pythia-70m")
    olmo = model(tmp_path_factory.mktemp("olmo2") / "model", "olmo2", tokenizer)
    for name in ("OLMo-2-0425-1B", "OLMo-2-1124-7B"):
        make_series(olmo, published / "allenai" / name, STAGED, name="stage1-step{}-tokens1B")
    model(published / "meta-llama" / "Llama-3.1-70B" / "main", "llama", tokenizer)
    text = SUITE.read_text()
    for number, (name, family) in enumerate(re.findall(r"^ +- (\S+) +# (\w+) ", text, re.MULTILINE)):
        if not (published / name).exists():
            # coupling.yaml names the pair of blocks 5 and 6, and a fiftieth of the width
            options = {"n_layer": 6, "n_embd": 64} if family == "gpt2" else {}
            model(published / name / "main", family, tokenizer, seed=number, **options)
    for name, other in yaml.safe_load(text)["series"]["init_args"]["tokenizers"].items():
        (published / name / "main" / "tokenizer.json").unlink()
        shutil.copytree(tokenizer, published / other / "main", dirs_exist_ok=True)


@pytest.fixture(scope="module")
def place(published, tmp_path_factory) -> Iterator[Path]:
    """A working folder with the recipes, in a world that has this Hub and this WikiText."""
    import datasets
    import huggingface_hub

    folder = tmp_path_factory.mktemp("work")
    shutil.copytree(ROOT / "checkpoints", folder / "checkpoints")
    for recipe in RECIPES:
        text = re.sub(r"\bk: \[10, 30, 76\]", "k: [2, 4, 8]", recipe.read_text())
        for name, most in LIMITS.items():
            text = re.sub(rf"\b{name}: (\d+)", lambda m, n=name, most=most: f"{n}: {min(int(m[1]), most)}", text)
        path = folder / recipe.relative_to(ROOT)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    files, load = {}, datasets.load_dataset
    for split, part in (("train", TEXT[:2]), ("validation", TEXT[2:])):
        files[split] = str(folder / f"{split}.parquet")
        rows = [line for number, text in enumerate(part) for line in (f" = Article {number} = \n", f" {text} \n")]
        pd.DataFrame({"text": rows}).to_parquet(files[split])

    def wikitext(path, *, name, split, revision, streaming):
        assert (path, name, revision) == ("Salesforce/wikitext", "wikitext-103-raw-v1", "abc")
        return load("parquet", data_files=files, split=split, streaming=streaming)

    with pytest.MonkeyPatch.context() as patch, served(published, folder / "home" / "hub", patch):
        patch.setattr(datasets, "load_dataset", wikitext)
        patch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: SimpleNamespace(sha="abc", siblings=[]))
        patch.setenv("LIT_LAYERS_BENCHMARKS", str(write_benchmarks(folder / "benchmarks")))
        patch.chdir(folder)
        yield folder


def measured(root: Path) -> set[tuple[str, int | None, str]]:
    found = records.read(root / "measurements.jsonl")
    assert [m.error for m in found] == [None] * len(found)
    return {(m.run, m.step, m.analysis) for m in found}


@pytest.mark.soak
def test_the_published_series_is_measured_by_its_documented_command(place):
    assert main(words(QUICK)) == 0
    names = {"trajectory", "representation", "lens", "coupling", "next_token_probe"}
    found = measured(place / "checkpoints" / "pythia_70m")
    assert found == {("pythia_70m", step, name) for step in STEPS for name in names}


@pytest.mark.nightly
def test_every_documented_command_on_published_models_runs(everything, place, capsys):
    for command in COMMANDS:
        if command == WHOLE_SUITE or "--follow" in command:  # it waits for a training
            continue
        is_audit = command.startswith("audit")
        code = main([*words(command), *(["--json", "audit.json"] if is_audit else [])])
        let_downloads_end()
        said = capsys.readouterr()
        assert code == (1 if is_audit and "pythia" in command else 0), (command, said.err[-2000:], said.out[-2000:])
        if is_audit:
            found = json.loads(Path("audit.json").read_text())
            for audit in found if isinstance(found, list) else [found]:
                kinds = {finding["kind"] for finding in audit["findings"] if not finding["note"]}
                assert kinds == ({"gap"} if code else set()), (command, audit)
                assert audit["level"] == "listing"
    roots = {path.parent.name: measured(path.parent) for path in (place / "checkpoints").glob("*/measurements.jsonl")}
    assert {step for _, step, _ in roots["olmo2_1b"]} == {*STAGED}
    assert {step for _, step, _ in roots["pythia-6.9b"]} == {143000}
