"""The folder of one run: its checkpoints, its metadata, and the checks before a run writes there."""

import datetime
import json
import logging
import math
import os
import re
import shutil
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import lightning as L
from torch import nn

from lit_layers import records
from lit_layers.data.preparing import TokenShards
from lit_layers.data.tokenization import MAIN, load_tokenizer, tokenizer_hash
from lit_layers.errors import InputError, refused
from lit_layers.files.durable import replace_file, sync, write_json
from lit_layers.identity import Lineage, drop_abandoned
from lit_layers.models.build import save, true_vocab_size, weights_hash
from lit_layers.models.null import Null
from lit_layers.models.saved import load
from lit_layers.schema import RUN_FILE, run_facts
from lit_layers.series.checkpoint import Checkpoint
from lit_layers.series.checkpoint_sources import FolderSource
from lit_layers.series.opening import find_checkpoint
from lit_layers.training.datamodules import LitStepData, LitTextData

logger = logging.getLogger(__name__)
_NAME = re.compile(r"step-(\d{9,})")


def step_folder(root: Path, step: int) -> Path:
    """Return the folder of a saved step, such as `<root>/step-000001000`. Such names sort like the steps."""
    return root / f"step-{step:09d}"


def saved_steps(root: Path) -> list[int]:
    """Return the steps that have a complete folder, in order."""
    return sorted(int(match[1]) for path in root.glob("step-*") if (match := _NAME.fullmatch(path.name)))


def write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Write `folder` completely or not at all, even if the process is killed.

    A hidden temporary folder is filled, synced to disk and then renamed.

    Args:
        fill: function that writes the content into a given folder.

    Raises:
        InputError: if the folder cannot be written, for example on a full disk.
    """
    temporary = folder.with_name(f".tmp-{folder.name}")
    with refused(f"cannot write {folder}", "; what was saved before is whole: mend it and go on with --resume last"):
        try:
            for leftover in {temporary, *folder.parent.glob(".tmp-step-*")}:  # left behind by interrupted saves
                shutil.rmtree(leftover, ignore_errors=True)
            temporary.mkdir(parents=True)
            fill(temporary)
            for path in [*temporary.rglob("*"), temporary]:
                sync(path)
            if folder.exists():
                shutil.rmtree(folder)
            temporary.rename(folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)  # to free space on a full disk
            raise
        sync(folder.parent)


def save_step(model: nn.Module, root: Path, step: int, tokenizer: str | Path | None) -> None:
    """Save the model of a step as a Hugging Face folder, complete or not at all.

    An existing folder of this step is not written again, because it holds the same weights. A run that goes back to an
    earlier step moves the folders of later steps away.
    """
    folder = step_folder(root, step)
    if not folder.exists():
        write_folder(folder, lambda folder: save(model, folder, tokenizer))


@dataclass(frozen=True)
class Origin:
    """Steps and tokens of a model's training before this run; `tokens` is None if unknown.

    `source` describes the checkpoint that the run starts from: `init_from` and its provenance.
    """

    step: int = 0
    tokens: int | None = 0
    source: dict[str, Any] = field(default_factory=dict)

    def tokens_at(self, step: int, tokens_per_step: int | None) -> int | None:
        """Return the number of training tokens up to a step, including those before this run, or None if unknown."""
        if self.tokens is None or tokens_per_step is None:
            return None
        return self.tokens + (step - self.step) * tokens_per_step

    def describe(self) -> dict[str, Any]:
        """Return the origin as plain JSON for run.json."""
        return {"step": self.step, "tokens": self.tokens, **self.source}


def origin_of(trainer: L.Trainer) -> Origin:
    """Return the steps and tokens of the model's training before this run: 0 if the trained module has no `origin`."""
    return getattr(trainer.lightning_module, "origin", None) or Origin()


def axis_step(trainer: L.Trainer) -> int:
    """Return the number of optimizer steps of the model, including those before this run."""
    return origin_of(trainer).step + trainer.global_step


def planned_steps(trainer: L.Trainer) -> int | None:
    """Return the number of steps after which `max_steps` or `max_epochs` ends this run, or None if neither does."""
    steps = trainer.estimated_stepping_batches
    return int(steps) if 0 < steps < math.inf else None


def find_origin(name: str) -> tuple[Checkpoint, Origin]:
    """Return the checkpoint that `init_from` names, and the origin of a run that starts from it.

    If the checkpoint's step is unknown, the run starts at step 0.

    Raises:
        InputError: if there is no such checkpoint.
    """
    checkpoint = find_checkpoint(name)
    source = {"init_from": name, **checkpoint.provenance()}
    if checkpoint.step is None:
        return checkpoint, Origin(source=source)
    return checkpoint, Origin(checkpoint.step, checkpoint.tokens, source)


def own_origin(root: Path, described: dict[str, Any]) -> tuple[Checkpoint, Origin] | None:
    """Return the checkpoint that a run started from, and the run's origin, as stored in the run's own folder.

    The first step folder of the run holds a copy of the weights that the run started from.

    Args:
        described: the origin as it is stored in run.json.

    Returns:
        The checkpoint and the origin, or None if that step folder no longer exists.
    """
    source = {name: value for name, value in described.items() if name not in ("step", "tokens")}
    origin = Origin(described["step"], described["tokens"], source)
    folder = step_folder(root, origin.step)
    if not (folder / "config.json").is_file():
        return None
    return Checkpoint(root.name, folder.name, FolderSource(folder), step=origin.step, tokens=origin.tokens), origin


def check_tokenizer(folder: Path, data: Any, name: str | None) -> None:
    """Check that the data's token ids come from the tokenizer of the model in `folder`.

    Raises:
        InputError: if the tokenizer in `folder` is not the one that the data were made with.
    """
    used = getattr(getattr(data, "shards", None), "tokenizer_hash", None)
    if used is None:
        return
    if not (folder / MAIN).is_file():
        logger.warning("%s carries no %s: whether the text was made with its tokenizer is not checked", name, MAIN)
        return
    carried = tokenizer_hash(load_tokenizer(str(folder / MAIN)).tokenizer)
    if carried != used:
        raise InputError(
            f"tokenizer: {name} was trained with another one than {data.tokenizer} (hash {carried}, not {used}); name "
            "its own with --tokenizer"
        )


IfExists = Literal["refuse", "overwrite", "resume"]
Weights = Callable[[], str]  # returns a hash of the weights
CONFIG_FILE, MEASUREMENTS, ABANDONED = "config.yaml", "measurements.jsonl", "abandoned"
_REQUIRED = ("run", "id", "config")
# Patterns of the files that a watched training writes, and of those that `fit` writes. No other files are ever removed:
# in the folder of a watched training, files such as config.yaml may belong to the user.
_NULLS = tuple(f"null-{kind}" for kind in get_args(Null))
_WATCHED = (RUN_FILE, MEASUREMENTS, f"step-{'[0-9]' * 9}*", ".tmp-step-*", "values", ABANDONED, "report.html", *_NULLS)
_FITTED = (*_WATCHED, CONFIG_FILE, "metrics.jsonl", "step-*", "resume", "wandb/*")
# Options that a resumed run may change: neither the order of the data nor the weights depend on them. `decay_steps` is
# the exception: `check_same_run` compares it by `_decay_end`, which replaces None by `max_steps`.
_FREE = {
    "model": {"compile", "activation_checkpointing", "decay_steps"},
    "data": {"num_workers", "validation_batch_size"},
}


def refuse_used_folder(root: Path, if_exists: IfExists, *, is_fit: bool = False) -> None:
    """Refuse a root that already holds a run.

    Args:
        is_fit: whether the caller is `lit-layers fit`. If so, files that only `fit` writes also show that there is a
            run, and the error names the options of `fit`.

    Raises:
        InputError: if `root` holds a run and `if_exists` is "refuse", or `if_exists` is unknown.
    """
    if if_exists not in get_args(IfExists):
        raise InputError(f"if_exists: expected one of {', '.join(get_args(IfExists))}, got {if_exists!r}")
    if if_exists == "refuse" and _run_files(root, is_fit=is_fit):
        steps = saved_steps(root)
        state = f"with checkpoints up to step {steps[-1]}" if steps else "without checkpoints"
        ways = "--resume last or --if_exists overwrite" if is_fit else 'if_exists="resume" or if_exists="overwrite"'
        raise InputError(f"root: {root} already holds a run {state}; choose another folder, {ways}")


def begin_training(
    root: Path, if_exists: IfExists, run: str | None, step: int, weights: Weights | None, saved_by: str | None
) -> None:
    """Start a new run in `root`, or resume the run in it at a step.

    Args:
        run: the name of the run. With None, it is the name of the resumed run, or that of the folder for a new run.
        weights: function that returns the hash of the weights at the start; None if they were not gathered.
        saved_by: id of the training that saved the state to resume from; None if it is unknown.

    Raises:
        InputError: if `root` holds a run and `if_exists` is "refuse", or if the run to resume did not have these
            weights at this step.
    """
    refuse_used_folder(root, if_exists)
    if if_exists == "resume" and _run_files(root):
        if (lineage := records.lineage_in(root)) is None:
            raise InputError(f"if_exists: {root} has no {RUN_FILE} of a training to resume; choose another root")
        _check_weights(root, lineage, run or lineage.run, step, weights, lineage.training == saved_by)
        resume_at(root, step, goes_back=True)
    else:
        _remove(_run_files(root))
        write_json(root / RUN_FILE, {"run": run or root.resolve().name, "id": uuid.uuid4().hex[:8], "started": _now()})


def _check_weights(
    root: Path, lineage: Lineage, run: str, step: int, weights: Weights | None, same_training: bool
) -> None:
    measured = [m for m in drop_abandoned(records.read(root / MEASUREMENTS), lineage) if m.run == run]
    known = {m.provenance.get("weights_hash") for m in measured if m.step == step} - {None}
    if not known and step in saved_steps(root):
        known = {weights_hash(load(step_folder(root, step)))}
    if same_training and (weights is None or not known):
        return
    if not known or weights is None or weights() not in known:
        steps = sorted({m.step for m in measured if m.step is not None} or saved_steps(root))
        raise InputError(
            f"if_exists: the run in {root} was not measured with these weights at step {step}: resume it from its own "
            f"checkpoint of a step that was measured ({', '.join(map(str, steps[-3:]))}), or choose another root"
        )


def resume_at(root: Path, step: int, *, goes_back: bool) -> None:
    """Record in `root` that its training resumes from a step, and move later checkpoints to the folder `abandoned`.

    Args:
        goes_back: whether the steps after `step` may give other weights than they did before. If so, the measurements
            of these steps become void: a new line in `measurements.jsonl` repeats the last valid measurement and lists
            the steps at which the run was resumed.
    """
    facts = run_facts(root)
    facts["resumed"] = [*facts.get("resumed", []), {"step": step, "at": _now(), "back": goes_back}]
    write_json(root / RUN_FILE, facts)
    for saved in saved_steps(root):
        if saved > step:
            (root / ABANDONED).mkdir(exist_ok=True)
            shutil.rmtree(step_folder(root / ABANDONED, saved), ignore_errors=True)
            step_folder(root, saved).rename(step_folder(root / ABANDONED, saved))
    measured = [m for m in records.latest(records.read(root / MEASUREMENTS)) if m.step is not None]
    rest = [m for m in measured if m.training == facts["id"] and (m.step or 0) <= step]
    if goes_back and 0 < len(rest) < len(measured):
        steps = [each["step"] for each in facts["resumed"] if each["back"]]
        records.append(root / MEASUREMENTS, replace(max(rest, key=lambda m: m.step or 0), resumed=steps))


def origin_in(root: Path) -> dict[str, Any]:
    """Return the origin that run.json in `root` records: steps and tokens before the run."""
    return run_facts(root, needed=_REQUIRED).get("origin") or Origin().describe()


def check_same_run(root: Path, options: Mapping[str, Any]) -> None:
    """Check that the options of a resumed run give the data, model, seed and optimizer of the run in `root`.

    Raises:
        InputError: if an option differs. The message names the first one.
    """
    before = run_facts(root, needed=_REQUIRED)["config"]
    now = json.loads(json.dumps(dict(options), default=str))
    ends = [_decay_end(each) for each in (before, now)]
    for each in (before, now):
        each["trainer"] = {"gradient_clip_val": (each.get("trainer") or {}).get("gradient_clip_val")}
    for group in ("seed_everything", "model", "data", "optimizer", "lr_scheduler", "trainer"):
        old, new = _flat(before.get(group), group), _flat(now.get(group), group)
        for option in sorted(old.keys() | new.keys()):
            name = option.split(".")[-1]
            if old.get(option) != new.get(option) and name not in _FREE.get(group, ()):
                raise InputError(
                    f"{option.replace('.init_args', '')}: the run in {root} has {old.get(option)}, got "
                    f"{new.get(option)}; a resumed run keeps it"
                )
    if ends[0] != ends[1]:
        raise InputError(
            f"model.decay_steps: the learning rate of the run in {root} decays until step {ends[0]}, got {ends[1]}; "
            f"say --model.decay_steps {ends[0]}"
        )


def _decay_end(options: Mapping[str, Any]) -> Any:
    """Return the step at which the learning rate stops decaying, or None if the module has no option `decay_steps`.

    The default of `decay_steps` is `max_steps`.
    """
    model = (options.get("model") or {}).get("init_args") or {}
    return (
        model.get("decay_steps") or (options.get("trainer") or {}).get("max_steps") if "decay_steps" in model else None
    )


def _flat(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        return {name: value}
    return {key: item for inner, part in value.items() for key, item in _flat(part, f"{name}.{inner}").items()}


class RunFolder(L.Callback):
    """A callback that prepares `root` just before the first step, after all checks have passed.

    It writes `run.json` and `config.yaml`. It removes the files of an earlier run, and no others. With `resume`, it
    keeps the files, and the earlier run continues. It must be the first callback, so that others find the folder ready.

    Args:
        config: the text of `config.yaml`.
        options: the same options as plain values, for `run.json` and W&B.
        mirror: the object that mirrors the run to W&B, or None.
        resume: whether the run in `root` continues.
        goes_back: whether the run resumes at a step that the user chose. The measurements of later steps are then void.
            A run that resumes from its last checkpoint repeats the same steps, so its measurements stay valid.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        config: str,
        options: Mapping[str, Any],
        mirror: Any | None,
        resume: bool = False,
        goes_back: bool = False,
    ) -> None:
        self.root, self.config, self.options, self.mirror = Path(root), config, dict(options), mirror
        self.resume, self.goes_back, self.run_id = resume, goes_back, _new_id()
        # List the files of an earlier run now, before the loggers of this run add files.
        self.started, self._found = False, _run_files(self.root, is_fit=True)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        if self.resume:
            self._check_inputs(self._describe(trainer, pl_module))
            self.reopen(axis_step(trainer))
        else:
            self._take_over(trainer, pl_module)
            self.started = True

    def _check_inputs(self, now: Mapping[str, Any]) -> None:
        """Check that a resumed run has the same inputs as before.

        Inputs such as the text of a corpus or a default precision can change while the options stay the same.
        """
        before = run_facts(self.root, needed=_REQUIRED)
        started = [(each.get("origin") or {}).get("weight_files") for each in (before, now)]
        for name, old, new in (
            ("the weights of model.init_from", *started),
            ("trainer.precision", before.get("precision"), now["precision"]),
            ("corpus", *(each.get("data", {}).get("corpus_hash") for each in (before, now))),
            ("tokenizer", *(each.get("data", {}).get("tokenizer_hash") for each in (before, now))),
            ("data.source", *(each.get("data", {}).get("data_hash") for each in (before, now))),
        ):
            if old != new:
                raise InputError(f"{name}: the run in {self.root} has {old}, found {new}; a resumed run keeps it")

    def reopen(self, step: int) -> None:
        """Resume the run in the folder at a step, and keep its id so that its W&B curves continue."""
        self.run_id = run_facts(self.root, needed=_REQUIRED)["id"]
        self._clean_up()
        if not (self.root / CONFIG_FILE).exists():  # the run was killed after it wrote run.json
            replace_file(self.root / CONFIG_FILE, self.config)
        resume_at(self.root, step, goes_back=self.goes_back)
        if self.mirror is not None:
            self.mirror.open(self.root, run_id=self.run_id, config=self.options)
        self.started = True

    def _take_over(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # `_describe` hashes the data, which is slow, so it is called before any file changes: if the process is killed
        # here, the earlier run remains. If it is killed later, the folder holds no run or the new one.
        facts = self._describe(trainer, pl_module)
        self._clean_up()
        backup = self.root / f".old-{self.run_id}"
        _move(self._found, self.root, backup)
        try:
            write_json(self.root / RUN_FILE, facts)
            replace_file(self.root / CONFIG_FILE, self.config)
            if self.mirror is not None:
                self.mirror.open(self.root, run_id=self.run_id, config=self.options)
        except BaseException:
            # W&B may refuse the run only now: put the earlier run back.
            _remove(_run_files(self.root, is_fit=True))
            _move(_run_files(backup, is_fit=True), backup, self.root)
            raise
        finally:
            shutil.rmtree(backup, ignore_errors=True)

    def _clean_up(self) -> None:
        """Remove the backups that a killed `_take_over` left: files that the user had asked to overwrite."""
        for leftover in self.root.glob(".old-*"):
            shutil.rmtree(leftover)

    def close(self, **facts: Any) -> None:
        """Add facts that are known only at the end, such as wall time, to run.json.

        For a resumed run, values whose name ends in `seconds` are added to the earlier ones.
        """
        before = run_facts(self.root)
        # Write nothing if the file was removed during the run: a new file with only these facts would hide that.
        if not before:
            return
        for name in facts.keys() & before.keys() if self.resume else ():
            if name.endswith("seconds"):
                facts[name] += before[name]
        write_json(self.root / RUN_FILE, {**before, **facts})

    def _describe(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
        model: Any = pl_module.model
        data: Any = getattr(trainer, "datamodule", None)
        origin = origin_of(trainer)
        facts = {
            "run": self.root.resolve().name,
            "id": self.run_id,
            "started": _now(),
            "max_steps": origin.step + trainer.max_steps,
            "origin": origin.describe(),
            "tokens_per_step": getattr(data, "tokens_per_step", None),
            "world_size": trainer.world_size,
            "device": str(trainer.strategy.root_device),
            "precision": str(trainer.precision),
            "model": {
                "class": type(model).__name__.removeprefix("FSDP"),
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                **({"vocab_size": true_vocab_size(model)} if hasattr(model, "config") else {}),
            },
            "config": self.options,
        }
        if isinstance(data, LitStepData):
            facts["data"] = data.describe()
        elif isinstance(getattr(data, "shards", None), TokenShards):  # the user's own data module, with prepared text
            facts["data"] = LitTextData.describe(data)
        return facts


def _new_id() -> str:
    """Return a new run id. In a W&B sweep, return the id that W&B's agent has set, as W&B accepts no other."""
    fresh = uuid.uuid4().hex[:8]
    return os.environ.get("WANDB_RUN_ID") or fresh if os.environ.get("WANDB_SWEEP_ID") else fresh


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _run_files(root: Path, *, is_fit: bool = False) -> list[Path]:
    """Return the files in `root` that a run has written.

    With `is_fit`, files that only the command `fit` writes count even if run.json is missing. Without `is_fit`, the
    list is empty unless `root` contains run.json, measurements or a saved step.
    """
    if not is_fit and not any(path for pattern in _WATCHED[:3] for path in root.glob(pattern)):
        return []
    patterns = _FITTED if is_fit or "config" in run_facts(root) else _WATCHED
    return [*dict.fromkeys(path for pattern in patterns for path in root.glob(pattern))]


def _move(paths: list[Path], root: Path, folder: Path) -> None:
    for path in paths:
        target = folder / path.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)


def _remove(paths: list[Path]) -> None:
    for path in paths:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
