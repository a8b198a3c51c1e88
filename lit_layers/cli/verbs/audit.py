"""`lit-layers audit`: check a checkpoint series before its weights are downloaded."""

import json as json_format
import re
from pathlib import Path

from lit_layers.cli.options import Steps
from lit_layers.cli.process import show_audit
from lit_layers.errors import refused

FINDINGS = 1


def audit(
    series: str,
    *,
    steps: Steps = "all",
    grammar: str = "auto",
    submodule: str | None = None,
    json: Path | None = None,
) -> int:
    """Check whether the checkpoints of a series are what their names say.

    Compares names, sizes and hashes of files, configurations and tokenizers, and also the weights if they are on this
    machine. Exit code: 0 if clean; 1 if there are findings; 2 for wrong input.

    Args:
        series: a run's folder, a folder of *.ckpt files, ORGANIZATION/NAME on the Hub, or a manifest of published
            series (*.yaml)
        steps: which steps: all, a list such as 0,1,1000, '{every: 1000}', '{log_spaced: 20}' (20 of them, evenly spaced
            on a log scale), or pythia (0, 1, 2, 4, ... 512, 1000, 2000, ...)
        grammar: pattern of the branch names of steps, e.g. part-{step} or 'stage2-ingredient1-step{step}-*'; auto uses
            the known pattern that matches most names
        submodule: name of the submodule to check in *.ckpt files (default: found from the tensor names)
        json: also write the findings to this file
    """
    from lit_layers.series import audit as audit_of
    from lit_layers.series import open_series
    from lit_layers.series.checkpoint_sources import Memory

    audits = []
    for each in open_series(series, steps, model=submodule, grammar=grammar):
        memory = each.memory or Memory(Path("checkpoints") / re.sub(r"[^\w.-]+", "-", each.name))
        audits.append(audit_of(each, memory=memory))
        show_audit(audits[-1])
    if json is not None:
        content = [one.to_dict() for one in audits]
        text = json_format.dumps(content[0] if len(content) == 1 else content, indent=2)
        with refused(f"json: cannot write {json}"):  # written in place: it may be a pipe
            json.write_text(text + "\n", encoding="utf-8")
    return 0 if all(one.is_clean for one in audits) else FINDINGS
