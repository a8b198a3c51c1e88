"""`lit-layers audit`: whether a checkpoint series is what it says, before its weights are downloaded."""

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
    """Check whether a checkpoint series is what it says: by names, sizes and hashes of its files, by its configurations
    and tokenizers, and by its weights where they are on this machine. Exit code: 0 clean, 1 findings, 2 wrong input.

    Args:
        series: a run's folder (or one of *.ckpt files), ORGANIZATION/NAME on the Hub, or a manifest of published series
            (*.yaml)
        steps: which steps: all, 0,1,2,1000, '{log_spaced: 20}', pythia or '{every: 1000}'
        grammar: how the branches of steps are named, e.g. part-{step} or 'stage2-ingredient1-step{step}-*'
        submodule: in a folder of *.ckpt files: which submodule is the network (default: found by its tensors)
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
        with refused(f"json: cannot write {json}"):  # in place, as it may be a pipe
            json.write_text(text + "\n", encoding="utf-8")
    return 0 if all(one.is_clean for one in audits) else FINDINGS
