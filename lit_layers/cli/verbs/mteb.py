"""`lit-layers mteb`: every layer of a model, or of each checkpoint of a series, as an embedding model."""

import functools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from lit_layers.cli.console import show_table
from lit_layers.cli.measuring import Checkpoints, Outcome, measured
from lit_layers.cli.options import Names, Numbers
from lit_layers.errors import InputError
from lit_layers.schema import COUNT, COUNT_OR_NONE

if TYPE_CHECKING:
    from lit_layers.analyses.base import Analysis
    from lit_layers.measuring.plan import Target
    from lit_layers.tasks.catalogue import ScoredTask
    from lit_layers.tasks.mteb_scores import Averages

TASKS = Names(("layerwise32",))


def mteb(
    model: str,
    checkpoints: Checkpoints,
    *,
    tokenizer: str | None = None,
    tasks: Names = TASKS,
    domains: Names | None = None,
    layers: Numbers | Literal["all"] = "all",
    folder: Path | None = None,
    modules: Literal["last", "all", "none"] | None = None,
    pooling: Literal["last", "mean", "cls"] | None = None,
    states: Literal["resid", "normed", "hf"] = "resid",
    max_tokens: Annotated[int, COUNT] = 2048,
    metrics: bool = False,
    seed: Annotated[int, COUNT_OR_NONE] = 42,
) -> int:
    """Score every layer of a model, or of each checkpoint of a series, on tasks of MTEB. Run it again to continue.

    Exit code: 0, 1 if a task failed, 2 wrong input, 130 after Ctrl-C.

    Args:
        model: a folder with config.json and weights, or a name on the Hub; for a series a folder of steps,
            a name on the Hub with --steps, or a manifest
        tokenizer: name or folder of the tokenizer (default: the model's own)
        tasks: which tasks: layerwise32, local (all that --folder holds), or names with commas between
        domains: only these kinds of tasks: classification, clustering, pair_classification, reranking, sts
        layers: which layers: all, or numbers such as 0,3,6; 0 is the embedding output
        folder: a folder of local data in their own layout (docs/mteb.md); it is searched first
        modules: where to apply the pooling and normalisation of a sentence encoder's modules.json: at the last layer,
            at all, at none (default: last; none where --pooling is given)
        pooling: how the states of a text become one vector; mean is over real tokens (default: mean)
        states: which states: resid, as a block leaves them; normed, each after the final norm; hf, only the last after
            it
        max_tokens: most tokens of a text; a longer one is cut, also at the model's own limit
        metrics: also measure metrics without labels, on the first 1,000 texts of each task
        seed: seed of mteb's random draws; 42 is mteb's own
    """
    checkpoints.are_series(model)
    from lit_layers.tasks.catalogue import LOCAL, resolve
    from lit_layers.tasks.embeddings import sentence_encoder
    from lit_layers.tasks.mteb_scores import mteb_analyses
    from lit_layers.tasks.mteb_tasks import Sources, mteb_version

    mteb_version()  # before anything is loaded: it may not be installed
    sources = Sources(folder)
    own = sources.own_tasks()
    if pooling is not None and modules == "all":
        raise InputError(f"pooling: with --modules all it is the model's own, and {pooling} was given: leave one out")
    if LOCAL in tasks and folder is None:
        raise InputError("tasks: local means all tasks whose data lie in --folder, which was not given")
    resolved = resolve(tasks, domains=domains, local=sources.local_names(), own=own)

    follow = modules or ("last" if pooling is None else "none")

    def analyses(target: "Target") -> "list[Analysis]":
        encoder = None if follow == "none" else sentence_encoder(target.checkpoint.source.read)
        return mteb_analyses(
            resolved,
            tokenizer=target.own_tokenizer(),
            root=target.root,
            sources=sources,
            layers=None if layers == "all" else tuple(sorted(layers)),
            encoder=encoder,
            modules="all" if follow == "all" else "last",
            pooling=pooling or "mean",
            states=states,
            max_tokens=max_tokens,
            seed=seed,
            metrics=metrics,
            model_limit=target.length_limit,
            tell=target.tell,
        )

    tell = functools.partial(_tell, resolved)
    return measured(checkpoints.opened(model), checkpoints, analyses, tell, tokenizer=tokenizer)


def _tell(tasks: "list[ScoredTask]", outcome: Outcome) -> bool:
    """Prints what the root holds of these tasks (and steps, if some are named), writes all; whether anything failed."""
    import pandas as pd

    from lit_layers import records
    from lit_layers.tasks.mteb_scores import averages, score_table

    chosen, names = {spec.analysis for spec in tasks}, [spec.name for spec in tasks]
    scored, of_call = outcome.complete("mteb/")
    if shown := [each for each in of_call if each.analysis in chosen]:
        for means in averages(records.frame(shown), expected=names):
            _show(means)
    if scored:
        frame = records.frame(scored)
        means = averages(frame, expected=names)
        curves = [each.curve.assign(run=each.run, step=each.step, states=each.states, **each.options) for each in means]
        files = {
            "scores.csv": score_table(frame).rename(columns=_layer_name),
            "averages.csv": pd.concat(curves),
        }
        outcome.write("mteb", files)
    return outcome.tell()


def _show(means: "Averages") -> None:
    """Prints a row for each task, each domain and all; values are percent."""
    from lit_layers.tasks.catalogue import DOMAINS

    layers = means.curve["layer"].tolist()
    rows = [_row(row["task"], row["score"], [row[layer] for layer in layers], layers) for row in _tasks(means)]
    domains = [row["domain"] for row in _tasks(means)]
    groups = {f"{name}: mean of {domains.count(name)}": name for name in DOMAINS if name in means.curve}
    for name, column in {**groups, f"all: mean of {len(rows)}": "average"}.items() if rows else ():
        rows.append(_row(name, "", means.curve[column].tolist(), layers))
    title = means.run if means.step is None else f"{means.run}, step {means.step}"
    options = (f"{name} {value}" for name, value in means.options.items())
    show_table(rows, f"{title} ({', '.join([means.pooling, means.states, *options])}), percent", text=("score",))
    if rows:
        print(f"best layer of each task (chosen on these scores): {100 * means.best_per_task():.2f}")
    if means.missing:
        print(f"in no mean, as it lacks scores: {', '.join(means.missing)}")


def _tasks(means: "Averages") -> list[dict[Any, Any]]:
    return means.scores.to_dict("records")


def _row(name: str, score: str, values: list[float], layers: list[int]) -> dict[str, str]:
    """The best layer is one from 1 on, of several the first; the last is the last that was asked for."""
    percent = dict(zip(layers, values, strict=True))
    best, last = max((layer for layer in layers if layer > 0), key=lambda layer: percent[layer]), layers[-1]
    places = {
        "layer 0": percent.get(0, math.nan),
        "best layer": percent[best],
        "at": best,
        f"layer {last}": percent[last],
    }
    texts = {place: "-" if math.isnan(value) else f"{100 * value:.2f}" for place, value in places.items()}
    return {"": name, "score": score, **texts, "at": str(best)}


def _layer_name(column: Any) -> Any:
    return f"layer_{column:03d}" if isinstance(column, int) else column
