"""`lit-layers select`: the layer that is enough for a task, and the model cut there."""

import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_layers.cli.bar import bar
from lit_layers.cli.measuring import name_of
from lit_layers.cli.select_options import SelectOptions
from lit_layers.errors import InputError

if TYPE_CHECKING:
    from torch import nn

    from lit_layers.models.costs import Cost
    from lit_layers.models.shard_files import ShardFiles
    from lit_layers.models.view import LayeredModel
    from lit_layers.select.choosing import Choice, TaskFeatures
    from lit_layers.tasks.probe_task import ProbeTask


def select(model: str, options: SelectOptions) -> int:
    """Choose the layer that is enough for a task, on validation rows, and cut the model there.

    Args:
        model: a folder with config.json and weights (a checkpoint), or a name on the Hub
    """
    texts = options.settle()
    from lit_layers.analyses.base import at_least_float32
    from lit_layers.cli.select_results import show_results, write_results
    from lit_layers.models.view import LayeredModel
    from lit_layers.offline import device_of

    if options.export is not None:
        from lit_layers.select.export import refuse_taken

        refuse_taken(options.export, options.overwrite)
    device = device_of(options.device)
    with bar("opening the model") as show:
        show(0, 1, "opening the model")
        files = _files(model, options.revision)
        view = LayeredModel(_loaded(files).to(device))  # in the precision that an export has, too
        _check_kind(model, options, view)
        tokenizer = None if view.family.sees_images else _tokenizer(model, options)
        task = _features(options, texts, at_least_float32(view), tokenizer)
        choice = _choose(options, task, show)
        show(1, 1, "probes of all layers fitted and scored")
    seconds = _seconds(options, view, task)
    name = name_of(model)
    out = options.out or results_folder(name, task.name)
    title = f"{name} on {task.name}"
    paths = write_results(model, options.revision, task, choice, seconds, title=title, out=out)
    show_results(task, choice)
    print(*paths, sep="\n")
    if options.export is not None:
        _export(model, options, options.export, files, view, task, choice, tokenizer, paths[0])
        print(options.export)
    return 0


def _files(model: str, revision: str | None) -> "ShardFiles":
    from lit_layers.models.shard_files import ShardFiles

    run = sorted(Path(model).glob("step-*/config.json"))
    if run and not (Path(model) / "config.json").is_file():
        raise InputError(f"{model} is a run of several checkpoints: name one of them, such as {run[-1].parent}")
    return ShardFiles(model, revision=revision)


def _loaded(files: "ShardFiles") -> "nn.Module":
    """In the precision that it is saved in, as far as its config.json says it."""
    import torch

    from lit_layers.models.saved import load

    named = str(files.config.get("dtype") or files.config.get("torch_dtype") or "float32").removeprefix("torch.")
    return load(files.model, revision=files.commit, dtype=getattr(torch, named, torch.float32))


def _check_kind(model: str, options: SelectOptions, view: "LayeredModel") -> None:
    kind = type(view.model).__name__
    if view.family.sees_images and options.task is not None:
        raise InputError(f"task: {model} is a vision model ({kind}): name its images with --images")
    if not view.family.sees_images and options.images is not None:
        raise InputError(f"images: {model} is a model of texts ({kind}): name its texts with --task")


def _tokenizer(model: str, options: SelectOptions) -> str:
    from lit_layers.offline import own_tokenizer

    found = options.tokenizer or own_tokenizer(model, options.revision)
    if found is None:
        raise InputError(f"tokenizer: {model} carries none; name one with --tokenizer")
    return found


def _features(options: Any, texts: "ProbeTask | None", view: "LayeredModel", tokenizer: str | None) -> "TaskFeatures":
    from lit_layers.select.choosing import of_images, of_texts

    if tokenizer is None or texts is None:
        numbers = {"num_train": options.num_train, "num_test": options.num_test}
        return of_images(view, options.images, pooling=options.pooling, **numbers)
    return of_texts(
        view,
        texts,
        tokenizer=tokenizer,
        folder=options.folder,
        pooling=options.pooling,
        max_tokens=options.max_tokens,
        cache=options.cache,
    )


def _choose(options: Any, task: "TaskFeatures", show: Any) -> "Choice":
    from lit_layers.analyses.label_probe import ProbeOptions
    from lit_layers.select.choosing import Part, choose

    def features(part: Part) -> Any:
        show(0, 1, f"features of {part}")
        return task.features(part)

    return choose(
        features,
        task.targets,
        num_classes=task.num_classes,
        rule=options.rule,
        tolerance=options.tolerance or 0.0,  # of rules that have one
        options=ProbeOptions(c=options.c, penalty=options.penalty, max_iterations=options.max_iterations),
        progress=show,
    )


def _seconds(options: SelectOptions, view: "LayeredModel", task: "TaskFeatures") -> Mapping[int, float]:
    """For an image, or the longest of the validation texts."""
    from lit_layers.models.costs import layer_latencies

    one = {name: rows[:1] for name, rows in task.batch.items()}
    return dict(enumerate(layer_latencies(view, one, rounds=options.rounds).tolist()))


def _export(
    model: str,
    options: SelectOptions,
    folder: Path,
    files: "ShardFiles",
    view: "LayeredModel",
    task: "TaskFeatures",
    choice: "Choice",
    tokenizer: str | None,
    picture: Path,
) -> None:
    from lit_layers.functional.probe import LogisticProbes
    from lit_layers.select import Card, ProbeHead, compare_costs, cost_table, export, measured_on

    facts: dict[str, Any] = {
        "task": task.name,
        "pooling": task.pooling,
        "max_tokens": task.max_tokens,
        "row": 0,
    }
    if isinstance(choice.probe, LogisticProbes):
        head = ProbeHead.of_logistic(choice.probe, choice.layer, classes=task.classes or (), **facts)
    else:
        head = ProbeHead.of_ridge(choice.probe, choice.layer, **facts)
    card = Card(
        source=model,
        revision=options.revision,
        commit=files.commit,
        num_layers=choice.num_layers,
        rule=choice.rule,
        tolerance=options.tolerance,
        metric=choice.metric,
        validation={layer: score.value for layer, score in choice.validation.items()},
        test_chosen=choice.test[choice.layer].value,
        test_last=choice.test[choice.num_layers].value,
        picture=picture,
        notes=task.notes,
    )
    with _whole_model(files, view) as whole:

        def costs(cut: Path) -> "list[Cost]":
            lengths = {} if task.max_tokens is None else {"num_tokens": min(128, task.max_tokens)}
            found = compare_costs(
                whole,
                cut,
                layer=choice.layer,
                num_layers=choice.num_layers,
                num_rounds=options.rounds,
                device=view.device.type,
                **lengths,
            )
            print(cost_table(found), measured_on(found), sep="\n\n")
            return found

        export(
            view.model,
            choice.layer,
            head,
            folder,
            tokenizer=tokenizer,
            card=card,
            batches=[task.batch],
            costs=costs,
            keep_lm_head=options.keep_lm_head,
            overwrite=options.overwrite,
        )


@contextmanager
def _whole_model(files: "ShardFiles", view: "LayeredModel") -> Iterator[Path]:
    """A folder with the whole model: its own, or for a model of the Hub a copy that is removed afterwards."""
    from lit_layers.models.build import save

    if files.local:
        yield Path(files.model)
        return
    with tempfile.TemporaryDirectory(prefix="lit_layers-") as folder:
        save(view.model, folder)
        yield Path(folder)


def results_folder(model: str, task: str) -> Path:
    """Where the results lie unless told otherwise; a task may come with any name."""
    plain = re.sub(r"[^\w.-]+", "_", task)[:100]
    return Path("selected") / f"{model}-{plain}"
