"""`lit-layers select`: find the earliest sufficient layer for a task, and cut the model there; or remove blocks."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from lit_layers.analyses.probes.probe_fits import ProbeOptions
from lit_layers.cli import process
from lit_layers.cli.measuring import name_of
from lit_layers.cli.options import refuse_replacing
from lit_layers.cli.process import bar
from lit_layers.data.batches import EvalText
from lit_layers.errors import InputError
from lit_layers.measuring.offline import device_of
from lit_layers.models.costs import layer_latencies
from lit_layers.models.saved import load
from lit_layers.models.view import LayeredModel, upcast
from lit_layers.schema import COUNT, NOT_NEGATIVE, Device
from lit_layers.select.choosing import Choice, Part, TaskFeatures, choose, image_task, text_task
from lit_layers.select.export import refuse_taken
from lit_layers.select.pruning import export_without, measure_harm
from lit_layers.select.selection import Candidate, Selection, write_comparison
from lit_layers.series import OneModel
from lit_layers.series.checkpoint_sources import ModelFiles
from lit_layers.tasks.catalogue import TASKS, unknown_task
from lit_layers.tasks.embeddings import sentence_encoder
from lit_layers.tasks.probe_task import ProbeTask
from lit_layers.tasks.task_files import SUFFIXES, is_local


@dataclass(frozen=True, kw_only=True)
class SelectOptions:
    """Options that decide how the layer for a task is chosen.

    Args:
        revision: branch, tag or commit on the Hub
        task: labelled texts: a name such as banking77 (docs/tasks.md lists them), a .jsonl, .csv or .parquet file, or a
            folder of such files named after the splits
        text: the column with the texts, or a format such as 'Subject: {subject}'
        label: the column with the labels
        regression: the labels are numbers to predict
        folder: a folder from which a task of the catalogue is read (default: the Hub)
        images: labelled images, instead of a task, for a vision model: digits, cifar10, a local path, ORG/NAME
        tokenizer: the tokenizer for the texts (default: the model's own)
        by: the score of a layer: accuracy (default) or log_loss of its probe; for a regression mean_squared_error
        rule: which layer is good enough (docs/select.md); within_tolerance: the first layer whose score
            is worse than that of the last layer by at most the tolerance
        tolerance: tolerance of the rule: in units of the score, or for fraction_of_last a share of the last layer's
            score; the rules knee and best have no tolerance
        pooling: how a layer's states are pooled into one vector (default: as in a sentence encoder's modules.json,
            otherwise last; cls for images)
        max_tokens: longer texts are truncated to this many tokens; with --without, the windows of the corpus have
            this length
        num_train: number of images for fitting probes and choosing the layer (default: all)
        num_test: number of images for the test scores (default: all)
        max_iterations: largest number of iterations of the logistic probe
        device: device of the model. auto: a GPU if there is one
        root: folder for pictures and numbers (default: selected/MODEL-TASK; for several models: selected/models-TASK)
        export: write the model, cut after the chosen layer, to this folder, with its probe and a README.md
        overwrite: replace an earlier export in the --export folder
        rounds: number of rounds of latency measurement
        without: instead of choosing a layer, remove blocks of a language model: their numbers, such as 3,4, or least:2
            for the two blocks that raise the loss least when skipped one at a time
        corpus: with --without: the text on whose held-out part the loss is measured, as in intervene
    """

    revision: str | None = None
    task: str | None = None
    text: str = "text"
    label: str = "label"
    regression: bool = False
    folder: str | None = None
    images: str | None = None
    tokenizer: str | None = None
    by: Literal["accuracy", "log_loss", "mean_squared_error"] | None = None
    rule: Literal["within_tolerance", "fraction_of_last", "plateau", "knee", "best"] = "within_tolerance"
    tolerance: Annotated[float, NOT_NEGATIVE] = 0.01
    pooling: Literal["last", "mean", "cls"] | None = None
    max_tokens: Annotated[int, COUNT] = 512
    num_train: int | None = None
    num_test: int | None = None
    max_iterations: Annotated[int, COUNT] = 1000
    device: Device = "auto"
    root: Path | None = None
    export: Path | None = None
    overwrite: bool = False
    rounds: Annotated[int, COUNT] = 20
    without: str | None = None
    corpus: str | None = None

    def probe_task(self) -> "ProbeTask | None":
        """Return the task with labelled texts, or None for images.

        Raises:
            InputError: options are out of range or contradict each other.
        """
        if (self.task is None) == (self.images is None):
            raise InputError("task: expected --task NAME, or --images SOURCE for a vision model, and not both")
        refuse_replacing(self.root, [self.task], ("models", "layers"))
        return None if self.task is None else TASKS.get(self.task) or self._local_task(self.task)

    def _local_task(self, name: str) -> "ProbeTask":
        """Return a task from local files.

        If `name` is a file, test and validation rows are split off from it. If it is a folder, its files are the
        splits.
        """
        if not is_local(name):
            raise unknown_task(name, TASKS, f"name a {', '.join(SUFFIXES)} file")
        path = Path(name).expanduser()
        if not path.exists():
            raise InputError(f"task: expected labelled texts in {path}, which does not exist")
        splits = {file.stem for file in path.iterdir()} if path.is_dir() else set()
        about: Any = {each: each for each in ("test", "validation") if each in splits}
        about |= {"kind": "regression" if self.regression else "classification"}
        about |= {"text": self.text, "label": self.label}
        name = path.resolve().name if path.is_dir() else path.stem
        task = ProbeTask(name, str(path), **{"test": None, "validation": None, **about})
        task.check()
        return task


def select(model: str, others: list[str], options: SelectOptions) -> int:
    """Choose the earliest sufficient layer for a task on validation rows, and cut the model there.

    With several models: compare their scores and latencies, each at its chosen layer. With --without: instead, remove
    blocks from a language model and measure what that costs.

    Args:
        model: a folder with config.json and weights (a checkpoint), or a name on the Hub
        others: more models to compare with
    """
    if options.without is not None:
        return _remove_blocks(model, others, options)
    models, texts = [model, *others], options.probe_task()
    names = [name_of(each) for each in models]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InputError(f"models: two are called {twice}")
    if options.export is not None:
        if others:
            raise InputError(f"export: expected one model, got {len(models)}: leave it out, or the others")
        refuse_taken(options.export, options.overwrite)
    process.set_threads(options.device)
    if len(models) > 1:
        return _compare(models, names, options, texts)
    selection = _select_layer(model, names[0], options, texts)
    paths = selection.write(options.root or results_folder(names[0], selection.task.name))
    _show(selection.task, selection.choice)
    print(*paths, sep="\n")
    if options.export is not None:
        selection.export(options.export, paths[0], overwrite=options.overwrite)
        print(options.export)
    return 0


def _select_layer(model: str, name: str, options: SelectOptions, texts: "ProbeTask | None") -> "Selection":
    """Return the chosen layer of a model, with its scores and latencies."""
    with bar("opening the model") as show:
        files = ModelFiles(model, revision=options.revision)
        view, task, tokenizer = _open_model(files, options, texts)

        def features(part: "Part") -> Any:
            show(0, 1, f"features of {part}")
            return task.features(part)

        about: Any = {"rule": options.rule, "tolerance": options.tolerance, "by": options.by}
        about |= {
            "num_classes": task.num_classes,
            "options": ProbeOptions(max_iterations=options.max_iterations),
            "progress": show,
        }
        choice = choose(features, task.targets, **about)
    one = {name: rows[:1] for name, rows in task.batch.items()}  # one image, or the longest validation text
    seconds = dict(enumerate(layer_latencies(view, one, rounds=options.rounds).tolist()))
    tolerance = None if options.rule in ("knee", "best") else options.tolerance
    found: Any = {"view": view, "task": task, "tokenizer": tokenizer, "choice": choice, "seconds": seconds}
    return Selection(name=name, files=files, revision=options.revision, tolerance=tolerance, **found)


def _remove_blocks(model: str, others: list[str], options: SelectOptions) -> int:
    """Measure the harm of skipping blocks, and write the model without them."""
    if others or options.export is None or options.corpus is None or options.task or options.images:
        raise InputError("without: expected one model, --corpus TEXT and --export FOLDER, and no --task or --images")
    refuse_taken(options.export, options.overwrite)
    process.set_threads(options.device)
    with bar("opening the model") as show:
        files = ModelFiles(model, revision=options.revision)
        view = _load(files, options)
        tokenizer = _tokenizer_of(model, options)
        num_tokens = min(options.max_tokens, view.max_tokens or options.max_tokens)
        batches = EvalText(options.corpus, tokenizer, num_tokens=num_tokens, min_sequences=2)
        show(0, 2, "harm of skipping blocks")
        pruned = measure_harm(view, batches, str(options.without))
        show(1, 2, "export")
        source: Any = {"source": files.model, "commit": files.commit, "tokenizer": tokenizer}
        how: Any = {"batch": next(iter(batches)), "rounds": options.rounds, "overwrite": options.overwrite}
        pruned = export_without(view, pruned, options.export, **source, **how)
    full, loss, harm = (record.value for record in (pruned.full, pruned.loss, pruned.harm))
    print(f"without blocks {', '.join(map(str, pruned.blocks))}: loss {full:.4f} -> {loss:.4f} ({harm:+.4f}), ", end="")
    print("{:.1f} -> {:.1f} ms".format(*(1e3 * seconds for seconds in pruned.seconds)))
    print(options.export)
    return 0


def _compare(models: list[str], names: list[str], options: SelectOptions, texts: "ProbeTask | None") -> int:
    """Choose the layer of each model, with one model in memory at a time; models that fail are reported and left out.

    Raises:
        InputError: all models fail; the error is that of the first one.
    """
    task = Path(str(options.images)).name if texts is None else texts.name
    root = options.root or results_folder("models", task)
    candidates, left_out = [], {}
    for model, name in zip(models, names, strict=True):
        try:
            selection = _select_layer(model, name, options, texts)
        except InputError as error:
            left_out[name] = str(error)
            continue
        selection.write(root / name)
        candidates.append(Candidate.from_selection(selection))
        del selection
    if not candidates:
        raise InputError(f"{models[0]}: {left_out[names[0]]}")
    paths = write_comparison(candidates, left_out, task, root)
    for name, why in left_out.items():
        print(f"left out: {name}: {why}")
    print(*paths, sep="\n")
    return 1 if left_out else 0


def _open_model(
    files: "ModelFiles", options: SelectOptions, texts: "ProbeTask | None"
) -> "tuple[LayeredModel, TaskFeatures, str | None]":
    """Return the model, its task, and its tokenizer (None for images)."""
    model, view = files.model, _load(files, options)
    kind, wide = type(view.model).__name__, upcast(view)
    if view.family.sees_images:
        if options.images is None:
            raise InputError(f"task: {model} is a vision model ({kind}): name its images with --images")
        chosen: Any = {name: getattr(options, name) for name in ("num_train", "num_test")}
        return view, image_task(wide, options.images, pooling=options.pooling or "cls", **chosen), None
    if texts is None:
        raise InputError(f"images: {model} is a model of texts ({kind}): name its texts with --task")
    tokenizer = _tokenizer_of(model, options)
    chosen = {name: getattr(options, name) for name in ("folder", "max_tokens")}
    encoder = sentence_encoder(files.read) if options.pooling is None else None
    pooling = options.pooling or ("last" if encoder is None else encoder.pooling)
    return view, text_task(wide, texts, tokenizer=tokenizer, pooling=pooling, **chosen), tokenizer


def _load(files: "ModelFiles", options: SelectOptions) -> "LayeredModel":
    """Return the model in the precision of its saved weights, because an export has that precision."""
    named = str(files.config.get("dtype") or files.config.get("torch_dtype") or "float32").removeprefix("torch.")
    network = load(files.location, revision=files.commit, dtype=getattr(torch, named, torch.float32))
    return LayeredModel(network.to(device_of(options.device)))


def _tokenizer_of(model: str, options: SelectOptions) -> str:
    series = OneModel(model, revision=options.revision)
    tokenizer = options.tokenizer or series.tokenizer(series.checkpoints[0])
    if tokenizer is None:
        raise InputError(f"tokenizer: {model} carries none; name one with --tokenizer")
    return tokenizer


def _show(task: "TaskFeatures", choice: "Choice") -> None:
    """Print the chosen layer and the scores on test rows."""
    chosen = choice.validation[choice.layer]
    compared = f"{choice.metric} {chosen.value:.4f} on validation rows, {choice.baseline_name} {choice.baseline:.4f}"
    print(f"{task.name}: layer {choice.layer} of {choice.num_layers} is chosen: {compared}")
    for layer, score in sorted(choice.test.items()):
        print(f"test, layer {layer}: {score.value:.4f} ({score.low:.4f} to {score.high:.4f})")


def results_folder(model: str, task: str) -> Path:
    """Return the default folder of the results; characters of the task's name that are unsafe in paths are replaced."""
    plain = re.sub(r"[^\w.-]+", "_", task)[:100]
    return Path("selected") / f"{model}-{plain}"
