"""One checkpoint by its name: where a training may begin that is not the beginning."""

import dataclasses
import os
import re
from pathlib import Path

from lit_layers.errors import InputError
from lit_layers.series.auditing import audit
from lit_layers.series.checkpoint import Checkpoint, Series
from lit_layers.series.grammar import Grammar
from lit_layers.series.hub import MAIN, HubRevisions
from lit_layers.series.local import StepFolders
from lit_layers.series.manifests import known_facts
from lit_layers.series.pretrained import Models
from lit_layers.series.retrying import Retry
from lit_layers.series.sources import FolderSource

UNAUDITED = "unaudited"
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?")


def find_checkpoint(name: str, *, audited: bool = True, retry: Retry | None = None) -> tuple[Checkpoint, str]:
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
        return _of_series(StepFolders(place.parent), place.name, audited) or (
            Checkpoint(place.name, place.name, FolderSource(folder)),
            UNAUDITED,
        )
    if not _NAME.fullmatch(name):
        raise InputError(f"expected a folder with a model or NAME@REVISION of the Hub, {name} is neither")
    repo, _, revision = name.partition("@")
    if revision not in ("", MAIN):
        said = Grammar("stages").parse(revision)
        staged = {} if said is None else {"stage": said.stage, "ingredient": said.ingredient}
        found = _of_series(HubRevisions(repo, retry=retry, **staged), revision, audited)
        if found is not None:
            return found
    (checkpoint,) = Models([name], name=repo, retry=retry)
    return (_last_step(checkpoint, repo) if revision in ("", MAIN) else checkpoint), UNAUDITED


def _of_series(series: Series, name: str, audited: bool) -> tuple[Checkpoint, str] | None:
    """The checkpoint of that name, judged beside all others; None where it is in no series of steps."""
    try:
        found = next((each for each in series.listing.checkpoints if each.name == name), None)
    except InputError:  # no series; what else is wrong is said by whoever looks for the one checkpoint
        return None
    if found is None or found.step is None:
        return None
    return found, audit(series).verdict(found) if audited else UNAUDITED


def _last_step(checkpoint: Checkpoint, repo: str) -> Checkpoint:
    """`main` with the step that it is said to be."""
    facts = known_facts(repo)
    if facts.last_step is None or not facts.main_is_last:
        return checkpoint
    tokens = None if facts.tokens_per_step is None else facts.last_step * facts.tokens_per_step
    return dataclasses.replace(checkpoint, step=facts.last_step, tokens=tokens)
