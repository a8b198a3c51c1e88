"""The tables of metrics in docs/, made of the rows of `lit_layers.metrics`.

    python -m tests.support.metric_tables

rewrites what is between the marks `<!-- metrics: GROUP GROUP -->` (or `all`) and `<!-- end of metrics -->`.
"""

import re
from pathlib import Path

from lit_layers.metrics import GROUPS, METRICS, Metric, is_in

DOCS = Path(__file__).parents[2] / "docs"
CHANCE = "Chance level: "  # the meaning of a baseline begins with it
JOINED = {  # small groups that the page shows under the heading of another
    "law": "residual",
    "residual_detail": "residual",
    "monotonicity": "score",
    "layer": "score",
    "stage": "similarity",
    "contrast": "similarity",
    "order": "cost",
    "rounding": "cost",
    "pooled": "geometry",
    "plane": "trajectory",
    "jacobian_lens": "lens",
    "glue": "task",
}
BETTER = {None: "", "higher": "↑", "lower": "↓"}
_MARKED = re.compile(r"(?<=<!-- metrics: )(?P<groups>[\w ]+) -->\n.*?(?=<!-- end of metrics -->)", re.S)


def fill_tables(text: str) -> str:
    """A page with the tables that its marks ask for."""
    return _MARKED.sub(lambda mark: f"{mark['groups']} -->\n\n{_content(mark['groups'].split())}\n\n", text)


def _content(groups: list[str]) -> str:
    if groups == ["all"]:
        groups = {group: [group.name] for group in GROUPS if group.name not in JOINED}
        for names in groups.values():
            names += [name for name, other in JOINED.items() if other == names[0]]
        return "\n\n".join(f"## {group.title}\n\n{_table(names)}" for group, names in groups.items())
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
        named = "" if chance.name == f"random_{row.name}" else f"`{chance.name}`, "
        meaning += f" Chance: {named}{chance.meaning.removeprefix(CHANCE)}"
    return f"`{row.name}`", values, meaning


if __name__ == "__main__":
    for page in DOCS.glob("*.md"):
        page.write_text(fill_tables(page.read_text()))
