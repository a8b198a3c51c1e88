"""`lit-layers mteb`: score every layer of a model, or of each checkpoint of a series, as an embedding model."""

import functools
from pathlib import Path
from typing import Annotated, Any, Literal

import pandas as pd

from lit_layers import records
from lit_layers.analyses.base import Analysis
from lit_layers.cli.measuring import Checkpoints, Outcome, Target, measure
from lit_layers.cli.options import Names, Numbers
from lit_layers.errors import InputError
from lit_layers.schema import COUNT, COUNT_OR_NONE
from lit_layers.tasks.catalogue import ScoredTask, resolve
from lit_layers.tasks.embeddings import sentence_encoder
from lit_layers.tasks.mteb_scores import Averages, averages, mteb_analyses, score_table
from lit_layers.tasks.task_files import version_of

TASKS = Names(("layerwise32",))


def mteb(
    model: str,
    checkpoints: Checkpoints,
    *,
    tokenizer: str | None = None,
    tasks: Names = TASKS,
    layers: Numbers | Literal["all"] = "all",
    folder: Path | None = None,
    modules: Literal["last", "all", "none"] | None = None,
    pooling: Literal["last", "mean", "cls"] | None = None,
    states: Literal["resid", "normed", "hf"] = "resid",
    max_tokens: Annotated[int, COUNT] = 2048,
    metrics: bool = False,
    seed: Annotated[int, COUNT_OR_NONE] = 42,
) -> int:
    """Score every layer of a model, or of each checkpoint of a series, on MTEB tasks.

    Run the command again to continue after an interruption. Exit code: 0; 1 if a task failed; 2 for wrong input; 130
    after Ctrl-C.

    Args:
        model: a folder with config.json and weights, or a name on the Hub; for a series: a folder of steps, a name on
            the Hub together with --steps, or a manifest of published series (*.yaml)
        tokenizer: name or folder of the tokenizer (default: the model's own)
        tasks: which tasks: layerwise32 (the 32 tasks of docs/mteb.md), only one kind of them (classification,
            clustering, pair_classification, reranking or sts), local (all tasks in --folder), or comma-separated names
        layers: which layers: all, or indices such as 0,3,6; 0 is the embedding output
        folder: a folder of local data in the tasks' own layout (docs/mteb.md); it is searched before the Hub
        modules: for a sentence encoder, the layers that use the pooling and normalisation of its modules.json: the last
            one, all or none (default: last; none if --pooling is given)
        pooling: how the states of a text become one vector: the state of the last token, the mean over all tokens, or
            the state of the first token (cls); padding is ignored (default: mean)
        states: which hidden states: resid, the outputs of the blocks; normed, these outputs after the final norm; hf,
            the outputs of the blocks, with the final norm applied at the last layer only
        max_tokens: longer texts are truncated to this many tokens, or to the model's limit if that is smaller
        metrics: also measure metrics that need no labels, such as entropy and rank, on the first 1,000 texts of each
            task
        seed: seed of mteb's random draws; 42 is the default of mteb
    """
    version_of("mteb")  # fail early if it is not installed
    if pooling is not None and modules == "all":
        raise InputError(f"pooling: with --modules all it is the model's own, and {pooling} was given: leave one out")
    resolved = resolve(tasks, folder)
    follow = modules or ("last" if pooling is None else "none")
    options: dict[str, Any] = {"states": states, "max_tokens": max_tokens, "seed": seed, "metrics": metrics}
    options |= {"pooling": pooling or "mean", "layers": None if layers == "all" else tuple(sorted(layers))}
    options["modules"] = "all" if follow == "all" else "last"

    def analyses(target: "Target") -> "list[Analysis]":
        about: dict[str, Any] = {name: getattr(target, name) for name in ("root", "tell")}
        about |= {"tokenizer": target.get_tokenizer(), "model_limit": target.length_limit}
        encoder = None if follow == "none" else sentence_encoder(target.checkpoint.source.read)
        return mteb_analyses(resolved, encoder=encoder, **about, **options)

    report = functools.partial(_report, resolved)
    return measure(checkpoints.open(model), checkpoints, analyses, report, tokenizer=tokenizer)


def _report(tasks: "list[ScoredTask]", outcome: Outcome) -> bool:
    """Print the mean scores of the requested tasks, write all scores to files, and return whether any task failed."""
    names = [spec.name for spec in tasks]
    scored, of_call = outcome.complete("mteb/")
    if shown := [each for each in of_call if each.analysis.removeprefix("mteb/") in names]:
        for means in averages(records.frame(shown), expected=names):
            _show(means)
    if scored:
        frame = records.frame(scored)
        means = averages(frame, expected=names)
        curves = [each.curve.assign(run=each.run, step=each.step, states=each.states, **each.options) for each in means]
        scores = score_table(frame)
        scores = scores.rename(columns={name: f"layer_{name:03d}" for name in scores if isinstance(name, int)})
        files = {"scores.csv": scores, "averages.csv": pd.concat(curves)}
        print(*records.write_files(outcome.root / "mteb", files), sep="\n")
    return outcome.report()


def _show(means: "Averages") -> None:
    """Print the mean over tasks in percent, at the best layer (layer 0 excluded) and at the last layer."""
    values = 100 * means.curve.set_index("layer")["average"].drop(0, errors="ignore")
    title = means.run if means.step is None else f"{means.run}, step {means.step}"
    options = [means.pooling, means.states, *(f"{name} {value}" for name, value in means.options.items())]
    if values.notna().any():
        best, last = values.idxmax(), values.index[-1]
        scores = f"{values[best]:.2f}% at layer {best}, {values[last]:.2f}% at layer {last}"
        print(f"{title} ({', '.join(options)}), mean of {len(means.scores)}: {scores}")
    if means.missing:
        print(f"not in the mean, because scores are missing: {', '.join(means.missing)}")
