"""Generate the tables of metrics in docs/ from the rows of `lit_layers.metrics`.

    python -m tests.support.metric_tables

rewrites the text between the marks `<!-- metrics: GROUP GROUP -->` (or `all`) and `<!-- end of metrics -->`.
"""

import re
from pathlib import Path

from lit_layers.metrics import GROUPS, METRICS, Metric, is_in

DOCS = Path(__file__).parents[2] / "docs"
CHANCE = "Chance level: "  # prefix of the meaning of a baseline
JOINED = {  # small groups that the page shows under the heading of another group
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
    """Return the text of a page with its marked tables filled in."""
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
    """Return whether a metric has its own row.

    Metrics of halves have none, because one rule covers them; chance levels are in the rows of their metrics.
    """
    return row.also != "half" and not any(_chance(each) is row for each in METRICS.values())


def _chance(row: Metric) -> Metric | None:
    chance = METRICS.get(row.baseline)
    return chance if chance and chance.meaning.startswith(CHANCE) else None


def _cells(row: Metric) -> tuple[str, ...]:
    limits = row.range.replace("at least", "≥").replace("at most", "≤")
    values = ", ".join(filter(None, (row.unit, limits, BETTER[row.better])))
    words = re.findall(r"\w+", row.title.lower())
    name_parts = re.split(r"[_/]", row.name.removesuffix("_score"))
    name_says_title = all(any(word.startswith(each) for word in words) for each in name_parts)
    meaning = row.meaning if name_says_title else ": ".join(filter(None, (f"**{row.title}**", row.meaning)))
    if chance := _chance(row):
        named = "" if chance.name == f"random_{row.name}" else f"`{chance.name}`, "
        meaning += f" Chance: {named}{chance.meaning.removeprefix(CHANCE)}"
    return f"`{row.name}`", values, meaning


if __name__ == "__main__":
    for page in DOCS.glob("*.md"):
        page.write_text(fill_tables(page.read_text()))
