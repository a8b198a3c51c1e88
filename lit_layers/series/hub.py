"""Series whose checkpoints are branches of a repository of the Hub."""

from pathlib import Path

from lit_layers.errors import InputError
from lit_layers.schedule import Steps
from lit_layers.series.checkpoint import Checkpoint, Listing, Series, ordered
from lit_layers.series.grammar import Grammar, StepName, is_steplike, recognize
from lit_layers.series.manifests import Facts, Manifest, known_facts
from lit_layers.series.retrying import Retry
from lit_layers.series.sources import Hub, HubSource

MAIN = "main"


class HubRevisions(Series):
    """The branches of a repository that are steps: Pythia, OLMo, CRFM and others. Listing them takes one request.

    Args:
        repo: ORGANIZATION/NAME.
        steps: all, a list, {log_spaced: N}, or a schedule as in training (pythia, {every: 1000}, ...).
        grammar: how branches are named; auto finds out.
        stage: of a training in stages, whose later ones count from 0 again (OLMo).
        ingredient: which of the stage's sibling runs, where it has any.
        manifest: a file with tokens per step and known defects; one of ours is used where it knows the repository.
    """

    def __init__(
        self,
        repo: str,
        steps: Steps = "all",
        *,
        grammar: str = "auto",
        stage: int = 1,
        ingredient: int | None = None,
        manifest: str | Path | None = None,
        retry: Retry | None = None,
    ) -> None:
        self.repo, self.steps, self.stage, self.ingredient = repo, steps, stage, ingredient
        self.name = repo if stage == 1 else f"{repo} stage {stage}"
        if ingredient is not None:
            self.name += f" ingredient {ingredient}"
        self._grammar = None if grammar == "auto" else Grammar(grammar)
        self._manifest, self._retry = manifest, retry

    def find(self) -> Listing:
        facts, hub = self._facts(), Hub(self._retry)
        commits = hub.commits(self.repo)
        grammar = self._grammar or (Grammar(facts.grammar) if facts.grammar else recognize(commits))
        names = [name for name in commits if name != MAIN]
        said = [found for name in names if grammar is not None and (found := grammar.parse(name)) is not None]
        if not said:
            raise InputError(
                f"{self.repo} has no branch that is a step ({len(commits)} branches: {_some(list(commits))}): "
                "name the grammar, or measure it as one model"
            )
        kept, doubles = ordered(self._of_the_stage(said))
        understood = {name.name for name in said}

        def source(name: str) -> HubSource:
            return HubSource(hub, self.repo, name, commits[name])

        return Listing(
            checkpoints=tuple(self._checkpoint(name, source(name.name), facts) for name in kept),
            main=Checkpoint(self.name, MAIN, source(MAIN)) if MAIN in commits else None,
            main_is_last=facts.main_is_last if self.stage == 1 else None,
            expected=facts.expected() if self.stage == 1 else None,
            strangers=tuple(sorted(name for name in names if name not in understood and is_steplike(name))),
            doubles=doubles,
            defects=facts.defects,
            warm_up=facts.warm_up if self.stage == 1 else 0,
        )

    def _facts(self) -> Facts:
        if self._manifest is None:
            return known_facts(self.repo)
        facts = Manifest(self._manifest).facts(self.repo)
        if facts is None:
            raise InputError(f"manifest: {self._manifest} says nothing of {self.repo}: add an entry or leave it out")
        return facts

    def _of_the_stage(self, said: list[StepName]) -> list[StepName]:
        stages = sorted({name.stage for name in said})
        if self.stage not in stages:
            raise InputError(f"stage: {self.repo} has {_counted('stage', stages)}, no stage {self.stage}")
        said = [name for name in said if name.stage == self.stage]
        siblings = sorted({name.ingredient for name in said if name.ingredient is not None})
        if self.ingredient is None and len(siblings) < 2:
            return said
        if self.ingredient not in siblings:
            raise InputError(
                f"ingredient: stage {self.stage} of {self.repo} has {_counted('ingredient', siblings)}, sibling runs "
                f"of the same steps; choose one, got {self.ingredient}"
            )
        return [name for name in said if name.ingredient == self.ingredient]

    def _checkpoint(self, name: StepName, source: HubSource, facts: Facts) -> Checkpoint:
        return Checkpoint(
            self.name,
            name.name,
            source,
            step=name.step,
            tokens=name.tokens(facts.tokens_per_step),
            approximate=facts.tokens_per_step is None and name.billions is not None,
            optimizer_step=name.step // facts.labels_per_optimizer_step,
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _counted(noun: str, numbers: list[int]) -> str:
    if not numbers:
        return f"no {noun}s"
    return f"the {noun}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
