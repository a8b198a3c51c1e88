"""The tables of metrics in docs/, made of the rows of `lit_layers.metrics`.

    python -m tests.support.metric_tables

writes them anew between the marks `<!-- metrics: GROUP GROUP -->` (or `all`) and `<!-- end of metrics -->`.
"""

import re
from pathlib import Path

from lit_layers.metrics import GROUPS, METRICS, Metric, is_in

DOCS = Path(__file__).parents[2] / "docs"
_MARKED = re.compile(r"(?<=<!-- metrics: )(?P<groups>[\w ]+) -->\n.*?(?=<!-- end of metrics -->)", re.S)


def with_tables(text: str) -> str:
    """A page with the tables that its marks ask for."""
    return _MARKED.sub(lambda mark: f"{mark['groups']} -->\n\n{_content(mark['groups'].split())}\n\n", text)


def _content(groups: list[str]) -> str:
    if groups == ["all"]:
        return "\n\n".join(f"## {group.title}\n\n{_table([group.name])}" for group in GROUPS)
    return _table(groups)


def _table(groups: list[str]) -> str:
    rows = [_cells(row) for row in METRICS.values() if is_in(row.name, *groups)]
    header = ("metric", "name", "unit", "range", "meaning")
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ("---",) * len(header), *rows))


def _cells(row: Metric) -> tuple[str, ...]:
    return f"`{row.name}`", row.title, row.unit, row.range, row.note


if __name__ == "__main__":
    for page in DOCS.glob("*.md"):
        page.write_text(with_tables(page.read_text()))
