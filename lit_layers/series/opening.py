"""Open series and models by name: folders, repositories on the Hub, manifests, single models and sets of models."""

import fnmatch
import functools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import with_config
from typing_extensions import TypedDict

from lit_layers import schema
from lit_layers.errors import InputError
from lit_layers.files.hub import Hub
from lit_layers.schedule import Steps
from lit_layers.schema import Count, Step
from lit_layers.series.checkpoint import Checkpoint, Grammar, Listing, Series, StepName, ordered, recognize
from lit_layers.series.checkpoint_sources import MAIN, FolderSource, HubSource, ModelFiles, Source, ask_all, is_hub_name
from lit_layers.series.local_series import LightningCheckpoints, StepFolders

_INSTALLED, _CHECKOUT = Path(__file__).parent / "manifests", Path(__file__).parents[2] / "checkpoints"
FOLDER = _INSTALLED if _INSTALLED.is_dir() else _CHECKOUT


@dataclass(frozen=True)
@with_config(schema.STRICT)
class Facts:
    """One entry of a manifest: facts about the repositories whose names match. None means unknown.

    Args:
        names: name patterns of the repositories.
        grammar: how branches are named; a list has one grammar for each training run in the repository.
        repositories: template for the name of each step's repository, if every step is a repository. `{repo}` is the
            repository of the series, `{step}` the step, `{thousands}` the step divided by 1000.
        ranges: (first, last, interval) of the expected steps.
        tokens_per_step: tokens per optimizer step.
        main_is_last: whether `main` equals the last step.
        warm_up: steps up to this one may have equal weights.
        suspect: reasons why steps are known to be wrong although their hashes do not show it.
    """

    names: str | list[str]
    grammar: str | list[str] | None = None
    repositories: str | None = None
    ranges: tuple[tuple[Step, Step, Step], ...] = ()  # (first, last, interval) of each range
    tokens_per_step: int | None = None
    main_is_last: bool | None = None
    warm_up: Count = 1
    suspect: dict[Step, str] = field(default_factory=dict)

    def expected(self) -> tuple[int, ...] | None:
        """Return the steps that belong to the series; None if they are unknown."""
        steps = {step for first, last, by in self.ranges for step in range(first, last + 1, by)}
        return tuple(sorted(steps)) or None


@with_config(schema.STRICT)
class _Content(TypedDict):
    repositories: list[Facts]


def entries_of(manifest: str | Path) -> list[Facts]:
    """Return the entries of a manifest.

    Raises:
        InputError: the file is missing, is not valid YAML, or has unknown fields or wrong values.
    """
    return schema.read_yaml(Path(manifest), _Content, "see checkpoints/pythia.yaml")["repositories"]


def repositories_of(manifest: str | Path) -> list[str]:
    """Return the repositories that a manifest names without wildcards."""
    names = (name for entry in entries_of(manifest) for name in _listed(entry.names))
    return list(dict.fromkeys(name for name in names if not re.search(r"[*?\[]", name)))


def known_facts(repo: str, manifest: str | Path | None = None) -> Facts:
    """Return the first entry for a repository in a manifest or, if `manifest` is None, in the package's manifests.

    Raises:
        InputError: the named manifest has no entry for the repository.
    """
    for path in sorted(FOLDER.glob("*.yaml")) if manifest is None else [manifest]:
        for entry in entries_of(path):
            if any(fnmatch.fnmatchcase(repo, name) for name in _listed(entry.names)):
                return entry
    if manifest is not None:
        raise InputError(f"manifest: {manifest} says nothing of {repo}: add an entry or leave it out")
    return Facts(repo)


def _listed(names: str | list[str]) -> list[str]:
    return [names] if isinstance(names, str) else names


_Step = tuple[StepName, Source]


class HubRevisions(Series):
    """A repository on the Hub whose branches are steps: Pythia, OLMo, CRFM and others.

    Listing the branches takes one request. If a manifest says that each step is a repository (MultiBERTs), listing
    takes one request per step.

    Args:
        repo: ORGANIZATION/NAME.
        steps: all, a list, {log_spaced: N}, or a schedule as in training (pythia, {every: 1000}, ...).
        grammar: how branches are named. auto recognises the known grammars. If a training run has several stages
            that each count their steps from 0, auto takes the first stage. A template such as
            `stage2-ingredient1-step{step}-*` takes another stage.
        manifest: a file with tokens per step and suspect steps; None: the manifest in the package that has an entry for
            this repository, if there is one.
        name: name of the series, if the repository holds several training runs.
    """

    def __init__(
        self,
        repo: str,
        steps: Steps = "all",
        *,
        grammar: str = "auto",
        manifest: str | Path | None = None,
        name: str | None = None,
    ) -> None:
        self.repo, self.steps, self._manifest = repo, steps, manifest
        self._grammar = None if grammar == "auto" else Grammar(grammar)
        self.name = name or (f"{repo} {grammar}" if "*" in grammar else repo)

    def find(self) -> Listing:
        facts, hub = known_facts(self.repo, self._manifest), Hub()
        if self.name != self.repo:
            facts = Facts(self.repo, tokens_per_step=facts.tokens_per_step, warm_up=0)
        if facts.repositories is None:
            steps, main = self._branches(hub, facts.grammar)
        else:
            steps, main = self._repositories(hub, facts.repositories, facts.expected() or ())
        return Listing(
            tuple(
                Checkpoint(self.name, one.name, source, one.step, one.tokens(facts.tokens_per_step))
                for one, source in steps
            ),
            main=Checkpoint(self.name, MAIN, main) if main else None,
            main_is_last=facts.main_is_last,
            expected=facts.expected(),
            suspect=facts.suspect,
            warm_up=facts.warm_up,
        )

    def _branches(self, hub: Hub, known: str | list[str] | None) -> tuple[list[_Step], Source | None]:
        """Return the branches that hold a checkpoint, each with its source, and the source of the branch `main`.

        `known` is the grammar (pattern) of branch names that the manifest gives, or a list of grammars.
        """
        commits = hub.commits(self.repo)
        sources = {name: HubSource(hub, self.repo, name, commit) for name, commit in commits.items()}
        # A list has one pattern of branch names for each training run in the repository. Use the first one.
        main, first = sources.pop(MAIN, None), _listed(known or [])[:1]
        names = ordered(sources, self._grammar or (Grammar(*first) if first else recognize(sources)))
        if not names:
            some = f"{len(commits)} branches: {', '.join([*commits][:5])}"
            raise InputError(f"{self.repo} has no branch that is a step ({some}): name the grammar")
        return [(one, sources[one.name]) for one in names], main

    def _repositories(self, hub: Hub, template: str, steps: Sequence[int]) -> tuple[list[_Step], Source]:
        """Return each step with its source, for a series with one repository per step, and the source of `self.repo`.

        The repository `self.repo` has the role that the branch `main` has in other series.
        """
        named = template.replace("{repo}", self.repo)
        names = [named.replace("{step}", f"{each}").replace("{thousands}", f"{each // 1000}") for each in steps]
        *sources, main = ask_all(functools.partial(_source, hub), [*names, self.repo])
        _refuse_if_none(sources)
        return [*zip(map(StepName, names, steps), sources, strict=True)], main


class Models(Series):
    """A set of models to be compared.

    A repository that is not available stays in the listing. Reading its files raises an error that says why, and the
    other models are measured.

    Args:
        models: folders, or repositories on the Hub (`NAME`, or `NAME@REVISION` for a branch).
        name: name of the set.
        tokenizers: tokenizers by model, named as in `models`, for models without a tokenizer.json.

    Raises:
        InputError: `models` is empty, or, on first use, no model is available. The message then says why the first
            model is not available.
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
        self.models, self.name, self.tokenizers = list(models), name, dict(tokenizers or {})

    def find(self) -> Listing:
        hub = None if all(map(os.path.isdir, self.models)) else Hub()
        sources = ask_all(functools.partial(_source, hub), self.models)
        _refuse_if_none(sources)
        return Listing(tuple(Checkpoint(self.name, *named) for named in zip(self.models, sources, strict=True)))

    def tokenizer(self, checkpoint: Checkpoint) -> str | None:
        return super().tokenizer(checkpoint) or self.tokenizers.get(checkpoint.name)


class OneModel(Series):
    """A single model: a folder, or a repository on the Hub whose files are downloaded on first use.

    A folder or revision named like a step (step-000001000, step1000) has that step.

    Args:
        model: the folder or repository.
        revision: branch, tag or commit; None: `main`.
        untrained: seed of new weights, which the model's library initialises. The run is then named
            `NAME@untrained-SEED` and has no step.

    Raises:
        InputError: there is no such model.
    """

    is_single = True

    def __init__(self, model: str | Path, *, revision: str | None = None, untrained: int | None = None) -> None:
        self.model, self.name, self.revision, self.untrained = model, os.fspath(model), revision, untrained

    def find(self) -> Listing:
        source = ModelFiles(self.model, revision=self.revision, untrained=self.untrained)
        if self.untrained is not None:
            name = f"{self.name.rstrip('/')}@untrained-{self.untrained}"
            return Listing((Checkpoint(name, name, source, has_series=False, run=name),))
        step = Grammar("step").parse(Path(self.revision or self.name).name)
        return Listing((Checkpoint(self.name, self.name, source, step and step.step, has_series=False),))


def _refuse_if_none(sources: Sequence[Source]) -> None:
    reasons = [source.reason if isinstance(source, HubSource) else None for source in sources]
    if reasons and all(reasons):
        raise InputError(reasons[0])


def _source(hub: Hub | None, model: str) -> Source:
    if hub is None or os.path.isdir(model):
        return FolderSource(Path(model))
    repo, _, revision = model.partition("@")
    revision = revision or MAIN
    try:
        commits = hub.commits(repo)
        reason = None if revision in commits else f"models: {repo} has no branch {revision}; it has {len(commits)}"
    except InputError as error:
        commits, reason = {}, str(error)
    return HubSource(hub, repo, revision, commits.get(revision, ""), reason)


def open_series(
    name: str,
    steps: Any = "all",
    *,
    grammar: str = "auto",
    model: str | None = None,
) -> list[Series]:
    """Return the series in a folder or in a repository on the Hub, or one series per repository of a manifest.

    Raises:
        InputError: `name` is none of these, or an option does not fit it.
    """
    if isinstance(steps, str) and re.fullmatch(r"\d+(, ?\d+)*", steps):
        steps = [int(each) for each in steps.split(",")]
    if os.path.isdir(name):
        if any(Path(name).glob("*.ckpt")):
            return [LightningCheckpoints(name, steps, model=model)]
        return [StepFolders(name, steps, grammar=grammar)]
    if name.endswith((".yaml", ".yml")):
        repos = repositories_of(name)
        if not repos:
            raise InputError(f"{name} names no repository in full: give one, such as ORGANIZATION/NAME")
        return [each for repo in repos for each in _trainings(repo, steps, grammar, name)]
    if "/" not in name or not is_hub_name(name):
        raise InputError(f"expected a folder, ORGANIZATION/NAME on the Hub or a manifest, {name} does not exist")
    return _trainings(name, steps, grammar)


def _trainings(repo: str, steps: Any, grammar: str, manifest: str | None = None) -> list[Series]:
    """Return the series of a repository: one, or one per training run if the repository has several.

    A repository has several training runs if its manifest lists several grammars (patterns of branch names), one per
    run. There is only one series if `grammar` is not `auto`.
    """
    known = known_facts(repo, manifest).grammar
    if grammar != "auto" or not isinstance(known, list):
        return [HubRevisions(repo, steps, grammar=grammar, manifest=manifest)]
    return [HubRevisions(repo, steps, grammar=each, manifest=manifest, name=f"{repo} {each}") for each in known]


def find_checkpoint(name: str) -> Checkpoint:
    """Return the checkpoint in a folder, in a .ckpt file or at NAME[@REVISION] on the Hub.

    Its step and token count are known if it belongs to a series.

    Raises:
        InputError: `name` is none of these, or the revision does not exist.
    """
    folder = Path(os.path.abspath(name))
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise InputError(f"expected a model in {name}, found no config.json there")
        # Only a series knows the step and tokens of a checkpoint. The parent folder may be a series that contains it.
        single = Checkpoint(folder.name, folder.name, FolderSource(Path(name)))
        return _member(StepFolders(folder.parent), folder.name) or single
    if folder.suffix == ".ckpt" and folder.is_file():
        return LightningCheckpoints(name).checkpoints[0]
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?", name):
        raise InputError(f"expected a folder with a model, a .ckpt or NAME@REVISION of the Hub, {name} is neither")
    repo, _, revision = name.partition("@")
    step = _member(HubRevisions(repo), revision) if revision not in ("", MAIN) else None
    return step or Models([name], name=repo).checkpoints[0]


def _member(series: Series, name: str) -> Checkpoint | None:
    """Return the checkpoint with this name in a series; None if there is none or the series cannot be listed."""
    try:
        return next((each for each in series.listing.checkpoints if each.name == name), None)
    except InputError:  # a folder or repository without steps is not a series
        return None
