"""Find the commands in the `console` blocks of pages and in the headers of recipes."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RECIPES = sorted([*(ROOT / "recipes").rglob("*.yaml"), *(ROOT / "recipes").glob("s[tw]*/*.sh")])


def _lines() -> Iterator[str]:
    for page in PAGES:
        for block in re.findall(r"^```console\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            yield from block.replace("\\\n", " ").splitlines()
    for recipe in RECIPES:
        text = re.sub(r"(\\\n# +|\n# +(?=--))", " ", recipe.read_text())
        yield from re.findall(r"^# +(?:[A-Z][\w ]*: +)?((?:\w+=\S+ )?lit-layers .*)", text, re.MULTILINE)


def documented_commands() -> list[str]:
    """Return each command once, without prompt, launcher, comment and `lit-layers`."""
    found = [(line, re.search(r"\blit-layers ([a-z].*?)( +#|$)", line)) for line in _lines()]
    commands = [command[1][:-1] if line.startswith("sbatch") else command[1] for line, command in found if command]
    return list(dict.fromkeys(" ".join(command.split()) for command in commands))
