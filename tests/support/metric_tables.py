"""The tables of metrics in docs/, made of the rows of `lit_layers.metrics`.

    python -m tests.support.metric_tables

rewrites what is between the marks `<!-- metrics: GROUP GROUP -->` (or `all`) and `<!-- end of metrics -->`.
"""

import re
from pathlib import Path

from lit_layers.metrics import GROUPS, METRICS, Metric, is_in

DOCS = Path(__file__).parents[2] / "docs"
CHANCE = "Chance level: "  # the meaning of a baseline begins with it
BETTER = {None: "", "higher": "↑", "lower": "↓"}
_MARKED = re.compile(r"(?<=<!-- metrics: )(?P<groups>[\w ]+) -->\n.*?(?=<!-- end of metrics -->)", re.S)


def with_tables(text: str) -> str:
    """A page with the tables that its marks ask for."""
    return _MARKED.sub(lambda mark: f"{mark['groups']} -->\n\n{_content(mark['groups'].split())}\n\n", text)


def _content(groups: list[str]) -> str:
    if groups == ["all"]:
        return "\n\n".join(f"## {group.title}\n\n{_table([group.name])}" for group in GROUPS)
    return _table(groups)


def _table(groups: list[str]) -> str:
    rows = [_cells(row) for row in METRICS.values() if is_in(row.name, *groups) and is_listed(row)]
    lines = [f"| {' | '.join(cells)} |" for cells in (("metric", "values", "meaning"), *rows)]
    return "\n".join([lines[0], "|---|---|---|", *lines[1:]])


def is_listed(row: Metric) -> bool:
    """Return whether a metric has its own row: one rule covers the halves, and chance levels are in other rows."""
    return row.also != "half" and not any(_chance(each) is row for each in METRICS.values())


def _chance(row: Metric) -> Metric | None:
    chance = METRICS.get(row.baseline)
    return chance if chance and chance.meaning.startswith(CHANCE) else None


def _cells(row: Metric) -> tuple[str, ...]:
    limits = row.range.replace("at least", "≥").replace("at most", "≤")
    values = ", ".join(filter(None, (row.unit, limits, BETTER[row.better])))
    words = re.findall(r"\w+", row.title.lower())
    parts = re.split(r"[_/]", row.name.removesuffix("_score"))
    said = all(any(word.startswith(part) for word in words) for part in parts)  # the name says what the title says
    meaning = row.meaning if said else ": ".join(filter(None, (f"**{row.title}**", row.meaning)))
    if chance := _chance(row):
        meaning += f" Chance: `{chance.name}`, {chance.meaning.removeprefix(CHANCE)}"
    return f"`{row.name}`", values, meaning


if __name__ == "__main__":
    for page in DOCS.glob("*.md"):
        page.write_text(with_tables(page.read_text()))
