"""What the name of a branch or folder says: its step, its tokens, its stage of training."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from lit_layers.errors import InputError

PATTERNS = {
    "step": r"step[-_]?(?P<step>\d+)",
    "stages": r"(stage(?P<stage>\d+)-)?(ingredient(?P<ingredient>\d+)-)?step(?P<step>\d+)(-tokens(?P<billions>\d+)B)?",
    "checkpoint": r"checkpoint-(?P<step>\d+)",
}
_STEPLIKE = re.compile(r"(?=.*\d).*(ste|check|ckpt|iter|tok)|\d+$", re.IGNORECASE)
_LAST_INTEGER = re.compile(r"(.*?)(\d+)(\D*)", re.DOTALL)


@dataclass(frozen=True)
class StepName:
    """A name that was understood. `billions` of tokens are rounded by whoever named the branch."""

    name: str
    step: int
    stage: int = 1
    ingredient: int | None = None
    billions: int | None = None

    def tokens(self, tokens_per_step: int | None, first: int = 0, before: int = 0) -> int | None:
        """Tokens seen at this step, of which `before` up to the step `first`.

        From the name, good to a billion, only where a step's tokens are unknown.
        """
        if tokens_per_step is not None:
            return before + (self.step - first) * tokens_per_step
        return None if self.billions is None else self.billions * 10**9


class Grammar:
    """How a series names its steps: a key of `PATTERNS`, or a template such as `iter_{step}`.

    Raises:
        InputError: for anything else.
    """

    def __init__(self, spelling: str) -> None:
        self.spelling = spelling
        pattern = PATTERNS.get(spelling)
        if pattern is None:
            parts = spelling.split("{step}")
            if len(parts) != 2:
                raise InputError(
                    f"grammar: expected auto, {', '.join(PATTERNS)} or a template with one {{step}}, such as "
                    f"iter_{{step}}, got {spelling!r}"
                )
            pattern = rf"{re.escape(parts[0])}(?P<step>\d+){re.escape(parts[1])}"
        self._pattern = re.compile(pattern)

    def parse(self, name: str) -> StepName | None:
        """What a name says, or None where it is no step of this grammar."""
        found = self._pattern.fullmatch(name)
        if found is None:
            return None
        said = {key: int(text) for key, text in found.groupdict().items() if text is not None}
        return StepName(name, **said)


def is_steplike(name: str) -> bool:
    """Whether a name looks as if it meant a step, in whatever grammar."""
    return _STEPLIKE.match(name) is not None


def recognize(names: Iterable[str]) -> Grammar | None:
    """The grammar that understands most of the names; None where no two names have one in common.

    Names of no known grammar that differ in their last integer alone have that integer as their step.
    """
    names = [name for name in names if name != "main"]
    known = [Grammar(spelling) for spelling in PATTERNS]
    counts = [sum(grammar.parse(name) is not None for name in names) for grammar in known]
    if max(counts):
        return known[counts.index(max(counts))]
    found = [match.groups() for name in names if (match := _LAST_INTEGER.fullmatch(name))]
    frames = Counter(f"{before}{{step}}{after}" for before, _, after in found)
    template, count = frames.most_common(1)[0] if frames else ("", 0)
    return Grammar(template) if count > 1 else None
