"""A wrong value for every option of every command: one sentence or a sound result, as in `test_fuzz`, whose seed and
harness these cases share.

The options are those of each command's own help, so that a new one is tried without being named here.
"""

import importlib
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from lit_layers.cli.command_line import COMMANDS
from lit_layers.cli.options import parser_of
from tests.cli.test_fit import RECIPE
from tests.cli.test_fuzz import SEED, Home, harm, home, watched  # noqa: F401
from tests.support.fuzzing import WRONG_VALUES, run_limited

# Which of the cases, as a slice: ::10 is every tenth.
SLICE = slice(*(int(part) if part else None for part in os.environ.get("LIT_LAYERS_SLICE", ":").split(":")))
POINTS = Path(__file__).parents[2] / "recipes" / "papers" / "coupling" / "fig1a_points.yaml"
PER_OPTION = int(os.environ.get("LIT_LAYERS_PER_OPTION", "1"))
# What a shell, a schedule or a file system takes for more than a word.
ODD_WORDS = (
    *("~", "~/x", ".", "..", "-0", "1e11", "0x10", "9999999999/3", "3/3"),
    *("two\nlines", "{every: 0}", "{every: 1e-9}"),
    *("*", "a,,b", "step", "%(x)s", "model"),
)
WORDS = (*map(str, WRONG_VALUES), *ODD_WORDS)
NOT_TRIED = {"help", "config", "print_config", "trainer"}
PATIENT = ("patience", "follow")  # a wait that was asked for


class Base(NamedTuple):
    """A command that succeeds; each case adds an option to it, or puts another word in place of its first."""

    name: str
    argv: tuple[str, ...]
    kept: tuple[str, ...] = ()  # options that stay

    @property
    def options(self) -> list[str]:
        verb = getattr(importlib.import_module(f"lit_layers.cli.verbs.{self.argv[0]}"), self.argv[0])
        named = [each.dest for each in parser_of(verb)._actions if each.option_strings]
        left_out = {*NOT_TRIED, *PATIENT, *self.kept}
        named = [name for name in named if "=" not in name and not name.startswith("trainer.")]
        return [name for name in named if name not in left_out and not name.endswith(".help")]


def bases(home: Home) -> list[Base]:  # noqa: F811
    root = home.root
    on_ray = ("--config", str(root / "analyses.yaml"), "--root=out", "--engine=ray")
    table = (str(root / "models.csv"), "--metric=coupling", "--score=score", "--root=out", "--resamples=100")
    model, tasks = str(root / "model"), ("--tasks=local", "--folder", str(root / "tasks"), "--root=out")
    text = ("--source", str(root / "text.txt"), "--tokenizer=bpe:300", "--root=out")
    return [
        Base("correlate", ("correlate", *table)),
        Base("intervene", ("intervene", model, "--speed", "--num_tokens=8", "--variants=skip", "--root=out")),
        Base("mteb", ("mteb", model, *tasks)),
        Base("prepare", ("prepare", *text)),
        Base("report", ("report", str(root / "run"), "--root=page.html")),
        Base("reproduce", ("reproduce", str(POINTS), "--root=out")),
        Base("emerge a run", ("emerge", str(root / "run"), "--root=out")),
        Base("emerge scores", ("emerge", str(root / "scores.csv"), "--root=out")),
        Base("select", ("select", str(root / "model"), "--task", str(root / "songs.csv"), "--root=out", "--rounds=1")),
        Base("follow", ("analyze", str(root / "series"), *watched(home))),
        Base("audit", ("audit", str(root / "series"))),
        Base("fit that saves", ("fit", "--config=recipe.yaml", "--analyses=[]"), kept=("root", "analyses")),
        Base("analyze on ray", ("analyze", str(root / "series"), *on_ray)),
    ]


def cases(home: Home, chance: random.Random) -> Iterator[list[str]]:  # noqa: F811
    for base in bases(home):
        for option in base.options:
            for value in chance.sample(WORDS, PER_OPTION):
                yield [*base.argv, f"--{option}={value}"]
        for value in chance.sample(WORDS, PER_OPTION):
            yield [base.argv[0], value, *base.argv[2:]]


def trouble(home: Home, folder: Path, argv: list[str]) -> str | None:  # noqa: F811
    """What is wrong with the end of a case; None for a sentence or a sound result."""
    folder.mkdir()
    recipe = {**RECIPE, "corpus": str(home.corpus), "root": "out"}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    shutil.copytree(home.root / "run", folder / "run")
    before = {path.name for path in folder.iterdir()}
    outcome = run_limited(argv, folder)
    found = outcome.trouble or (harm(folder, before, argv) if outcome.code == 0 else None)
    if found is not None:
        return "\n    ".join([f"{found}: {argv!r} in {folder}", *outcome.said.strip().splitlines()[-8:]])
    shutil.rmtree(folder)
    return None


def test_options_are_those_of_the_commands_own_help() -> None:
    tried = {base.argv[0]: base.options for base in bases(Home(Path("root"), Path("corpus")))}
    assert tried.keys() == COMMANDS.keys()
    assert {"metrics", "confidence", "seeds"} < set(tried["emerge"])
    assert {"dtype", "shard", "engine"} < set(tried["analyze"])
    assert {"resume_every", "steps"} < set(tried["fit"])
    assert not {*NOT_TRIED, *PATIENT} & {name for names in tried.values() for name in names}
    assert PER_OPTION * sum(map(len, tried.values())) >= 50


@pytest.mark.nightly
@pytest.mark.timeout(0)
def test_no_value_of_an_option_ends_in_a_traceback_or_does_harm(
    home: Home,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray is one that refuses: whatever is read before a cluster is asked for."""
    monkeypatch.setenv("RAY_ADDRESS", "nonsense")
    every = list(cases(home, random.Random(SEED)))[SLICE]
    said = (trouble(home, tmp_path / str(number), argv) for number, argv in enumerate(every))
    found = [f"seed {SEED}: {each}" for each in said if each]
    assert not found, "\n".join([f"{len(found)} of {len(every)} cases", *found])
