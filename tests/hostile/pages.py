"""A run folder in which every text comes from an attacker."""

import json
from pathlib import Path

from lit_layers import records
from lit_layers.records import Measurement, Record
from tests.support.runs import TOKENS_PER_STEP, make_run


def hostile_run(root: Path, text: str, analyses: tuple[str, ...] = ("trajectory", "coupling", "lens")) -> Path:
    """Write a run with `text` as its name, tags, metric, analysis, error, provenance, verdict and options."""
    make_run(root, steps=(0, 8), layers=3, analyses=analyses, run=text)
    provenance = {"audit": f"suspect: {text}", "series": text, "commit": text, "checkpoint": text, "data_hash": text}
    rows = [
        Record(metric=metric, value=1.0 + layer, layer=layer, tags={text: text, "task": text, "split": text})
        for metric in (text, "probe_accuracy")
        for layer in range(4)
    ]
    facts = {"run": text, "step": 8, "tokens": 8 * TOKENS_PER_STEP, "seconds": 1.0, "provenance": provenance}
    for analysis, error in ((text, None), ("probe", None), (f"failed {text}", text), ("representation", text)):
        measurement = Measurement(analysis=analysis, records=[] if error else rows, error=error, **facts)
        records.append(root / "measurements.jsonl", measurement)
    about = json.loads((root / "run.json").read_text())
    about["model"]["class"] = about["data"]["corpus"] = about["data"]["tokenizer"] = about["device"] = text
    about["config"] |= {text: {text: text}, "corpus": text}
    (root / "run.json").write_text(json.dumps(about))
    with (root / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 9, f"train/{text}": 1.0}) + "\n")
    return root
