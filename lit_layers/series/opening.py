"""Models and series by their names: one alone, several beside each other, a checkpoint, the words of a command line."""

import dataclasses
import functools
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_layers.errors import InputError
from lit_layers.files.gguf_files import GgufFile, is_gguf
from lit_layers.files.hub import Hub, ListedFile, content_hash
from lit_layers.schema import SEED, refuse_outside
from lit_layers.series.auditing import audit
from lit_layers.series.checkpoint import Checkpoint, Grammar, Listing, Series
from lit_layers.series.checkpoint_sources import TOKENIZER, FolderSource, HubSource, ModelFiles, Source, at_once
from lit_layers.series.hub_series import MAIN, HubRevisions, Manifest, known_facts
from lit_layers.series.local_series import LightningCheckpoints, StepFolders


class Models(Series):
    """A set of models in the order given: folders, or repositories of the Hub, at a branch with `NAME@REVISION`.

    A repository that cannot be had is in the listing, and asking for its files raises why: the others are
    measured. `tokenizers` names one, by the model's name as it stands in `models`, for those of them that carry no
    tokenizer.json.

    Raises:
        InputError: an empty list, a name that is there twice, a folder that does not exist; on first use, if none of
            the models can be had, why the first of them cannot.
    """

    def __init__(
        self,
        models: Sequence[str],
        *,
        name: str = "models",
        tokenizers: Mapping[str, str] | None = None,
    ) -> None:
        if isinstance(models, str) or not models:
            raise InputError(f"models: expected a list of folders or names on the Hub, got {models!r}")
        if double := [model for model in models if list(models).count(model) > 1]:
            raise InputError(f"models: {double[0]} is there twice")
        self.models, self.name, self.tokenizers = list(models), name, dict(tokenizers or {})

    def find(self) -> Listing:
        for model in self.models:
            if is_gguf(model):
                raise InputError(f"models: {model} is a GGUF file, which is measured alone: name it as the one model")
            if model.startswith((".", "/", "~")) and not os.path.isdir(model):
                raise InputError(f"models: expected a folder with a model, {model} does not exist")
        hub = None if all(map(os.path.isdir, self.models)) else Hub()
        sources = at_once(lambda model: _source(hub, model), self.models)
        reasons = [source.why if isinstance(source, HubSource) else None for source in sources]
        if all(reasons):
            raise InputError(reasons[0])
        return Listing(tuple(Checkpoint(self.name, *named) for named in zip(self.models, sources, strict=True)))

    def tokenizer(self, checkpoint: Checkpoint) -> str | None:
        return super().tokenizer(checkpoint) or self.tokenizers.get(checkpoint.name)


class OneModel(Series):
    """A model alone: a folder, or a repository of the Hub, of which each file is downloaded when it is read.

    A folder or revision that is named after a step, such as step-000001000 or step1000, is that step. With `untrained`
    it is the model of its config.json with new weights of that seed, as its library initialises them: a run of its own,
    `NAME@untrained-SEED`, without a step, whose weights are not looked for.

    Raises:
        InputError: no such model, a seed below 0.
    """

    is_alone = True

    def __init__(self, model: str | Path, *, revision: str | None = None, untrained: int | None = None) -> None:
        self.model, self.name, self.revision, self.untrained = model, os.fspath(model), revision, untrained
        refuse_outside("", {"untrained": SEED}, {"untrained": untrained})

    @functools.cached_property
    def files(self) -> ModelFiles:
        """Its files, opened on first use."""
        return ModelFiles(self.model, revision=self.revision)

    def find(self) -> Listing:
        if is_gguf(self.name) and self.untrained is None:
            if self.revision is not None:
                raise InputError(f"revision: {self.name} is a file and has no revision {self.revision!r}: leave it out")
            return Listing((Checkpoint(self.name, self.name, _OneFile(GgufFile(self.name)), is_of_a_series=False),))
        source = _Alone(self.files, self.revision, self.untrained)
        if self.untrained is not None:
            name = f"{self.name.rstrip('/')}@untrained-{self.untrained}"
            return Listing((Checkpoint(name, name, source, is_of_a_series=False, run=name),))
        step = re.fullmatch(r"step-?(\d+)", Path(self.revision or self.name).name)
        number = int(step[1]) if step else None
        return Listing((Checkpoint(self.name, self.name, source, step=number, is_of_a_series=False),))


@dataclass(frozen=True)
class _Alone(Source):
    model: ModelFiles
    revision: str | None
    untrained: int | None = None

    @property
    def files(self) -> Mapping[str, ListedFile]:
        return {}  # nobody compares them with others

    @property
    def is_here(self) -> bool:
        return self.model.local

    def read(self, path: str) -> bytes:
        return self.model.fetch(path).read_bytes()

    def fetch(self) -> Path:
        return self.model.fetch("config.json").parent

    def describe(self) -> dict[str, Any]:
        commit = {} if self.model.local else {"revision": self.revision or MAIN, "commit": self.model.commit}
        seed = {} if self.untrained is None else {"untrained": {"seed": self.untrained}}
        return {"checkpoint": self.model.model, **commit, **seed}

    def tokenizer(self) -> str | None:
        if not self.model.has(TOKENIZER):
            return None
        return self.model.location if self.revision is None else f"{self.model.model}@{self.model.commit}"

    def load(self, folder: Path, dtype: Any, offload: Any = None) -> Any:
        from lit_layers.models.pixels import PREPROCESSOR  # torch, which names and steps do not need
        from lit_layers.models.saved import initialised, load  # torch, as above

        if self.untrained is not None:
            preprocessor = json.loads(self.read(PREPROCESSOR)) if self.model.has(PREPROCESSOR) else None
            about: Any = {"seed": self.untrained, "dtype": dtype, "preprocessor": preprocessor}
            return initialised(self.model.config, self.model.model, **about)
        return load(self.model.location, revision=self.model.commit, dtype=dtype, offload=offload)


@dataclass(frozen=True)
class _OneFile(Source):
    """A GGUF file, which is known by its hash."""

    file: GgufFile

    @functools.cached_property
    def files(self) -> Mapping[str, ListedFile]:
        path = self.file.path
        return {path.name: ListedFile(path.name, path.stat().st_size, content_hash(path))}

    def read(self, path: str) -> bytes:
        if path != "config.json":
            raise FileNotFoundError(path)
        return json.dumps(self.file.settings).encode()

    def fetch(self) -> Path:
        return self.file.path

    def weights(self) -> dict[str, str]:
        return {name: file.hash for name, file in self.files.items()}

    def describe(self) -> dict[str, Any]:
        about = {"weight_files": self.weights(), "quantization": self.file.quantization}
        return {"checkpoint": str(self.file.path)} | about

    def tokenizer(self) -> str | None:
        return str(self.file.path)

    def load(self, folder: Path, dtype: Any, offload: Any = None) -> Any:
        from lit_layers.models.saved import load_gguf  # torch, which names and steps do not need

        return load_gguf(self.file, dtype=dtype, offload=offload)


def _source(hub: Hub | None, model: str) -> Source:
    if hub is None or os.path.isdir(model):
        return FolderSource(Path(model))
    repo, _, revision = model.partition("@")
    revision = revision or MAIN
    try:
        commits = hub.commits(repo)
        why = None if revision in commits else f"models: {repo} has no branch {revision}; it has {len(commits)}"
    except InputError as error:
        commits, why = {}, str(error)
    return HubSource(hub, repo, revision, commits.get(revision, ""), why)


_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


def open_series(
    name: str,
    steps: Any = "all",
    *,
    grammar: str = "auto",
    stage: int = 1,
    ingredient: int | None = None,
    model: str | None = None,
) -> list[Series]:
    """The series that a folder, a repository of the Hub or a manifest holds: of a manifest one for each repository.

    Raises:
        InputError: a name that is none of these, options that do not fit it.
    """
    staged: dict[str, Any] = {"stage": stage, "ingredient": ingredient}
    if os.path.isdir(name):
        if stage != 1 or ingredient is not None:
            raise InputError(f"{name} is a folder and has no stages: leave --stage and --ingredient out")
        if any(Path(name).glob("*.ckpt")):
            if grammar != "auto":
                raise InputError("grammar: *.ckpt files record their own step: leave --grammar out")
            return [LightningCheckpoints(name, steps, model=model)]
        _refuse_submodule(name, model)
        return [StepFolders(name, steps, grammar=grammar)]
    _refuse_submodule(name, model)
    if name.endswith((".yaml", ".yml")):
        repos = Manifest(name).names()
        if not repos:
            raise InputError(f"{name} names no repository in full: give one, such as ORGANIZATION/NAME")
        return [HubRevisions(repo, steps, grammar=grammar, manifest=name, **staged) for repo in repos]
    # checkpoints/first is spelled like a repository: where its parent is a folder here, a folder was meant.
    if not _REPOSITORY.fullmatch(name) or Path(name).parent.is_dir():
        raise InputError(f"expected a folder, ORGANIZATION/NAME on the Hub or a manifest, {name} does not exist")
    return [HubRevisions(name, steps, grammar=grammar, **staged)]


def _refuse_submodule(name: str, model: str | None) -> None:
    if model is not None:
        raise InputError(f"submodule: {name} holds plain models, and *.ckpt files have submodules: leave {model!r} out")


def read_steps(text: str) -> Any:
    """Steps as a recipe would write them; a bare list needs no brackets.

    Raises:
        InputError: what is no YAML.
    """
    import yaml

    try:
        value = yaml.safe_load(text)
        if isinstance(value, int):
            return [value]
        if isinstance(value, str) and "," in value:
            return yaml.safe_load(f"[{value}]")
    except yaml.YAMLError as error:
        raise InputError(f"steps: expected all, a list or a schedule, got {text!r}") from error
    return value


UNAUDITED = "unaudited"
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?")


def find_checkpoint(name: str, *, audited: bool = True) -> tuple[Checkpoint, str]:
    """The checkpoint in a folder or at NAME[@REVISION] of the Hub, and the verdict of the audit of its whole series.

    Its step and tokens are known where it belongs to a series of steps; elsewhere there is nothing to audit it against,
    and the verdict is `unaudited`, as it is where `audited` is False.

    Raises:
        InputError: a name that is neither, a revision that is not there.
    """
    folder = Path(name)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise InputError(f"expected a model in {name}, found no config.json there")
        # Whatever the folder is named, its siblings may be a series.
        place = Path(os.path.abspath(folder))
        return _in_series(StepFolders(place.parent), place.name, audited) or (
            Checkpoint(place.name, place.name, FolderSource(folder)),
            UNAUDITED,
        )
    if folder.suffix == ".ckpt" and folder.is_file():
        return LightningCheckpoints(folder).checkpoints[0], UNAUDITED
    if not _NAME.fullmatch(name):
        raise InputError(f"expected a folder with a model, a .ckpt or NAME@REVISION of the Hub, {name} is neither")
    repo, _, revision = name.partition("@")
    if revision not in ("", MAIN):
        step = Grammar("stages").parse(revision)
        staged = {} if step is None else {"stage": step.stage, "ingredient": step.ingredient}
        judged = _in_series(HubRevisions(repo, **staged), revision, audited)
        if judged is not None:
            return judged
    (checkpoint,) = Models([name], name=repo)
    return (_last_step(checkpoint, repo) if revision in ("", MAIN) else checkpoint), UNAUDITED


def _in_series(series: Series, name: str, audited: bool) -> tuple[Checkpoint, str] | None:
    """The checkpoint of that name, judged beside all others; None where it is in no series of steps."""
    try:
        checkpoint = next((each for each in series.listing.checkpoints if each.name == name), None)
    except InputError:  # no series; what else is wrong is said by whoever looks for the one checkpoint
        return None
    if checkpoint is None or checkpoint.step is None:
        return None
    return checkpoint, audit(series).verdict(checkpoint) if audited else UNAUDITED


def _last_step(checkpoint: Checkpoint, repo: str) -> Checkpoint:
    """`main` with the step that it is said to be."""
    facts = known_facts(repo)
    if facts.last_step is None or not facts.main_is_last:
        return checkpoint
    tokens = None if facts.tokens_per_step is None else facts.last_step * facts.tokens_per_step
    return dataclasses.replace(checkpoint, step=facts.last_step, tokens=tokens)
