"""`lit-layers audit`: whether a checkpoint series is what it says, before its weights are downloaded."""

import argparse
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from lit_layers.errors import InputError

if TYPE_CHECKING:
    from lit_layers.series import Audit

FINDINGS = 1
_SHOWN = 6  # steps of a finding, at each end


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see `{self.prog} --help`")


def main(argv: list[str]) -> int:
    """Prints what is wrong with a series; 0 where nothing is (but notes), 1 where something is."""
    options = _parser().parse_args(argv)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # read at import
    from lit_layers.series import audit, open_series, read_steps
    from lit_layers.series.fingerprints import Memory

    if options.json is not None and (options.json.is_dir() or not options.json.parent.is_dir()):
        raise InputError(f"json: expected a file in a folder that exists, got {options.json}")
    found = []
    steps = read_steps(options.steps)
    staged = {"grammar": options.grammar, "stage": options.stage, "ingredient": options.ingredient}
    for series in open_series(options.series, steps, model=options.model, **staged):
        kept = series.memory or Memory(Path("checkpoints") / re.sub(r"[^\w.-]+", "-", series.name))
        found.append(audit(series, level=options.level, memory=kept))
        show_audit(found[-1])
    if options.json is not None:
        _write(options.json, found)
    return 0 if all(one.is_clean for one in found) else FINDINGS


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="lit-layers audit",
        description="Tell whether a checkpoint series is what it says: by names, sizes and hashes of its files, by its "
        "configurations and tokenizers, and by its weights where they are on this machine.",
        epilog="Exit code: 0 clean, 1 findings, 2 wrong input.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "series",
        help="a run's folder (or one of *.ckpt files), ORGANIZATION/NAME on the Hub, or a manifest (*.yaml) of such",
    )
    parser.add_argument(
        "--steps", default="all", help="all, 0,1,2,1000, '{log_spaced: 20}', pythia or '{every: 1000}' (default: all)"
    )
    parser.add_argument("--grammar", default="auto", help="how steps are named, e.g. iter_{step} (default: auto)")
    parser.add_argument("--stage", type=int, default=1, help="of a training in stages (default: 1)")
    parser.add_argument("--ingredient", type=int, help="which of the sibling runs of a stage")
    parser.add_argument(
        "--model",
        "--submodule",
        metavar="NAME",
        help="of *.ckpt files: the submodule that is the network (default: found)",
    )
    parser.add_argument(
        "--level",
        choices=["auto", "listing", "files", "weights"],
        default="auto",
        help="listing: names, sizes, hashes. files: also which tensors the weight files hold. weights: also their "
        "values, downloaded if need be. auto: the weights of those checkpoints that are on this machine (default)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the findings there")
    return parser


def _write(path: Path, found: "list[Audit]") -> None:
    content = [one.to_dict() for one in found]
    try:
        path.write_text(json.dumps(content[0] if len(content) == 1 else content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"json: cannot write {path} ({error.strerror})") from error


def show_audit(found: "Audit") -> None:
    """Prints the verdict and a table of what was found."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    noun = "checkpoint" if found.num_checked == 1 else "checkpoints"
    verdict = "clean" if found.is_clean else f"suspect: {_some(found.suspect_steps) or 'see below'}"
    console.print(
        escape(f"{found.series}: {found.num_checked} {noun}, {verdict} (level: {found.level})"), soft_wrap=True
    )
    for what, names in _unchecked(found).items():
        console.print(escape(f"not checked: {what} of {_some(names)}"), soft_wrap=True)
    if not found.findings:
        return
    table = Table("finding", "steps", "what it means")
    for finding in sorted(found.findings, key=lambda finding: finding.note):
        kind = f"note: {finding.kind}" if finding.note else finding.kind
        table.add_row(*map(escape, (kind, _some(finding.steps or finding.names), finding.message)))
    console.print(table)


def _unchecked(found: "Audit") -> dict[str, list[str]]:
    """Checkpoints by what was not checked of them."""
    names: dict[str, list[str]] = {}
    for name, rest in found.unchecked.items():
        for what in rest:
            names.setdefault(what, []).append(name)
    return names


def _some(steps: Any) -> str:
    words = [str(step) for step in steps]
    if len(words) > 2 * _SHOWN:
        words = [*words[:_SHOWN], f"... ({len(words)} in all) ...", *words[-_SHOWN:]]
    return ", ".join(words)
