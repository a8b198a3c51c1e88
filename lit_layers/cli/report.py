"""`lit-layers report`: a run's curves as one HTML page, its numbers as a table, its points at W&B."""

import argparse
import hashlib
import inspect
from pathlib import Path
from typing import Any, NoReturn

from lit_layers.errors import InputError


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see `{self.prog} --help`")


def main(argv: list[str]) -> int:
    """Writes what the options ask for, prints where it is, and returns 0."""
    options = _parser().parse_args(argv)
    from lit_layers.report import facts, write_report

    run = facts.read_run(options.root)
    if options.provenance:
        _print_provenance(facts.provenance(run))
        return 0
    if options.export is not None:
        from lit_layers import records

        records.export(records.frame(run.measurements), options.export)
        print(options.export)
    print(write_report(options.root, options.out))
    if options.wandb:
        mirror = _mirror(run.about)
        mirror.open(options.root, run_id=_run_id(run), config=run.about.get("config") or {})
        mirror.finish()
        print(mirror.closing_line())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="lit-layers report",
        description="Write a run's page. What an interrupted run has left is enough.",
        allow_abbrev=False,
    )
    parser.add_argument("root", type=Path, help="the run's folder, with measurements.jsonl or metrics.jsonl")
    parser.add_argument("--out", type=Path, help="the page (default: ROOT/report.html)")
    parser.add_argument("--export", type=Path, metavar="FILE", help="also write all numbers, as .parquet or .csv")
    parser.add_argument("--wandb", action="store_true", help="also send W&B the points that it does not have")
    parser.add_argument("--provenance", action="store_true", help="only print where the numbers come from")
    return parser


def _print_provenance(provenance: dict[str, Any]) -> None:
    from lit_layers.report import facts

    parts = {"run": provenance["run"], "all measurements": provenance["shared"], **provenance["analyses"]}
    for title, content in {**parts, "weights by step": provenance["weights"], "config": provenance["config"]}.items():
        if content:
            print(f"[{title}]")
            for name, text in facts.flat(content):
                print(f"{name} = {text}")


def _mirror(about: dict[str, Any]) -> Any:
    """A mirror with the options that the run's own had, where it had one."""
    from lit_layers.report import WandbMirror

    config = about.get("config")
    used = config.get("wandb") if isinstance(config, dict) else None
    options = used.get("init_args") if isinstance(used, dict) else None
    known = inspect.signature(WandbMirror).parameters
    return WandbMirror(**{name: value for name, value in (options or {}).items() if name in known})


def _run_id(run: Any) -> str:
    """The id that the run's own mirror used; for a run without one an id that its first line decides."""
    if run.about.get("id"):
        return str(run.about["id"])
    files = (run.root / "measurements.jsonl", run.root / "metrics.jsonl")
    with next(file for file in files if file.is_file()).open("rb") as lines:
        return hashlib.sha256(lines.readline()).hexdigest()[:8]
