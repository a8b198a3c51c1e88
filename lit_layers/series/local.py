"""Series on this machine: folders named after their steps."""

import functools
from pathlib import Path
from typing import Any

from lit_layers.errors import InputError
from lit_layers.run_file import run_facts
from lit_layers.schedule import Schedule, Steps
from lit_layers.series.checkpoint import Checkpoint, Listing, Series, ordered
from lit_layers.series.fingerprints import Memory
from lit_layers.series.grammar import Grammar, is_steplike, recognize
from lit_layers.series.sources import FolderSource

_NO_CHECKPOINTS = {"resume", "wandb"}


class StepFolders(Series):
    """The folders of a run that are steps: ours (step-000001000) and any others, such as checkpoint-500 or step500.

    Tokens per step and the schedule are read from the run's own run.json where there is one.

    Args:
        root: the folder that holds them.
        steps: all, a list, {log_spaced: N}, or a schedule as in training.
        grammar: how folders are named; auto finds out.
        tokens_per_step: where run.json does not say it.
    """

    def __init__(
        self,
        root: str | Path,
        steps: Steps = "all",
        *,
        grammar: str = "auto",
        tokens_per_step: int | None = None,
    ) -> None:
        if tokens_per_step is not None and tokens_per_step < 1:
            raise InputError(f"tokens_per_step: expected at least 1, got {tokens_per_step}")
        self.root, self.steps, self._tokens_per_step = Path(root), steps, tokens_per_step
        self.name, self.memory = self.root.resolve().name, Memory(self.root)
        self._grammar = None if grammar == "auto" else Grammar(grammar)

    def find(self) -> Listing:
        if not self.root.is_dir():
            raise InputError(f"expected a folder with checkpoints, {self.root} does not exist")
        folders = {path.name: path for path in self.root.iterdir() if path.is_dir() and path.name[0] != "."}
        names = sorted(name for name in folders if name not in _NO_CHECKPOINTS)
        grammar = self._grammar or recognize(names)
        said = [found for name in names if grammar is not None and (found := grammar.parse(name)) is not None]
        if not said:
            raise InputError(f"{self.root} holds no folder that is a step, such as step-000001000 or checkpoint-500")
        kept, doubles = ordered(said)
        per_step = self._tokens_per_step or self._run.get("tokens_per_step")
        first, before = self._origin
        understood = {name.name for name in said}
        return Listing(
            checkpoints=tuple(
                Checkpoint(
                    self.name,
                    name.name,
                    FolderSource(folders[name.name], self.memory),
                    step=name.step,
                    tokens=None if before is None else name.tokens(per_step, first, before),
                    approximate=per_step is None and name.billions is not None,
                )
                for name in kept
            ),
            expected=self._expected(kept[-1].step),
            strangers=tuple(name for name in names if name not in understood and is_steplike(name)),
            doubles=doubles,
        )

    @functools.cached_property
    def _run(self) -> dict[str, Any]:
        return run_facts(self.root)

    def _expected(self, last: int) -> tuple[int, ...] | None:
        """The steps of the run's own schedule up to the last that is there: it may have been interrupted."""
        steps = training_of(self.root).get("steps")
        if steps is None:
            return None
        schedule, first = Schedule(steps), self._origin[0]
        return tuple(step for step in range(first, last + 1) if step in schedule or step == first)

    @property
    def _origin(self) -> tuple[int, int | None]:
        """The step and tokens that the run began with: not zero where it began with another run's checkpoint."""
        found = self._run.get("origin") or {}
        return found.get("step", 0), found.get("tokens", 0)


def run_in(root: Path) -> str:
    """The name of the run whose measurements a folder holds: that of the folder, which may have been renamed since."""
    return run_facts(root).get("run") or root.resolve().name


def training_of(root: Path) -> dict[str, Any]:
    """The options that the run in a folder was trained with; nothing where it is no run of ours."""
    return run_facts(root).get("config", {})
