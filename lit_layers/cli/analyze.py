"""`lit-layers analyze`: measure a trained model, whole or block by block, or a series of checkpoints."""

import os
import sys
from pathlib import Path

from lit_layers.cli.analyze_options import Command
from lit_layers.cli.bar import bar
from lit_layers.cli.over_checkpoints import name_of, settings_of_all, tell_settings
from lit_layers.series.local import training_of

FAILED, INTERRUPTED = 1, 130


def main(argv: list[str]) -> int:
    """Measures what the options say, prints what came out; 130 where Ctrl-C cut it short, 1 if anything failed."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # they would write over ours; read at import
    command = Command(argv)
    try:
        if not command.is_series:
            return _one_model(command)
        from lit_layers.cli.analyze_series import run

        return run(command)
    except KeyboardInterrupt:
        print("interrupted: run the same command again to go on", file=sys.stderr)
        return INTERRUPTED


def _one_model(command: Command) -> int:
    from lit_layers.models.shard_files import ShardFiles
    from lit_layers.offline import analyze, own_tokenizer

    options = command.options
    own = own_tokenizer(options.model, options.revision) if command.wants_own_tokenizer else None
    root = Path(options.root) if options.root else Path("checkpoints") / name_of(options.model)
    with bar("opening the model") as show:
        trained = training_of(Path(options.model).resolve().parent)
        config = ShardFiles(options.model, revision=options.revision).config
        analyses = command.analyses(options.model, own, trained, config)
        found = analyze(
            options.model,
            analyses,
            root=root,
            revision=options.revision,
            stream_blocks=options.stream_blocks,
            device=options.device,
            dtype=options.dtype,
            progress=show,
        )
    for measurement in found:
        if measurement.error is not None:
            print(f"failed: {measurement.analysis}: {measurement.error}", file=sys.stderr)
        else:
            print(f"{measurement.analysis:20} {len(measurement.records):>7,} numbers {measurement.seconds:>9.1f} s")
    tell_settings(root, settings_of_all(analyses))
    print(f"{root / 'measurements.jsonl'}; draw them with `lit-layers report {root}`")
    return FAILED if any(measurement.error is not None for measurement in found) else 0
