"""Random bad input to the commands ends in one sentence or a result, never in a traceback, a hang or damage.

LIT_LAYERS_SEED selects other cases, and LIT_LAYERS_CASES their number. A failing case is reported with its seed and
number.
"""

import importlib
import json
import math
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pandas
import pytest
import yaml

from lit_layers import records
from lit_layers.cli.command_line import COMMANDS
from lit_layers.cli.options import parser_of
from tests.cli.test_fit import RECIPE
from tests.support.fuzzing import WRONG_VALUES, damaged, mutated, run_limited
from tests.support.labelled_texts import labelled, saved_gpt2, write_banking77, write_csv
from tests.support.runs import make_run

SEED = int(os.environ.get("LIT_LAYERS_SEED", "20261122"))
CASES = int(os.environ.get("LIT_LAYERS_CASES", "440"))
POINTS = Path(__file__).parents[2] / "recipes" / "papers" / "coupling" / "fig1a_points.yaml"
RUN_FILES = ["run/measurements.jsonl", "run/metrics.jsonl", "run/run.json"]
MODEL_FILES = ["model/config.json", "model/tokenizer.json", "model/model.safetensors"]
FOLLOWED = ["series/step-000000001/config.json", "series/step-000000001/model.safetensors"]
# Commands that succeed, with the files that they read. A case damages one of these files.
READS = {
    "fit --config recipe.yaml --root out": [*["recipe.yaml"] * 12, "shards/meta.json"],
    # With patience it would correctly wait for more checkpoints.
    "analyze series --config analyses.yaml --root out --follow --patience 0": FOLLOWED,
    "analyze model --config analyses.yaml --root out": [*["analyses.yaml"] * 4, *MODEL_FILES],
    "report run --export all.csv": RUN_FILES * 2,
    "correlate run --metric coupling --score validation/loss --root out": RUN_FILES,
    "correlate models.csv --metric coupling --score score --root out --resamples 100": ["models.csv"],
    "prepare --source text.txt --tokenizer bpe:270 --separator END --root out": ["text.txt"],
    "select model --task banking77 --folder tasks --root out --rounds 1": ["tasks/banking77/train.parquet"],
    "select model --task songs.csv --root out --rounds 1": ["songs.csv"],
    "audit manifest.yaml": ["manifest.yaml"],
    "audit series": ["series/run.json"],
    "emerge scores.parquet --root out": ["scores.parquet"],
    "emerge scores.csv --root out": ["scores.csv"],
    "intervene model --speed --num_tokens 8 --variants skip --root out": MODEL_FILES,
    "mteb model --tasks local --folder tasks --root out": MODEL_FILES,
    "reproduce points.yaml --root out": ["points.yaml"],
}
# Words with a special meaning for a shell, a schedule or a file system.
ODD_WORDS = ("~", "~/x", ".", "..", "-0", "1e11", "0x10", "9999999999/3", "3/3", "two\nlines", "{every: 0}", "model")
WORDS = (*map(str, WRONG_VALUES), *ODD_WORDS, "{every: 1e-9}", "*", "a,,b", "step", "%(x)s")
# `patience` and `follow` make a command wait, which is correct.
NOT_TRIED = {"help", "config", "print_config", "trainer", "patience", "follow"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """Valid inputs, which each case copies."""
    import lightning  # noqa: F401  imported once, before the forks
    import torch._dynamo  # noqa: F401

    root = tmp_path_factory.mktemp("fuzz")
    make_run(root / "run", steps=(0, 1, 2), layers=2)
    shutil.copytree(corpus, root / "shards")
    saved_gpt2(root / "model")
    write_csv(root / "songs.csv", labelled(120))
    write_banking77(root / "tasks", labelled(120), labelled(30, first=120))
    for step in (0, 1):
        shutil.copytree(root / "model", root / "series" / f"step-{step:09d}")
    shutil.copy(root / "run" / "run.json", root / "series")
    rows = [f"model{n},{n % 3},{0.1 * n},{0.2 * n + n % 2}" for n in range(8)]
    (root / "models.csv").write_text("\n".join(["model,family,coupling,score", *rows]) + "\n")
    manifest = {"repositories": [{"names": ["org/a", "org/b"], "grammar": "step", "ranges": [[0, 20, 10]]}]}
    texts = {"corpus": "shards", "tokenizer": "shards/tokenizer"}
    recipes = {
        "manifest": manifest,
        "recipe": {**RECIPE, "corpus": "shards"},
        "analyses": {**texts, "analyses": RECIPE["analyses"][:1]},
    }
    for name, content in recipes.items():
        (root / f"{name}.yaml").write_text(json.dumps(content))  # no anchors: a change affects one value
    scores = [{"step": n, "value": 0.1 * n**0.5, "metric": name} for name in ("a", "b") for n in range(7)]
    pandas.DataFrame(scores).to_csv(root / "scores.csv", index=False)
    pandas.DataFrame(scores).to_parquet(root / "scores.parquet")
    (root / "text.txt").write_text("One line.\nAnother one, of more words.\nEND\n" * 60)
    shutil.copyfile(POINTS, root / "points.yaml")
    return root


def damage(file: Path, chance: random.Random) -> None:
    """Change a value of a readable file, or bytes of any file.

    Of run.json and meta.json, which no user writes, only bytes.
    """
    lines, is_ours = file.read_bytes().splitlines(), file.name in ("run.json", "meta.json")
    if is_ours or chance.random() > 0.75 or file.suffix not in (".json", ".yaml", ".jsonl"):
        file.write_bytes(damaged(file.read_bytes(), chance))
    elif file.suffix == ".jsonl":
        index = chance.randrange(len(lines))
        lines[index] = json.dumps(mutated(json.loads(lines[index]), chance)).encode()
        file.write_bytes(b"\n".join(lines) + b"\n")
    else:
        content = mutated(yaml.safe_load(file.read_text()), chance)
        file.write_text(json.dumps(content) if file.suffix == ".json" else yaml.safe_dump(content))


def harm(folder: Path, before: set[str], argv: list[str]) -> str | None:
    """Return the damage that an accepted command did, None without any."""
    named = {Path(word.partition("=")[2] or word).parts[0] for word in argv if word}  # files that the command names
    expected = {*named, *(f"{name}.html" for name in named), "out", "all.csv"}
    if strange := {path.name for path in folder.iterdir()} - before - expected:
        return f"it wrote {sorted(strange)} beside its folder"
    if argv[0] == "fit":
        rows = records.rows(folder / "out" / "metrics.jsonl")
        losses = [row["train/loss"] for row in rows if "train/loss" in row]
        if not losses or not all(map(math.isfinite, losses)):
            return f"it trained nothing, or its loss is not finite: {losses}"
    return None


def trouble(home: Path, folder: Path, argv: list[str], spoil: Callable[[Path], None] = lambda _: None) -> str | None:
    """Run a case in a copy of the inputs and return what is wrong.

    None means a refusal in one sentence or a correct result.
    """
    shutil.copytree(home, folder)
    spoil(folder)
    before = {path.name for path in folder.iterdir()}
    outcome = run_limited(argv, folder)
    found = outcome.trouble or (harm(folder, before, argv) if outcome.code == 0 else None)
    if found is None:
        shutil.rmtree(folder)
        return None
    return "\n    ".join([f"{found}: {' '.join(argv)[:300]} in {folder}", *outcome.output.strip().splitlines()[-8:]])


@pytest.mark.nightly
@pytest.mark.timeout(0)
def test_random_bad_input_ends_in_a_sentence_or_a_correct_result(home, tmp_path):
    found = []
    for number in range(CASES):
        chance = random.Random(f"{SEED}/{number}")
        (words,) = chance.choices([*READS], [len(files) for files in READS.values()])
        file = chance.choice(READS[words])
        problem = trouble(
            home, tmp_path / str(number), words.split(), lambda folder, f=file, c=chance: damage(folder / f, c)
        )
        found += [f"seed {SEED}, case {number}, {file}: {problem}"] if problem else []
    assert not found, "\n".join([f"{len(found)} of {CASES} cases", *found])


@pytest.mark.nightly
@pytest.mark.timeout(0)
@pytest.mark.parametrize("verb", COMMANDS)
def test_no_value_of_an_option_ends_in_a_traceback_or_does_damage(verb, home, tmp_path):
    """The options come from the command's own parser, so that a new one is tried without a change here."""
    function = getattr(importlib.import_module(f"lit_layers.cli.verbs.{verb}"), verb)
    named = [each.dest for each in parser_of(function)._actions if each.option_strings]
    options = [name for name in named if name.partition(".")[0] not in NOT_TRIED and not name.endswith(".help")]
    assert len(options) > 2
    words, chance = [words for words in READS if words.startswith(verb)][-1].split(), random.Random(f"{SEED}/{verb}")
    cases = [[*words, f"--{option}={chance.choice(WORDS)}"] for option in options if "=" not in option]
    cases.append([verb, chance.choice(WORDS), *words[2:]])
    problems = [trouble(home, tmp_path / str(number), argv) for number, argv in enumerate(cases)]
    found = [f"seed {SEED}: {each}" for each in problems if each]
    assert not found, "\n".join([f"{len(found)} of {len(cases)} cases", *found])
