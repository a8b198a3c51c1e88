"""Examples of answers that are right in the normal order of the blocks and wrong in another order, as a table.

Source: Sun et al., Transformer Layers as Painters, arXiv 2407.09298, appendix A.7, which shows one of GSM8K.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from lit_layers.functional.block_schedules import Schedule, Variant, format_schedule
from lit_layers.records import export
from lit_layers.tasks.benchmark_rows import SCORE, TaskScores

FILE = "broken_answers.csv"
_LONGEST = 1000  # letters of a prompt that names no question


def broken_answers(
    variants: Sequence[Variant], scored: Mapping[Schedule, TaskScores], questions: Sequence[Mapping[str, str]]
) -> list[dict[str, Any]]:
    """A row for each variant that breaks an answer: the first row of the task that the full model, which is the first
    variant, has right and the variant wrong.

    Variants that failed, or break nothing, have none. `num_broken` of the `num_right` answers of the full model break.
    """
    full = scored[variants[0].schedule]
    right = [row for row, value in enumerate(full.values[SCORE]) if value == 1]
    rows: list[dict[str, Any]] = []
    for variant in variants[1:]:
        scores = scored.get(variant.schedule)
        broken = [] if scores is None else [row for row in right if scores.values[SCORE][row] == 0]
        if scores is None or not broken:
            continue
        row, order = broken[0], {"block": variant.block, "schedule": format_schedule(variant.schedule)}
        answers = {"full_model": full.texts[row].strip(), "changed_model": scores.texts[row].strip()}
        counts = {"num_right": len(right), "num_broken": len(broken), "row": row}
        rows.append({**variant.tags, **order, **counts, **questions[row], **answers})
    return rows


def questions_of(requests: Sequence[Any]) -> list[dict[str, str]]:
    """What each row asks and the answer that counts, of what lm-eval asks of a model, in any order."""
    questions = []
    for request in sorted(requests, key=lambda request: request.doc_id):
        question = str(request.doc.get("question") or request.arguments[0][-_LONGEST:]).strip()
        questions.append({"question": question, "answer": str(request.doc.get("answer", "")).strip()})
    return questions


def write(folder: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Writes the table, and returns its path.

    Raises:
        InputError: where it cannot be written.
    """
    first = ("variant", "middle", "loops", "seed", "block", "schedule")
    frame: Any = pd.DataFrame(rows)
    names = [*(name for name in first if name in frame), *(name for name in frame if name not in first)]
    export(frame[names].convert_dtypes().dropna(axis="columns", how="all"), folder / FILE)
    return folder / FILE


def example(path: Path) -> str:
    """The first row of such a table, in words."""
    row = pd.read_csv(path).iloc[0]
    shares = f"{row['num_broken']} of the {row['num_right']} answers that the full model has right break"
    lines = [f"{row['variant']} ({row['schedule']}): {shares}, as that of row {row['row']}:", row["question"]]
    return "\n".join(
        [*lines, f"  full model: {_short(row['full_model'])}", f"  changed: {_short(row['changed_model'])}"]
    )


def _short(text: Any, longest: int = 400) -> str:
    """On one line; a text that is nothing is a gap in the table."""
    words = " ".join(text.split()) if isinstance(text, str) else "(nothing)"
    return words if len(words) <= longest else f"{words[:longest]} ..."
