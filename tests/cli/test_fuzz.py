"""Random bad input to the commands: one sentence or a result, never a traceback, a hang, or harm.

LIT_LAYERS_SEED chooses other cases, and LIT_LAYERS_CASES how many; a failing one is named by its seed and number.
"""

import json
import math
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas
import pytest
import yaml

from lit_layers import records
from tests.cli.test_fit import RECIPE
from tests.support.fuzzing import Outcome, damaged, mutated, run_limited, with_other_columns
from tests.support.labelled_texts import labelled, saved_gpt2, write_banking77, write_csv
from tests.support.runs import make_run

SEED = int(os.environ.get("LIT_LAYERS_SEED", "20261122"))
CASES = int(os.environ.get("LIT_LAYERS_CASES", "440"))
RUN_FILES = ("measurements.jsonl", "metrics.jsonl", "run.json")


@dataclass(frozen=True)
class Home:
    """Valid inputs, of which each case damages a copy of one."""

    root: Path
    corpus: Path


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Home:
    import lightning  # noqa: F401  imported once, before the forks
    import torch._dynamo  # noqa: F401

    root = tmp_path_factory.mktemp("fuzz")
    make_run(root / "run", steps=(0, 1, 2), layers=2)
    saved_gpt2(root / "model")
    write_csv(root / "songs.csv", labelled(40))
    write_banking77(root / "tasks", labelled(60), labelled(20, first=60))
    for step in (0, 1):
        shutil.copytree(root / "model", root / "series" / f"step-{step:09d}")
    (root / "series" / "run.json").write_text((root / "run" / "run.json").read_text())
    rows = [f"model{n},{n % 3},{0.1 * n},{0.2 * n + n % 2}" for n in range(8)]
    (root / "models.csv").write_text("\n".join(["model,family,coupling,score", *rows]) + "\n")
    manifest = {"repositories": [{"names": "org/a-{b,c}", "grammar": "step", "steps": "pythia", "last_step": 4}]}
    (root / "manifest.yaml").write_text(yaml.safe_dump(manifest))
    measured = {"corpus": str(root / "long.jsonl"), "analyses": json.loads(json.dumps(RECIPE["analyses"][:1]))}
    (root / "analyses.yaml").write_text(yaml.safe_dump(measured))
    scores = [{"step": n, "value": 0.1 * n**0.5, "metric": name} for name in ("a", "b") for n in range(7)]
    (root / "scores.jsonl").write_text("".join(json.dumps(row) + "\n" for row in scores))
    pandas.DataFrame(scores).to_csv(root / "scores.csv", index=False)
    pandas.DataFrame(scores).to_parquet(root / "scores.parquet")
    (root / "long.jsonl").write_text(
        "".join(json.dumps({"text": f"Text number {n}. " * 20}) + "\n" for n in range(600))
    )
    (root / "text.txt").write_text("One line.\nAnother one, of more words.\n" * 60)
    (root / "text.jsonl").write_text("".join(json.dumps({"text": f"Text number {n}."}) + "\n" for n in range(60)))
    return Home(root, corpus)


Result = tuple[list[str], Outcome]


def watched(home: Home) -> list[str]:
    """Options of `analyze --follow`: without patience it would wait for more, as it should."""
    return ["--follow", "--patience=0", "--root=out", f"--config={home.root / 'analyses.yaml'}"]


def recipe(home: Home, folder: Path, chance: random.Random) -> Result:
    """`fit` with a recipe of which a value, its place, or a byte is wrong."""
    content = json.loads(json.dumps({**RECIPE, "corpus": str(home.corpus), "root": "out"}))
    text = yaml.safe_dump(mutated(content, chance) if chance.random() < 0.85 else content, allow_unicode=True).encode()
    (folder / "recipe.yaml").write_bytes(damaged(text, chance) if chance.random() < 0.15 else text)
    argv = ["fit", "--config", "recipe.yaml"]
    return argv, run_limited(argv, folder)


def analyses(home: Home, folder: Path, chance: random.Random) -> Result:
    """`analyze` with a recipe of analyses that is wrong."""
    content = {"corpus": str(home.corpus), "analyses": json.loads(json.dumps(RECIPE["analyses"]))}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(mutated(content, chance), allow_unicode=True))
    argv = ["analyze", str(home.root / "model"), "--config", "recipe.yaml", "--root", "out"]
    return argv, run_limited(argv, folder)


def run_files(home: Home, folder: Path, chance: random.Random) -> Result:
    """A reader of a run of whose files one is damaged."""
    shutil.copytree(home.root / "run", folder / "run")
    file = folder / "run" / chance.choice(RUN_FILES)
    if file.name != "run.json" and chance.random() < 0.7:
        lines = file.read_text().splitlines()
        place = chance.randrange(len(lines))
        lines[place] = json.dumps(mutated(json.loads(lines[place]), chance))
        file.write_text("\n".join(lines) + "\n")
    else:
        file.write_bytes(damaged(file.read_bytes(), chance))
    argv = chance.choice(
        [
            ["report", "run"],
            ["report", "run", "--export", "all.csv"],
            ["correlate", "run", "--metric", "coupling", "--score", "validation/loss", "--root", "out"],
            ["analyze", str(home.root / "model"), "--root", "run"],
        ]
    )
    return argv, run_limited(argv, folder)


def files(home: Home, folder: Path, chance: random.Random) -> Result:
    """A reader of a damaged file that is no run's: text, tables, manifests, models, prepared data."""
    settings = watched(home)
    name, argv = chance.choice(
        [
            ("text.txt", ["prepare", "--source", "text.txt", "--tokenizer", "bpe:300", "--root", "out"]),
            ("text.jsonl", ["prepare", "--source", "text.jsonl", "--tokenizer", "bpe:300", "--root", "out"]),
            ("songs.csv", ["select", str(home.root / "model"), "--task", "songs.csv", "--root", "out"]),
            ("models.csv", ["correlate", "models.csv", "--metric", "coupling", "--score", "score", "--root", "out"]),
            ("manifest.yaml", ["audit", "manifest.yaml"]),
            ("model/config.json", ["analyze", "model", "--root", "out"]),
            ("model/tokenizer.json", ["analyze", "model", "--root", "out"]),
            ("model/model.safetensors", ["analyze", "model", "--root", "out", "--corpus", str(home.corpus)]),
            ("series/run.json", ["audit", "series"]),
            ("shards/meta.json", ["analyze", str(home.root / "model"), "--corpus", "shards", "--root", "out"]),
            ("scores.csv", ["emerge", "scores.csv", "--root", "out"]),
            ("scores.jsonl", ["emerge", "scores.jsonl", "--root", "out"]),
            ("scores.parquet", ["emerge", "scores.parquet", "--root", "out"]),
            ("series/step-000000001/config.json", ["analyze", "series", *settings]),
            ("series/step-000000001/model.safetensors", ["analyze", "series", *settings]),
            ("series/step-000000000/tokenizer.json", ["analyze", "series", *settings]),
            (
                "tasks",
                ["select", str(home.root / "model"), "--task=banking77", "--folder=tasks", "--root=out"],
            ),
        ]
    )
    source = home.corpus if name.startswith("shards") else home.root / name.split("/")[0]
    copy = folder / name.split("/")[0]
    shutil.copytree(source, copy) if source.is_dir() else shutil.copyfile(source, copy)
    file = folder / name
    if file.is_dir():
        file = chance.choice(sorted(path for path in file.rglob("*") if path.is_file()))
    is_nested = file.suffix in (".json", ".yaml")
    if is_nested and chance.random() < 0.7:
        content = mutated(
            json.loads(file.read_text()) if file.suffix == ".json" else yaml.safe_load(file.read_text()), chance
        )
        file.write_text(json.dumps(content) if file.suffix == ".json" else yaml.safe_dump(content, allow_unicode=True))
    elif file.suffix == ".parquet" and chance.random() < 0.6:
        with_other_columns(file, chance)
    else:
        file.write_bytes(damaged(file.read_bytes(), chance))
    return argv, run_limited(argv, folder)


KINDS: dict[Callable[[Home, Path, random.Random], Result], float] = {
    recipe: 0.35,
    analyses: 0.1,
    run_files: 0.3,
    files: 0.25,
}


def losses_in(root: Path) -> list[float]:
    return [row["train/loss"] for row in records.rows(root / "metrics.jsonl") if "train/loss" in row]


def losses_at_a_tenth(folder: Path, argv: list[str]) -> list[float]:
    """The same recipe at a tenth of its learning rate; nothing where there is no such run."""
    if not (folder / "out" / "run.json").exists():
        return []
    rate = json.loads((folder / "out" / "run.json").read_text())["config"]["model"]["init_args"]["lr"]
    run_limited([*argv, "--root", "slower", "--model.lr", str(rate / 10)], folder)
    return losses_in(folder / "slower")


def harm(folder: Path, before: set[str], argv: list[str]) -> str | None:
    """What an accepted case did that nobody can have wanted."""
    named = {Path(word.partition("=")[2] or word).parts[0] for word in argv if word}  # asked for by name
    expected = named | {
        *(f"{name}.html" for name in named if argv[0] == "report"),
        "out",
        "run",
        "page.html",
        "all.csv",
        "model",
        "series",
        "shards",
        "tasks",
    }
    if strange := {path.name for path in folder.iterdir()} - before - expected:
        return f"it wrote {sorted(strange)} beside its folder"
    if argv[0] == "fit":
        losses = losses_in(folder / "out")
        if not losses:
            return "it trained nothing"
        if not all(map(math.isfinite, losses)):
            return f"its loss is not finite: {losses}"
        # Batches of 64 tokens differ by tenths, and the first steps of AdamW without clipping go up by one. A rate that
        # is too high for a wider model is the user's choice: a tenth of it goes up less.
        if losses[-1] > losses[0] + 1.5:
            slower = losses_at_a_tenth(folder, argv)
            if not slower or slower[-1] - slower[0] > (losses[-1] - losses[0]) / 2:
                return f"it trained uphill: {losses}, and at a tenth of the rate {slower}"
    return None


def troubles(home: Home, scratch: Path, numbers: range) -> list[str]:
    """What went wrong in these cases, each in a folder of its own that is removed if nothing did."""
    found = []
    for number in numbers:
        chance = random.Random(f"{SEED}/{number}")
        (kind,) = chance.choices(list(KINDS), list(KINDS.values()))
        folder = scratch / str(number)
        folder.mkdir()
        argv, outcome = kind(home, folder, chance)
        given = {"recipe.yaml", "text.txt", "text.jsonl", "songs.csv", "models.csv", "manifest.yaml"}
        given |= {"scores.csv", "scores.jsonl", "scores.parquet"}
        trouble = outcome.trouble or (harm(folder, given, argv) if outcome.code == 0 else None)
        if trouble is None:
            shutil.rmtree(folder)
            continue
        found.append(f"seed {SEED}, case {number} ({kind.__name__}): {trouble}: {' '.join(argv)[:300]} in {folder}")
        found += [f"    {line}" for line in outcome.said.strip().splitlines()[-8:]]
    return found


@pytest.mark.slow
def test_the_harness_sees_an_exception_a_hang_and_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def trouble(behaves: Callable[[], int]) -> str | None:
        monkeypatch.setattr("lit_layers.cli.main.main", lambda argv: behaves())
        return run_limited(["report"], tmp_path).trouble

    def endless() -> int:
        while True:
            pass

    monkeypatch.setattr("tests.support.fuzzing.CPU_SECONDS", 1)
    assert trouble(lambda: {}["missing"]) == "it ends with 99"
    assert trouble(endless) == "it hangs"
    assert trouble(lambda: 2) == "it is refused without a sentence"
    assert trouble(lambda: 0) is None
    (tmp_path / "out").mkdir()
    rows = [{"step": step, "train/loss": 2.0 * step} for step in (1, 2)]
    (tmp_path / "out" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert harm(tmp_path, set(), ["fit"]) == "it trained uphill: [2.0, 4.0], and at a tenth of the rate []"
    (tmp_path / "strange").mkdir()
    assert harm(tmp_path, set(), ["report"]) == "it wrote ['strange'] beside its folder"


@pytest.mark.nightly
@pytest.mark.timeout(0)
def test_random_bad_input_ends_in_a_sentence_or_a_sound_result(home: Home, tmp_path: Path) -> None:
    found = troubles(home, tmp_path, range(CASES))
    assert not found, "\n".join([f"{len(found)} lines about {CASES} cases", *found])
