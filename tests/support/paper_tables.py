"""Generate the tables of docs/papers.md from the recipes of published figures and tables.

    python -m tests.support.paper_tables

rewrites the text between the marks `<!-- papers: PAPER -->` and `<!-- end of papers -->`.
"""

import functools
import re
from pathlib import Path

from lit_layers.papers import PAPERS, PaperRecipe, read_recipe

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "papers.md"
read = functools.cache(read_recipe)
_MARKED = re.compile(r"(?<=<!-- papers: )(?P<paper>\w+) -->\n.*?(?=<!-- end of papers -->)", re.S)


def recipe_paths(paper: str = "*") -> list[Path]:
    """Return the paths of all recipes by paper and in natural order: figure 2 before figure 10."""
    paths = (ROOT / "recipes" / "papers").glob(f"{paper}/*.yaml")
    return sorted(paths, key=lambda path: (path.parent.name, [_key(each) for each in re.split(r"(\d+)", path.stem)]))


def _key(text: str) -> tuple[int, str]:
    return (int(text), "") if text.isdigit() else (-1, text)


def fill_tables(text: str) -> str:
    """Return the text of the page with its marked tables filled in."""
    return _MARKED.sub(lambda mark: f"{mark['paper']} -->\n\n{_table(mark['paper'])}\n\n", text)


def _table(paper: str) -> str:
    head = ("item", "what it shows", "FILE", "needs a GPU for")
    rows = [head, *(_cells(path, read(path)) for path in recipe_paths(paper))]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([f"{PAPERS[paper]}.", "", lines[0], "|---|---|---|---|", *lines[1:]])


def _cells(path: Path, recipe: PaperRecipe) -> tuple[str, ...]:
    needs = {"here": "nothing", "gpu": recipe.why, "cannot": f"**cannot run**: {recipe.why}"}[recipe.status]
    return recipe.item, recipe.shows, f"`{path.relative_to(ROOT / 'recipes' / 'papers')}`", needs


if __name__ == "__main__":
    PAGE.write_text(fill_tables(PAGE.read_text()))
