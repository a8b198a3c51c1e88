"""What `lit-layers select` leaves and prints of a choice: pictures, numbers, a table."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lit_layers.cli.select_options import WITHOUT_TOLERANCE
from lit_layers.durable import write_json
from lit_layers.errors import InputError
from lit_layers.figures.plane import LayerScores, layer_choice
from lit_layers.figures.vega import write_charts
from lit_layers.metrics import look_up
from lit_layers.select.choosing import Choice, TaskFeatures


def write_results(
    model: str,
    revision: str | None,
    task: TaskFeatures,
    choice: Choice,
    seconds: Mapping[int, float],
    *,
    title: str,
    out: Path,
) -> list[Path]:
    """Writes layers.png, layers.svg and select.json, and returns their paths, in that order.

    Raises:
        InputError: where they cannot be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"out: cannot write {out}: {(error.strerror or str(error)).lower()}") from error
    content = {
        "model": model,
        "revision": revision,
        "task": task.name,
        "layer": choice.layer,
        "num_layers": choice.num_layers,
        "rule": choice.rule,
        "tolerance": None if choice.rule in WITHOUT_TOLERANCE else choice.tolerance,
        "metric": choice.metric,
        "pooling": task.pooling,
        "max_tokens": task.max_tokens,
        "validation": {str(layer): asdict(score) for layer, score in choice.validation.items()},
        "baseline": choice.baseline,
        "chosen_in_share_of_resamples": {str(layer): share for layer, share in choice.shares.items()},
        "test": {str(layer): asdict(score) for layer, score in sorted(choice.test.items())},
        "test_difference_to_last": asdict(choice.difference),
        "seconds_to_layer": {str(layer): each for layer, each in seconds.items()},
        "rows": {part: len(targets) for part, targets in task.targets.items()},
        "notes": list(task.notes),
    }
    write_json(out / "select.json", content)  # before the pictures, which may fail
    pictures = write_charts({out / "layers": layer_choice(_picture(task, choice, seconds, title))}, (".png", ".svg"))
    return [*pictures, out / "select.json"]


def show_results(task: TaskFeatures, choice: Choice) -> None:
    """Prints the scores, the choice and the notes."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    table = Table(title=f"{task.name}: {choice.metric} on validation rows", title_justify="left", box=None)
    for column in ("layer", "score", "95% interval", "chosen in", ""):
        table.add_column(column, justify="right" if column else "left")
    for layer, score in choice.validation.items():
        table.add_row(
            str(layer),
            f"{score.value:.4f}",
            f"{score.low:.4f} to {score.high:.4f}",
            f"{choice.shares[layer]:.0%}" if layer in choice.shares else "",
            "<- chosen" if layer == choice.layer else "",
        )
    console.print(table)
    console.print(f"{_baseline(choice)} alone: {choice.baseline:.4f}")
    for layer, score in sorted(choice.test.items()):
        console.print(f"test, layer {layer}: {score.value:.4f} ({score.low:.4f} to {score.high:.4f})")
    if choice.layer != choice.num_layers:
        gap = choice.difference
        console.print(
            f"test, layer {choice.layer} less layer {choice.num_layers}: {gap.value:+.4f} "
            f"({gap.low:+.4f} to {gap.high:+.4f}, the same rows)"
        )
    for note in task.notes:
        console.print(note)


def _picture(task: TaskFeatures, choice: Choice, seconds: Mapping[int, float], title: str) -> LayerScores:
    of_last = choice.layer == choice.num_layers
    found = f"the last layer of {choice.num_layers}" if of_last else f"layer {choice.layer} of {choice.num_layers}"
    rule = choice.rule if choice.rule in WITHOUT_TOLERANCE else f"{choice.rule} {choice.tolerance:g}"
    ids = task.batch.get("input_ids")
    return LayerScores(
        title=f"{title}: {found} is chosen ({rule.replace('_', ' ')})",
        score=f"validation {look_up(choice.metric).title.lower()}",
        values={layer: (each.value, each.low, each.high) for layer, each in choice.validation.items()},
        chosen=choice.layer,
        baseline=choice.baseline,
        baseline_name=_baseline(choice),
        shares=choice.shares,
        seconds=seconds,
        timed="an image" if ids is None else f"a text of {ids.shape[1]} tokens",
    )


def _baseline(choice: Choice) -> str:
    return "majority class" if choice.higher_is_better else "training mean"
