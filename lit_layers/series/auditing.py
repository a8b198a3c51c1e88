"""Whether a series is what it says: by names, sizes and hashes, before any weights are downloaded."""

from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from lit_layers.series.checkpoint import Checkpoint, Series
from lit_layers.series.findings import (
    Finding,
    broken,
    duplicates,
    gaps,
    main_differs,
    odd_names,
    reported,
    shared_shards,
    weights_of,
)

REQUESTS_AT_ONCE = 8  # to the Hub, which allows some hundred a minute


@dataclass(frozen=True)
class Audit:
    """The verdicts on one series. No finding but notes means clean."""

    series: str
    num_checked: int
    findings: tuple[Finding, ...]
    commits: Mapping[str, str] = field(default_factory=dict)
    _steps: Mapping[str, int] = field(default_factory=dict, repr=False)

    @property
    def is_clean(self) -> bool:
        return all(finding.note for finding in self.findings)

    @property
    def suspect_names(self) -> frozenset[str]:
        """The checkpoints that no curve should be drawn through."""
        return frozenset(name for finding in self.findings if not finding.note for name in finding.names)

    @property
    def suspect_steps(self) -> tuple[int, ...]:
        """The steps that no curve should be drawn through."""
        return tuple(sorted(self._steps[name] for name in self.suspect_names if name in self._steps))

    def verdict(self, checkpoint: Checkpoint) -> str:
        """What is to be said of one checkpoint, for its measurements: `clean`, `note: ...` or `suspect: ...`."""
        mine = [finding for finding in self.findings if checkpoint.name in finding.names]
        kinds = dict.fromkeys(finding.kind for finding in mine if not finding.note)
        if kinds:
            return f"suspect: {', '.join(kinds)}"
        notes = dict.fromkeys(finding.kind for finding in mine)
        return f"note: {', '.join(notes)}" if notes else "clean"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "series": self.series,
            "checked": self.num_checked,
            "clean": self.is_clean,
            "suspect_steps": list(self.suspect_steps),
            "suspects": sorted(self.suspect_names),
            "findings": [asdict(finding) for finding in self.findings],
            "commits": dict(self.commits),
        }


def audit(series: Series, *, without: Collection[str] = ()) -> Audit:
    """What is wrong with the chosen steps of a series, compared with each other, its last step and its main branch.

    Asks the Hub for lists of files and for the small files that name shards, one list a revision; a local series is
    hashed. Files are compared, so the same weights saved anew pass. Checkpoints named in `without` are not looked at.

    Raises:
        InputError: a series that is not there, or cannot be had after several attempts.
    """
    listing = series.listing
    chosen = [found for found in series.checkpoints if found.name not in without]
    last = listing.checkpoints[-1] if listing.checkpoints[-1].step is not None else None
    seen = {found.name: found for found in (*chosen, *filter(None, (last, listing.main)))}
    with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
        weights = dict(zip(seen, pool.map(weights_of, seen.values()), strict=True))
    findings = [
        *broken(chosen),
        *duplicates(chosen, last, listing, weights),
        *shared_shards(chosen, last, weights),
        *main_differs(last, listing, weights),
        *gaps(series, listing),
        *odd_names(listing),
        *reported(chosen, listing),
    ]
    described = {found.name: found.source.describe().get("commit") for found in chosen}
    return Audit(
        series=series.name,
        num_checked=len(chosen),
        findings=tuple(findings),
        commits={name: commit for name, commit in described.items() if commit is not None},
        _steps={found.name: found.step for found in chosen if found.step is not None},
    )
