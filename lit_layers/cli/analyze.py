"""`lit-layers analyze`: measure a trained model, whole or block by block, or a series of checkpoints."""

import os
import sys

from lit_layers.cli.analyze_options import Command
from lit_layers.cli.measuring import Outcome, measured, run, tell_settings


def main(argv: list[str]) -> int:
    """Measures what the options say, prints what came out; 130 where Ctrl-C cut it short, 1 if anything failed."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # they would write over ours; read at import
    command = Command(argv)
    tokenizer = None if command.wants_own_tokenizer else command.options.tokenizer
    return run(measured(command.options, command.analyses, command.series(), tokenizer=tokenizer), _tell)


def _tell(outcome: Outcome) -> bool:
    """Prints what came of a model or series; whether anything failed."""
    result = outcome.result
    for error in outcome.errors:
        print(f"failed: {error}", file=sys.stderr)
    made = [measurement for measurement in result.measurements if measurement.error is None]
    for measurement in made if outcome.steps is not None else ():
        print(f"{measurement.analysis:20} {len(measurement.records):>7,} numbers {measurement.seconds:>9.1f} s")
    print(f"{len(made)} measured, {result.num_known} were known, not measured again")
    tell_settings(outcome.root, outcome.settings)
    print(f"{outcome.root / 'measurements.jsonl'}; draw them with `lit-layers report {outcome.root}`")
    return bool(outcome.errors)
