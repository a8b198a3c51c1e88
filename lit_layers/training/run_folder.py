"""The folder of one run: its checkpoints, complete or not there, who owns it, and what it says about itself."""

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
from lit_layers.identity import Lineage, of_one_training
from lit_layers.models.build import save, true_vocab_size, weights_hash
from lit_layers.models.saved import load
from lit_layers.schema import RUN_FILE, run_facts
from lit_layers.series.checkpoint import Checkpoint
from lit_layers.series.checkpoint_sources import FolderSource
from lit_layers.series.opening import find_checkpoint
from lit_layers.training.datamodules import LitStepData, LitTextData

logger = logging.getLogger(__name__)
_NAME = re.compile(r"step-(\d{9,})")


def step_folder(root: Path, step: int) -> Path:
    """Return `<root>/step-000001000`: names sort as steps do."""
    return root / f"step-{step:09d}"


def saved_steps(root: Path) -> list[int]:
    """Return the steps whose folders are complete, in order."""
    return sorted(int(match[1]) for path in root.glob("step-*") if (match := _NAME.fullmatch(path.name)))


def write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Fill a hidden temporary folder, make it durable and rename it: a kill leaves all of `folder` or nothing.

    Raises:
        InputError: where it cannot be written, as on a full disk.
    """
    temporary = folder.with_name(f".tmp-{folder.name}")
    with refused(f"cannot write {folder}", "; what was saved before is whole: mend it and go on with --resume last"):
        try:
            for leftover in {temporary, *folder.parent.glob(".tmp-step-*")}:  # of a killed save
                shutil.rmtree(leftover, ignore_errors=True)
            temporary.mkdir(parents=True)
            fill(temporary)
            for path in [*temporary.rglob("*"), temporary]:
                sync(path)
            if folder.exists():
                shutil.rmtree(folder)
            temporary.rename(folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)  # on a full disk its place is wanted
            raise
        sync(folder.parent)


def save_step(model: nn.Module, root: Path, step: int, tokenizer: str | Path | None) -> None:
    """Write the model of a step as a Hugging Face folder, complete or not at all.

    A step that is there was saved with these weights: a training that goes back takes later ones out of its root.
    """
    folder = step_folder(root, step)
    if not folder.exists():
        write_folder(folder, lambda folder: save(model, folder, tokenizer))


@dataclass(frozen=True)
class Origin:
    """The steps and tokens that a model had been trained for before this run; None: tokens that nobody knows.

    `source` names the checkpoint: `init_from` and what provenance says of it.
    """

    step: int = 0
    tokens: int | None = 0
    source: dict[str, Any] = field(default_factory=dict)

    def tokens_at(self, step: int, tokens_per_step: int | None) -> int | None:
        """All tokens up to a step of the axis, where they are known."""
        if self.tokens is None or tokens_per_step is None:
            return None
        return self.tokens + (step - self.step) * tokens_per_step

    def describe(self) -> dict[str, Any]:
        """Plain JSON, for run.json."""
        return {"step": self.step, "tokens": self.tokens, **self.source}


def origin_of(trainer: L.Trainer) -> Origin:
    """That of the module in training; zero for a module that knows of none."""
    return getattr(trainer.lightning_module, "origin", None) or Origin()


def axis_step(trainer: L.Trainer) -> int:
    """The optimizer steps that the model has seen: those before this run and those of this run."""
    return origin_of(trainer).step + trainer.global_step


def planned_steps(trainer: L.Trainer) -> int | None:
    """Optimizer steps of this run, by the Trainer's `max_steps` and `max_epochs`; None where neither ends it."""
    steps = trainer.estimated_stepping_batches
    return int(steps) if 0 < steps < math.inf else None


def find_origin(name: str) -> tuple[Checkpoint, Origin]:
    """The checkpoint that `init_from` names, and what its step and tokens make of the axis.

    A checkpoint of no known step counts as the beginning: the axis then starts at 0.

    Raises:
        InputError: no such checkpoint.
    """
    checkpoint = find_checkpoint(name)
    source = {"init_from": name, **checkpoint.provenance()}
    if checkpoint.step is None:
        return checkpoint, Origin(source=source)
    return checkpoint, Origin(checkpoint.step, checkpoint.tokens, source)


def own_origin(root: Path, described: dict[str, Any]) -> tuple[Checkpoint, Origin] | None:
    """The same from the run's own folder, whose first step holds those weights; None where that step is gone."""
    source = {name: value for name, value in described.items() if name not in ("step", "tokens")}
    origin = Origin(described["step"], described["tokens"], source)
    folder = step_folder(root, origin.step)
    if not (folder / "config.json").is_file():
        return None
    return Checkpoint(root.name, folder.name, FolderSource(folder), step=origin.step, tokens=origin.tokens), origin


def check_tokenizer(folder: Path, data: Any, name: str | None) -> None:
    """Refuse token ids that mean other words to the model in `folder`.

    Raises:
        InputError: where the model carries a tokenizer and the text was made with another.
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
Weights = Callable[[], str]  # returns their hash
CONFIG_FILE, MEASUREMENTS, ABANDONED = "config.yaml", "measurements.jsonl", "abandoned"
_REQUIRED = ("run", "id", "config")
# What any watched training writes, and what `fit` writes: elsewhere such files may be the user's own.
_WATCHED = (RUN_FILE, MEASUREMENTS, f"step-{'[0-9]' * 9}*", ".tmp-step-*", "values", ABANDONED, "report.html")
_FITTED = (*_WATCHED, CONFIG_FILE, "metrics.jsonl", "step-*", "resume", "wandb/*")
# What a resumed run may do otherwise: neither the data's order nor the weights depend on it.
_FREE = {
    "model": {"compile", "activation_checkpointing", "decay_steps"},
    "data": {"num_workers", "validation_batch_size"},
}


def refuse_used_folder(root: Path, if_exists: IfExists, *, is_fit: bool = False) -> None:
    """Refuse to mix two runs.

    Raises:
        InputError: where `root` holds a run and the user did not ask to overwrite it or to go on with it.
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
    """Make `root` the folder of a training that begins at a step, or goes on there.

    Args:
        run: the name of the run; None: that of the run that is resumed, or of the folder.
        weights: those that the training begins with; None: they are sharded.
        saved_by: the id of the training that saved the state to go on from, if the state says it.

    Raises:
        InputError: where `root` holds a run and the user did not ask to overwrite it, or a training that did not have
            these weights at this step.
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
    measured = [m for m in of_one_training(records.read(root / MEASUREMENTS), lineage) if m.run == run]
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
    """Note that the training in `root` goes on from a step, and take what it had made behind that step out of its run.

    Checkpoints of later steps are moved to the folder `abandoned`. Where the training goes back, and does not come to
    the same later steps again, a line of the last step that stays says so in `measurements.jsonl`.
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
    """What the run in `root` says of where it began on the axis of training."""
    return run_facts(root, needed=_REQUIRED).get("origin") or Origin().describe()


def check_same_run(root: Path, options: Mapping[str, Any]) -> None:
    """Refuse to go on with other data, another model or another seed than the run in `root` has.

    Raises:
        InputError: naming the first option that differs.
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
    """The last step of the run, where no other is said."""
    model = (options.get("model") or {}).get("init_args") or {}
    return (
        model.get("decay_steps") or (options.get("trainer") or {}).get("max_steps") if "decay_steps" in model else None
    )


def _flat(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        return {name: value}
    return {key: item for inner, part in value.items() for key, item in _flat(part, f"{name}.{inner}").items()}


class RunFolder(L.Callback):
    """Takes over `root` just before the first step, when all that could be refused has been checked.

    `run.json` and `config.yaml` say what the run is; what an earlier one left there (only what runs write) is removed
    once nothing can refuse any more, or with `resume` kept and gone on with. `goes_back`: not from its last state, from
    where it comes to the same steps again. The first callback of a run, so that the
    others find the folder ready.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        config: str,
        options: Mapping[str, Any],
        mirror: Any | None,  # W&B
        resume: bool = False,
        goes_back: bool = False,
    ) -> None:
        self.root, self.config, self.options, self.mirror = Path(root), config, dict(options), mirror
        self.resume, self.goes_back, self.run_id = resume, goes_back, _new_id()
        self.started, self._found = False, _run_files(self.root, is_fit=True)  # before this run's loggers write there

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
        """Options may be the same and yet name other text, or another machine choose another precision."""
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
        """Go on under the run's own id, so that its curves also go on in W&B."""
        self.run_id = run_facts(self.root, needed=_REQUIRED)["id"]
        self._clean_up()
        if not (self.root / CONFIG_FILE).exists():  # killed between the two
            replace_file(self.root / CONFIG_FILE, self.config)
        resume_at(self.root, step, goes_back=self.goes_back)
        if self.mirror is not None:
            self.mirror.open(self.root, run_id=self.run_id, config=self.options)
        self.started = True

    def _take_over(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        facts = self._describe(trainer, pl_module)  # may take its time; from here on a kill leaves no run or a new one
        self._clean_up()
        backup = self.root / f".old-{self.run_id}"
        _move(self._found, self.root, backup)
        try:
            write_json(self.root / RUN_FILE, facts)
            replace_file(self.root / CONFIG_FILE, self.config)
            if self.mirror is not None:
                self.mirror.open(self.root, run_id=self.run_id, config=self.options)
        except BaseException:
            # The mirror may still refuse: then the earlier run is as it was.
            _remove(_run_files(self.root, is_fit=True))
            _move(_run_files(backup, is_fit=True), backup, self.root)
            raise
        finally:
            shutil.rmtree(backup, ignore_errors=True)

    def _clean_up(self) -> None:
        """Remove what a run that was killed while it took over had put backup: the user had asked to overwrite it."""
        for leftover in self.root.glob(".old-*"):
            shutil.rmtree(leftover)

    def close(self, **facts: Any) -> None:
        """Add what is known only at the end, e.g. the wall time; seconds of a resumed run's parts are summed."""
        before = run_facts(self.root)
        if not before:  # others removed it: a part of it would hide that
            return
        for name in facts.keys() & before.keys() if self.resume else ():
            if name.endswith("seconds"):
                facts[name] += before[name]
        write_json(self.root / RUN_FILE, {**before, **facts})

    def _describe(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
        model: Any = pl_module.model
        data: Any = getattr(trainer, "datamodule", None)
        origin = origin_of(trainer)
        described = {
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
            described["data"] = data.describe()
        elif isinstance(getattr(data, "shards", None), TokenShards):  # the user's own, of prepared text
            described["data"] = LitTextData.describe(data)
        return described


def _new_id() -> str:
    """The id that W&B's sweep agent has given its run already, for W&B takes no other there; else one of our own."""
    fresh = uuid.uuid4().hex[:8]
    return os.environ.get("WANDB_RUN_ID") or fresh if os.environ.get("WANDB_SWEEP_ID") else fresh


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _run_files(root: Path, *, is_fit: bool = False) -> list[Path]:
    """What a run wrote there, and nothing else; of one that is only watched, nothing without one of the first three."""
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
