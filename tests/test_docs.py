"""Every command and every example on the pages runs."""

import re
import shlex
from pathlib import Path

import pytest

from lit_layers.cli.main import main
from tests.support.runs import STEPS, make_run

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
ASSIGNMENTS = re.compile(r"^([A-Z_]+=\S+ )+")
# Commands that CI runs itself, or that set up the machine.
ELSEWHERE = ("make ", "pip install", "git clone", "cd ", "python -m pytest", "python benchmarks/", "wandb ")
# Options that make a run small enough for a test; the page keeps its text.
SHORT = ["--trainer.max_steps", "1", "--trainer.accelerator", "cpu"]
FEW = {True: "--data.num_validation_images", False: "--data.num_validation_sequences"}  # of images, of text


def test_every_link_to_a_file_leads_somewhere():
    for page in PAGES:
        targets = re.findall(r"\]\((?!http)([^)#]+)", page.read_text())
        assert all((page.parent / target).exists() for target in targets), (page, targets)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_and_examples_of_a_page_run_in_its_order(page, tmp_path, monkeypatch):
    for name in ("recipes", "wandb_configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    if page.name in ("report.md", "emergence.md"):  # these pages need existing runs
        make_run(tmp_path / "checkpoints" / "quickstart")
    if page.name == "emergence.md":
        for seed in (1, 2, 3):
            make_run(tmp_path / "checkpoints" / f"seed{seed}", run=f"seed{seed}", seed=seed)
        rows = [f"{step},{step / 400},0.1,{shots}\n" for step in STEPS for shots in (0, 5)]
        (tmp_path / "scores.csv").write_text("step,value,stderr,shots\n" + "".join(rows))
    for kind, text in BLOCK.findall(page.read_text()):
        if kind == "python":
            exec(compile(text, page.name, "exec"), {"__name__": "__page__"})
            continue
        for line in text.replace("\\\n", " ").splitlines():
            command = ASSIGNMENTS.sub("", line)
            if command.strip() and not command.startswith(("#", *ELSEWHERE)):
                run(command)


def run(line: str) -> None:
    words = shlex.split(line, comments=True)
    assert words[0] == "lit-layers", line
    arguments = words[1:]
    if arguments[0] == "fit" and "--print_config" in arguments:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0, line
        return
    if arguments[0] == "fit":
        arguments += [*SHORT, FEW[any(word.endswith(("vit.yaml", "cifar10.yaml")) for word in arguments)], "4"]
    assert main(arguments) == 0, line
