"""Write the tables and figures of docs/studies/four_papers.md from the study's measurements.

    python docs/studies/four_papers.py                     writes them from four_papers.parquet: four CPU minutes
    python docs/studies/four_papers.py --check             exits with 1 if they differ
    python docs/studies/four_papers.py --pack ROOT ROOT    first packs the text runs and the image runs
    python docs/studies/four_papers.py --pack-mechanism ROOT   first packs the runs on mechanism
    python docs/studies/four_papers.py --run ROOT          only writes the numbers of one run to the run folder ROOT

A packed file is one long table of values and standard errors in single precision, which `lit-layers emerge` can also
read (`--where`, `--metrics`). For pairs of layers it has only the values that predict the harm of changing a block.
"""

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mechanism
import pandas as pd
from block_prediction import block_tables_of_page, prediction_charts, predictions
from forecasts import forecast_table
from lead_lags import lead_lag_table
from study_data import (
    COLUMNS,
    DATA,
    GROUPS,
    MECHANISM_DATA,
    MODELS,
    PAGE,
    QUANTITIES,
    Quantity,
    Table,
    curves_by_group,
    find,
    group_of,
    half_way_text,
    markdown_table,
    seeds_of,
    shown,
    unpack,
)

from lit_layers import records
from lit_layers.clock.step_curves import MONOTONICITY, StepCurve, curves_in, layer_curves, merge_seeds
from lit_layers.clock.times_and_order import Clock, agreement_table, measure_times
from lit_layers.figures.chart import Panels
from lit_layers.metrics import look_up
from lit_layers.records import Measurement, Record
from lit_layers.report.emergence import timeline
from lit_layers.report.side_by_side import Line, difference, training_chart

SAMPLE = "GPT-2, seed 0"
IMAGES = PAGE.parents[1] / "images"
TIMELINE = IMAGES / "four_papers_timeline.png"
COUPLING, BLOCKS = IMAGES / "four_papers_coupling.png", IMAGES / "four_papers_blocks.png"
TABLE = re.compile(r"(<!-- table: (?P<name>[\w ]+) -->\n)(?P<rows>.*?)(<!-- end of table -->)", re.DOTALL)
NORMAL_95 = 1.959964
NORMS = {"step_norm", "state_norm"}
FOLDER = re.compile(r"shuffle_(?P<what>tokens|labels)=(?P<shuffled>True|False),seed_everything=(?P<seed>\d+)")
RISING_STEPS = (0, 8, 64, 192)

RISING = (
    Quantity("probe accuracy", MONOTONICITY, {"of": "accuracy"}),
    Quantity("loss of the readout (improves)", MONOTONICITY, {"of": "logit_lens_loss"}),
    Quantity("prompt entropy", MONOTONICITY, {"of": "prompt_entropy", "normalization": "raw", "drop_first": 0}),
    Quantity("norm of the states", MONOTONICITY, {"of": "state_norm"}),
    Quantity("loss without the block (improves)", MONOTONICITY, {"of": "variant_loss", "variant": "skip_one"}),
)


# ------------------------------------------------------------------------------------------------ packed and unpacked


def pack(roots: Iterable[Path], out: Path) -> None:
    """Write the measurements of the study's runs as one table, without unfinished runs."""
    frames: dict[str, pd.DataFrame] = {}
    for folder in sorted(path.parent for root in roots for path in root.glob("*/measurements.jsonl")):
        if (match := FOLDER.fullmatch(folder.name)) is None:
            raise SystemExit(f"{folder}: expected a run of the study")
        shuffled = f", shuffled {match['what']}" if match["shuffled"] == "True" else ""
        rows = [
            {"step": m.step, "tokens": m.tokens, "analysis": m.analysis}
            | {name: getattr(record, name) for name in COLUMNS}
            | record.tags
            for m in records.read(folder / "measurements.jsonl")
            for record in m.records
            if _is_kept(record)
        ]
        run = f"{MODELS[match['what']]}{shuffled}, seed {match['seed']}"
        frames[run] = pd.DataFrame(rows).assign(run=run)
    for model in MODELS.values():
        steps = {run: frame["step"].nunique() for run, frame in frames.items() if run.startswith(model)}
        for run in [run for run, number in steps.items() if number < max(steps.values())]:
            print(f"left out: {run} has {steps[run]} of {max(steps.values())} checkpoints")
            del frames[run]
    table = pd.concat(frames.values(), ignore_index=True)
    table["tokens"] = pd.to_numeric(table["tokens"])  # image runs have no tokens
    whole = [name for name in table if pd.api.types.is_numeric_dtype(table[name]) and name not in ("value", "stderr")]
    table = table.astype(dict.fromkeys(whole, "Int32") | {"value": "float32", "stderr": "float32"})
    table[["run", *(name for name in table if name != "run")]].to_parquet(out, compression="zstd", index=False)


def _is_kept(record: Record) -> bool:
    if {*records.AXES, "reference", "head"} & record.tags.keys() or record.metric == records.FAILED:
        return False
    if record.other_layer is not None:
        neighbours = record.layer is not None and record.other_layer == record.layer + 1
        return record.metric == "coupling_pair" or (
            record.metric == "layer_cosine" and neighbours and record.tags["mode"] == "token"
        )
    return record.metric in NORMS or not (look_up(record.metric).secondary or look_up(record.metric).unlisted)


def add_intervals(measurement: Measurement) -> Measurement:
    """Return a measurement for the report: with 95% intervals and without the cosines of neighbouring layers."""
    shown = []
    for record in measurement.records:
        if record.metric != "layer_cosine":
            half = None if record.stderr is None else NORMAL_95 * record.stderr
            ends = {} if half is None else {"low": record.value - half, "high": record.value + half}
            shown.append(replace(record, **ends))
    return replace(measurement, records=shown)


# ------------------------------------------------------------------------------------------------ the tables

Curves = Mapping[str, Mapping[str, list[StepCurve]]]  # curves by group and run


def halfway_points(by_group: Curves) -> Table:
    """Yield half-way points over seeds."""
    yield ["half-way at step", *(f"{group} ({len(runs)} seeds)" for group, runs in by_group.items())]
    for quantity in QUANTITIES:
        merged = [merge_seeds(seeds_of(by_group[group], quantity), group) for group in by_group]
        times = [measure_times(curves).times[0] if curves else None for curves in merged]
        yield [
            quantity.title,
            *("not measured" if found is None else half_way_text(found) or "does not emerge" for found in times),
        ]


def last_values(by_group: Curves) -> Table:
    """Yield means over seeds at the last checkpoint, on data and on shuffled data, and their difference."""
    yield ["at the last checkpoint", "data", "shuffled", "difference"]
    for model in MODELS.values():
        data, shuffled = [group for group in by_group if group.startswith(model)]
        for quantity in QUANTITIES:
            lines = [Line.from_curves(group, seeds_of(by_group[group], quantity)) for group in (data, shuffled)]
            lines.append(difference(*lines))
            yield [f"{model}: {quantity.title}", *(_interval(line, -1, ".3g") for line in lines)]


def layer_correlations(by_group: Curves) -> Table:
    """Yield Spearman's rho between a number and its layer, over seeds, from the untrained weights on."""
    yield ["rho of value and layer", *(f"step {step}" for step in RISING_STEPS), "last step"]
    for group, runs in by_group.items():
        rises = {run: [*curves, *(each.curve for each in layer_curves(curves))] for run, curves in runs.items()}
        for quantity in RISING:
            seeds = [curve for curves in rises.values() if (curve := find(curves, quantity)) is not None]
            line = Line.from_curves(group, seeds)
            at = [*line.at.tolist()]
            indices = [at.index(step) for step in RISING_STEPS]
            yield [f"{group}: {quantity.title}", *(_interval(line, index, ".2f") for index in (*indices, -1))]


def _interval(line: Line, index: int, form: str) -> str:
    return f"{line.values[index]:{form}} [{line.low[index]:{form}}, {line.high[index]:{form}}]"


def agreement(by_group: Curves) -> Table:
    """Yield Spearman's correlation of half-way points between runs."""
    yield ["runs", "pairs", "median Spearman", "lowest", "highest", "curves in common"]
    clocks = {}
    for group, runs in by_group.items():
        found = [(run, find(curves, quantity)) for run, curves in runs.items() for quantity in QUANTITIES]
        clocks[group] = measure_times([_renamed(run, curve) for run, curve in found if curve is not None])
        yield [f"{group}: seed against seed", *_spread(agreement_table(clocks[group]))]
    for a, b in ((GROUPS[0], GROUPS[1]), (GROUPS[2], GROUPS[3]), (GROUPS[0], GROUPS[2])):
        both = Clock(clocks[a].curves + clocks[b].curves, clocks[a].times + clocks[b].times)
        table = agreement_table(both)
        pairs = zip(table["run_a"], table["run_b"], strict=True)
        mixed = [x.startswith(f"{a}, seed") != y.startswith(f"{a}, seed") for x, y in pairs]
        yield [f"{a} against {b}", *_spread(table[mixed])]


def _renamed(run: str, curve: StepCurve) -> StepCurve:
    """Return a curve without the tags that differ between text and image runs."""
    kept = {name: tag for name, tag in curve.tags.items() if name in ("k", "normalization", "drop_first")}
    parts = {"metric": curve.metric, "layer": curve.layer, "tags": kept, "at": curve.at, "values": curve.values}
    return StepCurve(run=run, analysis="", stderr=curve.stderr, **parts)


def _spread(table: pd.DataFrame) -> list[str]:
    if table.empty:
        return ["0", *["none"] * 4]
    rho: Any = table["spearman"]
    few, many = table["n"].min(), table["n"].max()
    common = f"{few}" if few == many else f"{few} to {many}"
    return [str(len(table)), *(f"{number:.2f}" for number in (rho.median(), rho.min(), rho.max())), common]


def tables_of(by_group: Curves) -> dict[str, list[list[str]]]:
    """Return the tables of times and values, by their names on the page. The other scripts make the other tables."""
    return {
        "when": [*halfway_points(by_group)],
        "last values": [*last_values(by_group)],
        "over layers": [*layer_correlations(by_group)],
        "agreement": [*agreement(by_group)],
    }


def mechanism_of(path: Path) -> tuple[mechanism.Mechanism, mechanism.Mechanism]:
    """Return the study of mechanism and its control on shuffled tokens, from a packed table."""
    runs = {run: curves_in(run, each) for run, each in unpack(path).items()}
    groups = [{run: runs[run] for run in runs if group_of(run) == group} for group in GROUPS[:2]]
    if lacking := [group for group, found in zip(GROUPS, groups, strict=False) if not found]:
        raise SystemExit(f"{path.name}: no run of {lacking[0]}")
    study, control = (mechanism.Mechanism.from_curves(found) for found in groups)
    return study, control


def fill_tables(page: str, tables: Mapping[str, list[list[str]]]) -> str:
    """Return the page with new numbers in the rows and columns that its tables show."""

    def written(match: re.Match[str]) -> str:
        return match[1] + markdown_table(shown(match["name"], match["rows"], tables[match["name"]])) + match[4]

    return TABLE.sub(written, page)


def write_timeline(seeds: Sequence[StepCurve], path: Path) -> None:
    """Draw the half-way point and the peak of each number, over the seeds and in each seed."""
    together = f"{len({curve.run for curve in seeds})} seeds"
    timeline(measure_times([*merge_seeds(seeds, together), *seeds])).write(path)


def write_coupling(by_group: Curves, path: Path = COUPLING) -> None:
    """Draw the excess coupling of the text models on data and on shuffled tokens, with bands over seeds."""
    groups, quantity = GROUPS[:2], Quantity("excess coupling", "excess_coupling", {"k": 12})
    training_chart(
        {group: Line.from_curves(group, seeds_of(by_group[group], quantity)) for group in groups}, groups
    ).write(path)


def write_blocks(of_text: pd.DataFrame, path: Path = BLOCKS) -> None:
    """Draw the correlation between the harm of changing a block and its predictors, for the text models over seeds."""
    charts = prediction_charts(of_text)
    Panels(title="", charts=charts, columns=1, width=640).write(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", nargs="+", type=Path, default=[], metavar="ROOT", help="folders of the runs")
    parser.add_argument("--pack-mechanism", type=Path, metavar="ROOT", help="folder of the runs of mechanism")
    parser.add_argument("--check", action="store_true", help="write nothing, exit with 1 if a table differs")
    parser.add_argument("--run", type=Path, metavar="ROOT", help=f"only write {SAMPLE!r} as a run to this new folder")
    options = parser.parse_args()
    if options.run:
        if options.run.exists():
            raise SystemExit(f"--run: {options.run} is there already: name a new folder")
        for measurement in unpack(DATA, SAMPLE)[SAMPLE]:
            records.append(options.run / "measurements.jsonl", add_intervals(measurement))
        return 0
    if options.pack:
        pack(options.pack, DATA)
    if options.pack_mechanism:
        pack([options.pack_mechanism], MECHANISM_DATA)
    page = PAGE.read_text(encoding="utf-8")
    runs = unpack(DATA)
    by_group, blocks, both = curves_by_group(runs), predictions(runs), mechanism_of(MECHANISM_DATA)
    tables = tables_of(by_group) | block_tables_of_page(blocks) | mechanism.mechanism_tables(*both)
    tables |= {"forecasts": [*forecast_table(by_group)], "lead lags": [*lead_lag_table(by_group)]}
    drawn = fill_tables(page, tables)
    if options.check:
        return int(drawn != page)
    PAGE.write_text(drawn, encoding="utf-8")
    write_timeline([curve for quantity in QUANTITIES for curve in seeds_of(by_group[GROUPS[0]], quantity)], TIMELINE)
    write_coupling(by_group)
    write_blocks(blocks[GROUPS[0]])
    mechanism.write_mechanism(*both)
    print(PAGE, *sorted(IMAGES.glob("four_papers_*.png")), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
