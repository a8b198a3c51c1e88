"""The tables of docs/studies/four_papers.md, from the study's measurements.

    python benchmarks/four_papers.py                     writes the tables from four_papers.parquet beside them
    python benchmarks/four_papers.py --pack ROOT ROOT    first packs the runs of the sweeps of text and of images

What is packed is one long table of values and standard errors in single precision, which `lit-layers emerge` also reads
(`--where`, `--metrics`); of pairs of layers it holds what the prediction of single blocks needs.
"""

import argparse
import itertools
import json
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).parents[1]))

from lit_layers import records
from lit_layers.clock import (
    BlockTable,
    Clock,
    StepCurve,
    agreement_table,
    block_tables,
    curves_in,
    measure_times,
    over_seeds,
    prediction_table,
)
from lit_layers.metrics import look_up
from lit_layers.records import Measurement, Record
from lit_layers.report.emergence_page import time_text
from lit_layers.report.side_by_side import Line, difference

PAGE = Path(__file__).parents[1] / "docs" / "studies" / "four_papers.md"
DATA = PAGE.with_suffix(".parquet")
TABLE = re.compile(r"(<!-- table: (?P<name>[\w ]+) -->\n).*?(\n<!-- end of table -->)", re.DOTALL)
COLUMNS = ("metric", "layer", "other_layer", "value", "stderr")
OF_PAIRS = {"coupling_pair", "layer_cosine"}
OF_BLOCKS = {"step_norm", "state_norm"}
FOLDER = re.compile(r"shuffle_(?P<what>tokens|labels)=(?P<shuffled>True|False),seed_everything=(?P<seed>\d+)")
MODELS = {"tokens": "GPT-2", "labels": "ViT"}
GROUPS = ("GPT-2", "GPT-2, shuffled tokens", "ViT", "ViT, shuffled labels")


@dataclass(frozen=True)
class Asked:
    """A number of the tables: what it is called there, and which record it is; the last layer where it has layers."""

    title: str
    metric: str
    tags: Mapping[str, Any]
    layered: bool = False
    analyses: tuple[str, ...] = ()


ASKED = (
    Asked("line-shape score", "line_shape_score", {}),
    Asked("expodistance", "expodistance", {}),
    Asked("linearized rollout", "linearized_rollout", {}),
    Asked("coupling, k = 4", "coupling", {"k": 4}),
    Asked("coupling, k = 12", "coupling", {"k": 12}),
    Asked("coupling, k = 32", "coupling", {"k": 32}),
    Asked("prompt entropy", "prompt_entropy", {"normalization": "raw", "drop_first": 0}),
    Asked("dataset entropy", "dataset_entropy", {"normalization": "raw"}),
    Asked("token curvature", "token_curvature", {}),
    Asked("loss of the readout, last layer", "logit_lens_loss", {}, layered=True),
    Asked("loss of the readout, middle layer", "logit_lens_loss", {"layer": 6}, layered=True),
    Asked("probe accuracy, last layer", "accuracy", {}, layered=True),
    Asked("probe accuracy, middle layer", "accuracy", {"layer": 6}, layered=True),
)


# ------------------------------------------------------------------------------------------------ packed and unpacked


def pack(roots: Iterable[Path], out: Path) -> None:
    """Writes the measurements of all finished cells of the sweeps as one table."""
    frames = []
    for folder in sorted(path.parent for root in roots for path in root.glob("*/measurements.jsonl")):
        if (match := FOLDER.fullmatch(folder.name)) is None:
            raise SystemExit(f"{folder}: expected a cell of the study's sweeps")
        shuffled = f", shuffled {match['what']}" if match["shuffled"] == "True" else ""
        rows = [
            {"step": m.step, "tokens": m.tokens, "analysis": m.analysis}
            | {name: getattr(record, name) for name in COLUMNS}
            | record.tags
            for m in records.read(folder / "measurements.jsonl")
            for record in m.records
            if _is_kept(record)
        ]
        frames.append(pd.DataFrame(rows).assign(run=f"{MODELS[match['what']]}{shuffled}, seed {match['seed']}"))
    table = pd.concat(frames, ignore_index=True)
    table["tokens"] = pd.to_numeric(table["tokens"])  # images have none
    whole = [name for name in table if pd.api.types.is_numeric_dtype(table[name]) and name not in ("value", "stderr")]
    table = table.astype(dict.fromkeys(whole, "Int32") | {"value": "float32", "stderr": "float32"})
    table[["run", *(name for name in table if name != "run")]].to_parquet(out, compression="zstd", index=False)


def _is_kept(record: Record) -> bool:
    if set(records.PLACES) & record.tags.keys() or record.metric == records.FAILED or "reference" in record.tags:
        return False
    if record.other_layer is not None:
        neighbours = record.layer is not None and record.other_layer == record.layer + 1
        return record.metric == "coupling_pair" or (
            record.metric == "layer_cosine" and neighbours and record.tags["mode"] == "token"
        )
    return record.metric in OF_BLOCKS or not (look_up(record.metric).secondary or look_up(record.metric).unlisted)


def unpack(path: Path) -> dict[str, list[Measurement]]:
    """Returns the measurements of each run of a packed table."""
    table: Any = pd.read_parquet(path)
    names = [name for name in table if name not in ("run", "step", "tokens", "analysis", *COLUMNS)]
    runs: dict[str, list[Measurement]] = {}
    for (run, step, analysis), part in table.groupby(["run", "step", "analysis"], sort=False):
        found = []
        for row in part.drop(columns=["run", "step", "analysis"]).to_dict("records"):
            tags = {name: _plain(row[name]) for name in names if not pd.isna(row[name])}
            ends = {name: None if pd.isna(row[name]) else _plain(row[name]) for name in COLUMNS}
            found.append(Record(**ends, tags=tags))
        at: Any = {"run": run, "step": int(step), "tokens": _plain(part["tokens"].iloc[0]), "seconds": 0.0}
        runs.setdefault(run, []).append(Measurement(**at, analysis=analysis, records=found, provenance={}))
    return runs


def _plain(value: Any) -> Any:
    return None if pd.isna(value) else value.item() if hasattr(value, "item") else value


# ------------------------------------------------------------------------------------------------ the tables


@dataclass(frozen=True)
class Study:
    """The curves that are asked for, by group and seed, in the order of `ASKED`; the times over seeds; the blocks."""

    curves: Mapping[str, Mapping[str, list[StepCurve | None]]]
    blocks: Mapping[str, list[BlockTable]]

    @classmethod
    def of(cls, runs: Mapping[str, list[Measurement]]) -> "Study":
        curves: dict[str, dict[str, list[StepCurve | None]]] = {}
        blocks: dict[str, list[BlockTable]] = {}
        for run, measurements in runs.items():
            group = run.rpartition(", seed")[0]
            every = curves_in(run, measurements)
            curves.setdefault(group, {})[run] = [_find(every, asked) for asked in ASKED]
            with tempfile.TemporaryDirectory() as folder:
                for measurement in measurements:
                    records.append(Path(folder) / "measurements.jsonl", measurement)
                (Path(folder) / "run.json").write_text(json.dumps({"run": run}))
                blocks.setdefault(group, []).extend(block_tables(folder))
        order = [group for group in GROUPS if group in curves]
        return cls({group: curves[group] for group in order}, {group: blocks[group] for group in order})

    def seeds_of(self, group: str, place: int) -> list[StepCurve]:
        return [curve for each in self.curves[group].values() if (curve := each[place]) is not None]


def _find(curves: Sequence[StepCurve], asked: Asked) -> StepCurve | None:
    tags = {name: str(tag) for name, tag in asked.tags.items() if name != "layer"}
    found = [
        curve
        for curve in curves
        if curve.metric == asked.metric
        and tags.items() <= {name: str(tag) for name, tag in curve.tags.items()}.items()
        and curve.tags.get("statistic") is None
        and curve.tags.get("pooling") in (None, "cls")
        and curve.tags.get("of") is None
        and (curve.layer is not None) == asked.layered
        and (curve.layer == asked.tags["layer"] if "layer" in asked.tags else True)
    ]
    return max(found, key=lambda curve: curve.layer or 0, default=None)


def when(study: Study) -> Iterator[list[str]]:
    """Half-way points over seeds."""
    yield ["half-way at step", *(f"{group} ({len(runs)} seeds)" for group, runs in study.curves.items())]
    for place, asked in enumerate(ASKED):
        cells = []
        for group in study.curves:
            times = _times(study.seeds_of(group, place))
            cells.append("not measured" if times is None else time_text(times.halfway) or "does not emerge")
        yield [asked.title, *cells]


def _times(curves: list[StepCurve]) -> Any:
    merged = over_seeds(curves, "seeds") if len(curves) > 1 else []
    return measure_times(merged).times[0] if merged else None


def last_values(study: Study) -> Iterator[list[str]]:
    """Means over seeds at the last checkpoint, and what structure makes of them."""
    yield ["at the last checkpoint", "data", "shuffled", "difference"]
    for model in MODELS.values():
        data, shuffled = [group for group in study.curves if group.startswith(model)]
        for place, asked in enumerate(ASKED):
            lines = [Line.of(group, study.seeds_of(group, place)) for group in (data, shuffled)]
            yield [f"{model}: {asked.title}", *map(_last, [*lines, difference(*lines)])]


def _last(line: Line) -> str:
    return f"{line.values[-1]:.3g} [{line.low[-1]:.3g}, {line.high[-1]:.3g}]"


def agreement(study: Study) -> Iterator[list[str]]:
    """Spearman's correlation of half-way points between runs."""
    yield ["runs", "pairs", "median Spearman", "lowest", "highest", "curves in common"]
    clocks = {group: _clock(itertools.chain.from_iterable(runs.values())) for group, runs in study.curves.items()}
    kinds = [(group, clock, "") for group, clock in clocks.items()]
    for name, clock, _ in kinds:
        table = agreement_table(clock)
        yield [f"{name}: seed against seed", *_spread(table)]
    for a, b in ((GROUPS[0], GROUPS[1]), (GROUPS[2], GROUPS[3]), (GROUPS[0], GROUPS[2])):
        if a in clocks and b in clocks:
            both = Clock(clocks[a].curves + clocks[b].curves, clocks[a].times + clocks[b].times)
            table = agreement_table(both)
            mixed = table[[x.startswith(f"{a}, seed") != y.startswith(f"{a}, seed") for x, y in _pairs(table)]]
            yield [f"{a} against {b}", *_spread(mixed)]


def _pairs(table: Any) -> Iterable[tuple[str, str]]:
    return zip(table["run_a"], table["run_b"], strict=True)


def _clock(curves: Iterable[StepCurve | None]) -> Clock:
    # one name for a number of text and of images
    return measure_times([_renamed(curve) for curve in curves if curve is not None])


def _renamed(curve: StepCurve) -> StepCurve:
    kept = {name: tag for name, tag in curve.tags.items() if name in ("k", "normalization", "drop_first")}
    parts = {"metric": curve.metric, "layer": curve.layer, "tags": kept, "at": curve.at, "values": curve.values}
    return StepCurve(run=curve.run, analysis="", stderr=curve.stderr, **parts)


def _spread(table: pd.DataFrame) -> list[str]:
    if not len(table):
        return ["0", "", "", "", ""]
    rho: Any = table["spearman"]
    few, many = table["n"].min(), table["n"].max()
    common = f"{few}" if few == many else f"{few} to {many}"
    return [str(len(table)), *(f"{number:.2f}" for number in (rho.median(), rho.min(), rho.max())), common]


def spared(study: Study, given: str) -> Iterator[list[str]]:
    """What the harm of changing a block goes with, pooled over seeds: the mean over the trained checkpoints."""
    yield ["changing a block by", "predictor", *study.blocks]
    tables = {group: prediction_table(blocks, pooled="seeds") for group, blocks in study.blocks.items()}
    picked: dict[tuple[str, str], dict[str, str]] = {}
    for group, table in tables.items():
        rows: Any = table[(table["run"] == "seeds") & table["step"].isna() & (table["given"] == given)]
        for row in rows.to_dict("records"):
            picked.setdefault((row["harm"], row["predictor"]), {})[group] = _rho(row)
    for (harm, predictor), cells in picked.items():
        yield [harm, predictor, *(cells.get(group, "not measured") for group in study.blocks)]


def _rho(row: Mapping[str, Any]) -> str:
    p = "p < 0.001" if row["p_value"] < 1e-3 else f"p {row['p_value']:.2g}"
    interval = "" if np.isnan(row["low"]) else f" [{row['low']:.2f}, {row['high']:.2f}]"
    return f"{row['rho']:.2f}{interval}, {p}"


def over_training(study: Study) -> Iterator[list[str]]:
    """The correlation of skipping's harm with coupling at some checkpoints, pooled over seeds."""
    group = next(iter(study.blocks))
    table = prediction_table(study.blocks[group], pooled="seeds")
    rows: Any = table[(table["run"] == "seeds") & table["step"].notna() & (table["given"] == "")]
    steps = sorted(rows["step"].unique())
    chosen = [step for step in steps if step in (0, 1, 4, 16, 32, 64, 128, 384, 960, steps[-1])]
    yield ["step", *map(str, chosen)]
    for harm, predictor in (("skip_one", "coupling, k = 12"), ("skip_one", "influence"), ("repeat_one", "influence")):
        line = rows[(rows["harm"] == harm) & (rows["predictor"] == predictor)].set_index("step")
        cells = [f"{line.loc[step, 'rho']:.2f}" + ("*" if line.loc[step, "p_value"] < 0.05 else "") for step in chosen]
        yield [f"{harm}, {predictor}", *cells]


def tables_of(study: Study) -> dict[str, list[list[str]]]:
    """Every table of the page, by its name there."""
    return {
        "when": [*when(study)],
        "last values": [*last_values(study)],
        "agreement": [*agreement(study)],
        "blocks": [*spared(study, "")],
        "blocks given depth": [*spared(study, "depth")],
        "over training": [*over_training(study)],
    }


def with_tables(page: str, tables: Mapping[str, list[list[str]]]) -> str:
    """Returns the page with its tables."""

    def written(match: re.Match[str]) -> str:
        head, *rows = tables[match["name"]]
        lines = [head, ["---"] * len(head), *rows]
        return match[1] + "\n".join(f"| {' | '.join(row)} |" for row in lines) + match[3]

    return TABLE.sub(written, page)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", nargs="+", type=Path, default=[], metavar="ROOT", help="folders of the sweeps")
    options = parser.parse_args()
    if options.pack:
        pack(options.pack, DATA)
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(with_tables(page, tables_of(Study.of(unpack(DATA)))), encoding="utf-8")
    print(PAGE)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
