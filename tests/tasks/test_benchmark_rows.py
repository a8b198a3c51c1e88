"""Rows of local files become lm-eval's prompts: real rows, a file of the user, and wrong input."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lit_layers.errors import InputError
from lit_layers.tasks.lm_eval_scorer import LmEvalScorer, local_task
from tests.support.benchmark_rows import write_tasks

# Row counts from the README of the data, and first rows checked by eye. lm-eval itself tests the other tasks.
ROWS = {"lambada": 5153, "arc_challenge": 586, "arc_easy": 1188, "hellaswag": 500, "winogrande": 1267, "gsm8k": 660}
ROWS |= {"piqa": 1838, "openbookqa": 500, "sciq": 1000, "boolq": 1500}
FIRST = {
    "openbookqa": (
        "live far beneath the surface of the ocean, which is why they are known as",
        [" Deep sea animals", " fish", " Long Sea Fish", " Far Sea Animals"],
    ),
    "sciq": (
        "\nQuestion: Who proposed the theory of evolution by natural selection?\nAnswer:",
        [" Linnaeus", " shaw", " Scopes", " darwin"],
    ),
    "boolq": ("\nQuestion: can you have an ectopic pregnancy in your ovary?\nAnswer:", [" no", " yes"]),
    "piqa": ("Question: How do I ready a guinea pig cage for it's new occupants?\nAnswer:", None),
}


@pytest.mark.realdata
def test_every_real_row_is_a_row_of_the_task_and_the_first_prompt_is_as_expected(realdata):
    for task, number in ROWS.items():
        local = local_task(task, realdata)
        columns = local.read([local.split], dict.fromkeys(local.text, "columns")).values
        assert len(columns[local.text[0]]) == number, task
        asked = [request.arguments for request in LmEvalScorer(local, "unused", limit=1).requests()]
        context, choices = FIRST.get(task, ("", None))
        assert asked[0][0].endswith(context), task
        assert choices is None or [choice for _, choice in asked] == choices


def test_wrong_input_is_refused(tmp_path):
    with pytest.raises(InputError, match="no 'arc'; did you mean arc_easy.*; or give a task file of lm-eval"):
        local_task("arc", tmp_path)
    folder = write_tasks(tmp_path / "benchmarks")
    arc = folder / "arc_challenge_test.parquet"
    cases = [
        ([{"question": "a", "choices": ["b", "c"]}], r"has no column 'label': it has question, choices"),
        ([{"question": "a", "choices": ["b", "c"], "label": 2}], r"row 0 of .* has 2 choices and the label 2"),
        ([{"question": "a", "choices": ["b", "c"], "label": -1}], r"has 2 choices and the label -1"),
        ([{"question": "a", "choices": ["b", "c"], "label": 0.5}], r"has 2 choices and the label 0.5"),
        ([{"question": "a", "choices": ["b"], "label": None}], r"has 1 choices and the label None"),
    ]
    for rows, message in cases:
        pq.write_table(pa.Table.from_pylist(rows), arc)
        with pytest.raises(InputError, match=message):
            local_task("arc_challenge", tmp_path)
    arc.write_text("no parquet")
    with pytest.raises(InputError, match="is no parquet file, or only a part of one"):
        local_task("arc_challenge", tmp_path)
