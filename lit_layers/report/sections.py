"""The figure sections of a page: which figures each metric of an analysis has, depending on the tags of its records."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd

from lit_layers import plots, records
from lit_layers.figures import tables
from lit_layers.figures.chart import Chart
from lit_layers.figures.labels import BLOCKS, analysis_note, mid_sentence, pair_text, tag_text, value
from lit_layers.figures.maps import has_surface
from lit_layers.figures.profiles import short_names
from lit_layers.figures.variants import BASELINE, LOOPED
from lit_layers.functional.block_schedules import BLOCK_NAMES, MIDDLE_NAMES
from lit_layers.metrics import GROUPS, METRICS, is_in, look_up, names, rank, scalar_row, sentence
from lit_layers.report.template import Block, Captioned, Cells, Choice, Group, Table, block
from lit_layers.run_data import RunData

_TOGETHER = 6  # largest number of variants in one figure of values of the whole model
# Groups of metrics. The metrics of a group share one place on the page, with a menu that selects the metric.
_CHOSEN_FROM = ("monotonicity", "layer", "concept", "residual", "law", "stage")
CONTROLS = ("random_labels", "relabelled_vocabulary")

READOUT, TASKS = "interventions", "intervene"
SPEED, FINETUNE = "intervene/speed", "intervene/finetune"


def sections(
    frame: pd.DataFrame, *, comparing: bool = False, num_layers: Mapping[str, int] | None = None
) -> list[dict[str, Any]]:
    """Return a section for each analysis of a run, or of models side by side, that has figures.

    `num_layers` gives the number of layers of each model, because the last layers may have no values. Secondary metrics
    become the section's diagnostics.
    """
    shown = []
    table: Any = frame
    look: dict[str, Any] = {"comparing": comparing, "num_layers": num_layers}
    look["steps"] = [int(step) for step in sorted(table["step"].dropna().unique())]
    for analysis, part in table.groupby("analysis", sort=False):
        blocks, diagnostics = [], []
        for title, members in _members(part, grouping=not comparing):
            rows = [look_up(metric) for metric in members]
            choices = [
                (", ".join(filter(None, [row.title if len(rows) > 1 else "", text])), figures)
                for row in rows
                for text, figures in shapes(part, row.name, analysis, **look)
            ]
            if choices:
                made = block(
                    title or rows[0].unit_title,
                    "" if title else rows[0].note,
                    choices,
                    metrics=members,
                )
                (diagnostics if all(row.secondary for row in rows) else blocks).append(made)
        if not blocks:  # if all metrics are secondary, show them as the main figures
            blocks, diagnostics = diagnostics, []
        if blocks:
            about = {"name": analysis, "title": sentence(analysis), "note": analysis_note(analysis)}
            shown.append({**about, "metrics": blocks, "diagnostics": diagnostics})
    return shown


def _members(part: Any, *, grouping: bool) -> Iterator[tuple[str, list[str]]]:
    """Yield the title and the metrics of each figure block in the section of an analysis.

    A figure block shows either a group of metrics that the reader chooses from, or a single metric (title "").
    """
    measured = sorted(part["metric"].unique(), key=rank)
    baselines = {look_up(metric).baseline for metric in measured}
    titles = {group.name: group.title for group in GROUPS if grouping and group.name in _CHOSEN_FROM}
    titles = {group: title for group, title in titles.items() if names(group)[0] in measured}
    by_group = tables.grouped(measured, lambda name: group if (group := look_up(name).group) in titles else name)
    for name, members in by_group.items():
        if len(members) > 1:
            yield titles[name], members
        elif not look_up(members[0]).unlisted and members[0] not in baselines:
            yield "", members


def training(run: RunData) -> list[Block]:
    """Return the figures of training scalars, the loss first."""
    recorded = dict.fromkeys(name for row in run.scalars for name in row if name not in ("step", "tokens"))
    unigram = run.about.get("data", {}).get("unigram_entropy")
    references = {"Unigram entropy": unigram} if unigram is not None else {}
    draw = partial(plots.training_curves, run.scalars)
    blocks = []
    losses = [name for name in recorded if name in METRICS and name.endswith("/loss")]
    if losses:
        note = "Dashed: the loss of a model that only knows token frequencies." if references else ""
        blocks.append(block("Loss (nats)", note, [("", [("", partial(draw, references=references))])]))
    for name in sorted((name for name in recorded if name not in losses), key=rank):
        row, figures = scalar_row(name), [("", partial(draw, names=[name]))]
        blocks.append(block(row.unit_title, row.note, [("", figures)], metrics=[name] if row.group else []))
    return blocks


def first_surface(frame: pd.DataFrame) -> list[Block]:
    """Return the first figure of a page, which shows a metric over layers and steps.

    The metric is the logit lens loss, or else the first other metric that has such a figure. The list is empty if there
    is none.
    """
    table: Any = frame
    table = table[table["layer"].notna() & table["step"].notna() & ~is_intervention(frame)]
    counts = table.groupby(["analysis", "metric"], sort=False)["layer"].nunique()
    pairs: list[Any] = [*counts[counts > 1].index]
    for analysis, metric in sorted(pairs, key=lambda pair: (pair[1] != "logit_lens_loss", rank(pair[1]))):
        if not (look_up(metric).secondary or look_up(metric).unlisted):
            with contextlib.suppress(ValueError):  # skip a metric with values at one step only, or of layer pairs
                chart = plots.layer_surface(table, metric, analysis=analysis)
                title = f"{look_up(metric).unit_title}: layers over steps"
                return [block(title, "", [("", [("", chart)])], metrics=[metric])]
    return []


# ------------------------------------------------------------------------------------------------ one metric


def shapes(
    part: pd.DataFrame,
    metric: str,
    analysis: str,
    *,
    comparing: bool = False,
    num_layers: Mapping[str, int] | None = None,
    steps: Sequence[int] = (),
) -> list[Choice]:
    """Return all figures of a metric. The page has a menu with one entry per variant (set of tags).

    `steps` are all measured steps of the run. If models are compared (`comparing`), each model has its own entries for
    heat maps, and a metric that only has values of the whole model has no figure.
    """
    table: Any = part
    table = table[table["metric"].isin([metric, look_up(metric).baseline])]  # for speed
    unplaced = table[table[table.columns.intersection(records.AXES)].isna().all(axis=1)]
    rows, levels = tables.rows_of(table, metric), tables.rows_of(table, look_up(metric).baseline or "")
    runs = {run: rows[rows["run"] == run] for run in rows["run"].unique()} if comparing else {"": table}
    points = {run: tables.select(of_run, metric, analysis=analysis) for run, of_run in runs.items()}
    if comparing:
        points = {run: part for run, part in points.items() if any(_has_map(p) or _is_on_profile(p) for p in part)}
    every = [point for of_run in points.values() for point in of_run]
    short = short_names([*points])
    if comparing and every and not any(map(_has_map, every)):
        points = {"": every}

    def lines(options: dict[str, Any]) -> Iterator[Captioned]:
        tags, flat = options.get("tags") or {}, [p for p in every if p.other_layer is None and not tables.is_tabular(p)]
        controls = [name for name in CONTROLS if tables.matching(every, {**tags, "control": name})]
        look: dict[str, Any] = {**options, "controls": controls}
        if "layer" in options or not flat:
            return
        if comparing:
            look |= {"baselines": [*levels["metric"].unique()], "num_layers": num_layers}
            if any(map(_is_on_profile, every)):
                yield "", partial(plots.layer_profile, table, metric, **look)
            return
        names = levels["metric"].unique()  # only the baselines that this variant has are drawn
        options["baselines"] = look["baselines"] = [
            name for name in names if tables.matching(tables.select(levels, name, analysis=analysis), tags)
        ]
        curves = partial(plots.emergence_curves, unplaced, metric, **options)
        if any("index" in point.tags for point in every):
            yield "Over training, the largest", curves
        elif not any(map(tables.is_on_axes, flat)):
            yield "", curves
        else:
            over = "distance" if all(point.layer is None for point in flat) else "layers"
            yield "Over training", curves
            yield f"Over {over}", partial(plots.layer_profile, unplaced, metric, **look)
            del look["baselines"], look["controls"]
            is_tasks = look_up(metric).better or analysis.split("/")[0] in tables.BASES
            if is_tasks and not is_in(metric, "half") and has_surface(tables.matching(flat, tags)):
                caption = f"Layers over steps{'; dots: the best layer' if look_up(metric).better else ''}"
                yield caption, partial(plots.layer_surface, unplaced, metric, steps=steps, **look)

    choices = []
    for run, of_run in points.items():
        for options, text in choices_of(of_run):
            chosen = {"analysis": analysis, **options}
            figures = [*_maps(runs.get(run, table), metric, of_run, chosen)]
            figures = [*lines(dict(chosen)), *figures] if comparing else [*figures, *lines(dict(chosen))]
            figures = [("", figures[0][1])] if comparing and len(figures) == 1 else figures
            name = short[run] if len(points) > 1 else ""
            choices.append((", ".join(filter(None, [name, text])), figures))
    return choices


def _maps(part: pd.DataFrame, metric: str, points: list[tables.Point], options: dict[str, Any]) -> Iterator[Captioned]:
    """Yield heat maps, token paths and lists of values of a metric, for one entry of the menu on the page.

    There is only one drawing if the metric has token paths, a table of values for each layer, or curves over the number
    of training examples.
    """
    has = {tag for point in points for tag in point.tags if point.layer is not None}
    kinds = [
        ("", plots.paths_in_plane, "axis" in has),
        ("", plots.table_map, "layer" in options),
        ("", plots.list_profile, tables.TRAIN_ROWS in has),
        ("Categories", plots.tag_map, tables.CATEGORY in has),
        ("Heads", plots.tag_map, tables.HEAD in has),
        ("", plots.layer_matrix, any(map(tables.is_pair, points))),
        ("At one checkpoint", plots.list_profile, "index" in has),
        ("Over the distance between the tokens", plots.list_profile, "token_distance" in has),
    ]
    drawn = [(text, partial(make, part, metric, **options)) for text, make, is_drawn in kinds if is_drawn]
    yield from drawn[:1] if {"axis", tables.TRAIN_ROWS} & has or "layer" in options else drawn


def _has_map(point: tables.Point) -> bool:
    return point.other_layer is not None or tables.is_tabular(point) or "index" in point.tags


def _is_on_profile(point: tables.Point) -> bool:
    return tables.is_on_axes(point) and not _has_map(point)


def choices_of(points: list[tables.Point]) -> list[tuple[dict[str, Any], str]]:
    """Return the entries of a metric's menu on the page, each as keyword arguments of the figure and a label.

    Each variant (set of tags) has an entry. If each layer or pair of blocks has a matrix or list of values, a variant
    has an entry per layer or pair of blocks.
    """
    kinds = _variant_choices(points)
    if not points[0].tags.keys() & {"row", "token"} or "axis" in points[0].tags:
        return [({"tags": tags}, text) for tags, text in kinds]
    choices = []
    for tags, text in kinds:
        # Sort pairs of different blocks first: the Jacobian of a block in its own leading directions is trivial.
        pairs = {(p.layer, p.other_layer) for p in tables.matching(points, tags)}
        for layer, other in sorted(pairs, key=lambda pair: (pair[0] == pair[1], pair[0], pair[1] or 0)):
            texts = [pair_text(layer, other), *([text] if len(kinds) > 1 else [])]
            choices.append(({"tags": tags, "layer": layer, "other_layer": other}, ", ".join(texts)))
    return choices


def _variant_choices(points: list[tables.Point]) -> list[tuple[Mapping[str, Any], str]]:
    """Return the entries of a metric's menu on the page, with the default first.

    Each entry is returned as the tags that select its points, and its text. An entry is a variant (set of tags). If the
    metric only has values of the whole model, an entry is a statistic such as the median, and one figure shows all
    variants with this statistic. Each variant keeps its own entry if a statistic has more than `_TOGETHER` variants.
    """
    variants = tables.variants_of(points)
    if not any(map(tables.is_on_axes, points)) and points[0].other_layer is None:
        statistics = dict.fromkeys(tags.get("statistic") for tags in variants)
        if max(sum(t.get("statistic") == s for t in variants) for s in statistics) <= _TOGETHER:
            if len(statistics) == 1:
                return [({}, "")]
            in_order = sorted(statistics, key=lambda statistic: statistic or "")
            return [({"statistic": s}, tables.choice_text({"statistic": s})) for s in in_order]
    # Leave out variants that exist only for the whole model, e.g. a median, if others have values per layer.
    variants = [tags for tags in variants if any(map(tables.is_on_axes, tables.matching(points, tags)))] or variants
    # Leave out the controls of a probe: the figures of its other variants show them as dashed lines.
    variants = [tags for tags in variants if tags.get("control") not in CONTROLS] or variants
    first = tables.plainest(variants)
    if len(variants) < 2:
        return [(first, tables.variant_text(first))]
    differing = [name for name in first if len({str(tags[name]) for tags in variants}) > 1]
    ordered = sorted(variants, key=lambda tags: tags != first)
    return [(tags, tables.choice_text({name: tags[name] for name in differing})) for tags in ordered]


# ------------------------------------------------------------------------------------------------ interventions


def is_intervention(frame: pd.DataFrame) -> Any:
    """Return a boolean for each row: whether `intervention_sections` shows it."""
    table: Any = frame
    has_variant = table["variant"].notna() if "variant" in table else pd.Series(False, index=table.index)
    own = table["analysis"].str.split("/").str[0].isin([READOUT, TASKS])
    return own & (has_variant | (table["metric"] == "random_score"))


def intervention_sections(frame: pd.DataFrame, notes: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the sections about interventions on the order of blocks.

    `notes` maps the name of an analysis to a sentence about it. For a run, figures have a slider over checkpoints. For
    several models, the menu of a figure block also selects the model.
    """
    table: Any = frame[is_intervention(frame) & (frame["metric"] != records.FAILED)]
    if table.empty or "variant" not in table:
        return []
    # Drop records of individual random orders: they are most of the rows, and no figure shows them.
    table = table[table["seed"].isna()] if "seed" in table else table
    shown = []
    by_kind = tables.grouped(sorted(table["analysis"].unique(), key=lambda name: name not in _MEANS.values()), _kind)
    for name in sorted(by_kind, key=lambda name: [*_TITLES].index(name) if name in _TITLES else -1):
        analyses = by_kind[name]
        blocks = [
            block(heading, BLOCKS[heading], [(text, [("", draw)]) for text, draw in choices], wide=True)
            for heading, choices in _drawings(table, analyses).items()
        ]
        title, tested = (
            f"{_TITLES[name]} under intervention" if name in _TITLES else sentence(name),
            _MEANS.get(name, ""),
        )
        note = f"{BLOCKS.get(title) or analysis_note(name)} {notes.get(tested, '')}".strip()
        look = {"metrics": blocks, "differences": differences(table[table["analysis"].isin(analyses)])}
        shown += [{"name": name, "title": title, "note": note, **look}] if any(look.values()) else []
    return shown


_TITLES = {TASKS: "Tasks", tables.GLUE: "GLUE", FINETUNE: "Fine-tuning", SPEED: "Speed"}
_MEANS = {TASKS: tables.MEDIAN, tables.GLUE: tables.GLUE_MEAN}


def _kind(analysis: str) -> str:
    """Return the name of the section that shows an analysis of interventions."""
    if analysis.split("/")[0] == READOUT or analysis == SPEED:
        return analysis
    return next((each for each in (tables.GLUE, FINETUNE) if analysis.startswith(each)), TASKS)


# For the title of each figure block: the variants that its figures show, and the function that draws them.
_KINDS: dict[str, tuple[Sequence[str], Callable[..., Chart]]] = {
    "Middle blocks changed": (MIDDLE_NAMES, plots.variant_curves),
    "Number of loops": ((LOOPED,), plots.loop_map),
    "Single blocks": (BLOCK_NAMES, partial(plots.variant_curves, blocks=True)),
}


def _drawings(table: Any, analyses: Sequence[str]) -> dict[str, list[tuple[str, Callable[[], Chart]]]]:
    """Return the figures for a section of interventions, by the title of the figure block on the page.

    Each figure is a pair: the text of its menu entry, and a function that draws it.
    """
    part, drawings = table[table["analysis"].isin(analyses)], dict[str, list[tuple[str, Callable[[], Chart]]]]()
    models, every = short_names([*part["run"].unique()]), [*_metrics(table, analyses)]
    if len(models) > 1:
        for text, rows, metric, chosen in every[:3]:
            for variant in (each for each in (*MIDDLE_NAMES, *BLOCK_NAMES) if (rows["variant"] == each).any()):
                draw = partial(plots.models_by_middle, table, metric, variant=variant, **chosen)
                named = f"{text}: {tag_text({'variant': variant})}"
                drawings.setdefault("Models side by side", []).append((named, draw))
        every = every[:1]  # for several models, draw only the first metric
    for title, (variants, make) in _KINDS.items():
        for text, rows, metric, chosen in every:
            for run in rows[rows["variant"].isin(variants)]["run"].unique():
                draw = partial(make, table[table["run"] == run], metric, **chosen)
                named = f"{models[run]}, {text}" if len(models) > 1 else text
                drawings.setdefault(title, []).append((named, draw))
    return drawings


def _metrics(table: Any, analyses: Sequence[str]) -> Iterator[tuple[str, Any, str, dict[str, Any]]]:
    """Yield (text of the menu entry, rows, name, figure options) for each metric of the analyses.

    Metrics of the groups variant, task and cost come first. A metric measured under several conditions (such as values
    of the tag `when`) is yielded once per condition.
    """
    for analysis in analyses:
        part = table[(table["analysis"] == analysis) & table["variant"].notna()]
        part = part[part["statistic"].isna()] if "statistic" in part else part
        plain = lambda name: (not is_in(name, "variant", "task", "cost"), rank(name))  # noqa: E731
        for metric in sorted(part["metric"].unique(), key=plain):
            rows, title = part[part["metric"] == metric], look_up(metric).title
            if len(analyses) > 1:
                title = f"{sentence(analysis.removeprefix(f'{tables.GLUE}/').split('/', 1)[-1])}: {mid_sentence(title)}"
            names = [n for n in ("training", "when") if n in rows and rows[n].notna().any()]
            changed = rows[rows["variant"] != BASELINE] if (rows["variant"] != BASELINE).any() else rows
            kinds = changed[names].drop_duplicates().to_dict("records") if names else [{}]
            for kind in kinds:
                tags = {name: value for name, value in kind.items() if not pd.isna(value)}
                own = rows.loc[(rows[[*tags]] == pd.Series(tags)).all(axis=1)] if tags else rows
                yield (
                    ", ".join(filter(None, [title, tag_text(tags)])),
                    own,
                    metric,
                    {"analysis": analysis, "tags": tags},
                )


def differences(rows: Any) -> Table | None:
    """Return a table with a row for each order of blocks: how it differs from the full model at the last checkpoint."""
    rows = rows[rows["metric"].str.endswith("_difference") & rows["variant"].notna()]
    rows = rows[rows["step"].isna() | (rows["step"] == rows.groupby("run")["step"].transform("max"))]
    cells, several = dict[str, dict[str, tuple[str, str]]](), rows["run"].nunique() > 1
    for row in rows.to_dict("records"):
        tags = {name: row[name] for name in ("variant", "middle", "loops", "schedule") if pd.notna(row.get(name))}
        tags |= {name: int(tags[name]) for name in ("middle", "loops") if name in tags}
        parts = [
            row["run"] if several else "",
            tag_text(tags),
            "" if pd.isna(row["layer"]) else f"block {row['layer']}",
        ]
        text = look_up(row["metric"]).unit_title
        column = text if row["analysis"].split("/")[0] == READOUT else f"{sentence(row['task'])}: {mid_sentence(text)}"
        ends = f"{value(row['low'])} to {value(row['high'])}" if pd.notna(row["low"]) else ""
        cells.setdefault(", ".join(filter(None, parts)), {})[column] = value(row["value"]), ends
    columns = [*dict.fromkeys(column for each in cells.values() for column in each)]
    body = [Cells([(name, ""), *(each.get(column, ("", "")) for column in columns)]) for name, each in cells.items()]
    return Table(["Order of the blocks", *columns], [Group("", "", body)]) if body else None
