"""The figures of a run's page as pictures: for papers and talks, where a page cannot go."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from lit_layers.errors import InputError
from lit_layers.figures import Chart
from lit_layers.figures.vega import SUFFIXES, write_charts
from lit_layers.identity import Settings
from lit_layers.report import rendering, sections
from lit_layers.report.facts import RunData, read_run

_LONG = 120  # characters of a file name


def write_pictures(
    root: str | Path, folder: str | Path, *, allow_suspect: bool = False, settings: Settings = ()
) -> list[Path]:
    """Writes every figure of a run's page, or of the page of models side by side, as PNG, SVG and PDF.

    A picture is named after its section, its title, its choice and what it is over, as on the page; of a figure with a
    slider it shows the last checkpoint. Returns their paths.

    The folder is made where there is none; other files in it stay. Checkpoints that an audit found suspect are left
    out, unless `allow_suspect`; `settings` chooses numbers of other settings, as for the page.

    Raises:
        InputError: where `root` is no run's folder, has nothing to draw, or a picture cannot be written.
    """
    charts = dict(_named(read_run(root, settings=settings), allow_suspect=allow_suspect))
    if not charts:
        raise InputError(f"{root} has nothing to draw as pictures: there is no figure on its page")
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {folder}: {(error.strerror or str(error)).lower()}") from error
    return write_charts({folder / name: chart for name, chart in charts.items()}, SUFFIXES)


def _named(run: RunData, *, allow_suspect: bool) -> Iterator[tuple[str, Chart]]:
    """The name of each picture, and its chart, whose title names the section."""
    _, shown = rendering.sections_of(run, allow_suspect=allow_suspect)
    names: set[str] = set()
    for section in [{"name": "training", "title": "Training", "metrics": sections.training(run)}, *shown]:
        for block in section["metrics"]:
            for choice in block["choices"]:
                for figure in choice["figures"]:
                    if (chart := figure["chart"]) is None:
                        continue
                    parts = [section["name"], block["title"], choice["text"], figure["caption"]]
                    name = section["title"] if section["title"] not in chart.title else ""
                    title = ": ".join(filter(None, [name, chart.title]))
                    yield _file_name("_".join(filter(None, parts)), names), replace(chart, title=title)


def _file_name(name: str, names: set[str]) -> str:
    """Analyses come with any name, and may differ in letters that no file name has."""
    name, number = re.sub(r"[^a-z\d.-]+", "_", name.lower()).strip("_.")[:_LONG], 1
    while (unique := name if number == 1 else f"{name}_{number}") in names:
        number += 1
    names.add(unique)
    return unique
