"""What a model is given of each row: literals of real rows, cleaning, examples, the user's own file, wrong input."""

import json
import random

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lit_layers.errors import InputError
from lit_layers.intervene.task_prompts import LOCAL_TASKS, PAINTED, chance, cleaned, items_hash, named
from tests.support.benchmark_rows import write_tasks

# Counts of the data folder's own README; the first row of each file, looked at by eye.
ROWS = {
    "lambada": 5153,
    "arc_challenge": 586,
    "arc_easy": 1188,
    "hellaswag": 500,
    "hellaswag_raw": 446,
    "winogrande": 1267,
    "gsm8k": 660,
    "piqa": 1838,
    "openbookqa": 500,
    "sciq": 1000,
    "boolq": 1500,
}
FIRST = {
    "arc_challenge": (
        "Question: An astronomer observes that a planet rotates faster after a meteorite impact. Which is the most "
        "likely effect of this increase in rotation?\nAnswer:",
        [
            " Planetary density will decrease.",
            " Planetary years will become longer.",
            " Planetary days will become shorter.",
            " Planetary gravity will become stronger.",
        ],
        2,
    ),
    "winogrande": (
        "Sarah was a much better surgeon than Maria so Sarah",
        [" always got the easier cases.", " always got the easier cases."],
        1,
    ),
    "openbookqa": (
        "Frilled sharks and angler fish live far beneath the surface of the ocean, which is why they are known as",
        [" Deep sea animals", " fish", " Long Sea Fish", " Far Sea Animals"],
        0,
    ),
    "sciq": (
        "\nQuestion: Who proposed the theory of evolution by natural selection?\nAnswer:",
        [" Linnaeus", " shaw", " Scopes", " darwin"],
        3,
    ),
}


@pytest.mark.realdata
@pytest.mark.parametrize("task", LOCAL_TASKS)
def test_every_real_row_is_an_item(realdata, task):
    items = LOCAL_TASKS[task].items(realdata / "benchmarks")
    assert len(items) == ROWS[task]
    assert items_hash(items) != items_hash(items[:-1])
    if task == "gsm8k":
        assert all(item.prompt.count("Question: ") == 6 for item in items)
        assert items[0].prompt.endswith(
            "\n\nQuestion: A robe takes 2 bolts of blue fiber and half that much white fiber.  How many bolts in total "
            "does it take?\nAnswer:"
        )
        return
    assert all(choice.strip() and context.strip() for item in items for context, choice in item.pairs)
    guessed = {"lambada": 0, "arc_challenge": 0.250171, "winogrande": 0.5, "piqa": 0.5, "boolq": 0.5}.get(task, 0.25)
    assert chance(items, LOCAL_TASKS[task]) == pytest.approx(guessed, abs=4e-4)


@pytest.mark.realdata
def test_the_first_prompts_are_these(realdata):
    def first(task):
        return LOCAL_TASKS[task].items(realdata / "benchmarks", 1)[0]

    for task in ("arc_challenge", "winogrande", "openbookqa", "sciq"):
        context, choices, gold = FIRST[task]
        item = first(task)
        assert item.pairs[0][0] == context
        assert [choice for _, choice in item.pairs] == choices
        assert item.gold == gold
    assert first("winogrande").pairs[1][0] == "Sarah was a much better surgeon than Maria so Maria"
    assert first("lambada").pairs[0][0].endswith("his mouth curved in a confident grin, I don't care about")
    assert first("lambada").pairs[0][1] == " signs"
    assert (
        first("boolq")
        .pairs[0][0]
        .endswith(
            "bleeding and thus may become a medical emergency.\nQuestion: can you have an ectopic pregnancy in your "
            "ovary?\nAnswer:"
        )
    )
    assert [choice for _, choice in first("boolq").pairs] == [" no", " yes"]
    assert first("piqa").pairs[0][0] == "Question: How do I ready a guinea pig cage for it's new occupants?\nAnswer:"
    assert first("hellaswag").pairs[0][0].startswith('Health: How to do the " shoulder stand " yoga position. Set up')
    raw = LOCAL_TASKS["hellaswag_raw"].items(realdata / "benchmarks")
    assert (
        raw[0]
        .pairs[0][0]
        .startswith(
            "How to use spanking as a last resort. Decide ahead of time what behaviors are serious enough to spank "
            "for. Think about behaviors"
        )
    )
    assert raw[1].pairs[0] == (
        "A woman iron pants on a iron board in a bedroom. Then",
        " , the woman turns the pants and continues ironing.",
    )
    assert not any("[" in text for item in raw for pair in item.pairs for text in pair)


def test_marks_are_removed_once():
    once = cleaned("[header] How to rest [title] Close the door. [step] Noise wakes. ")
    assert once == " How to rest. Close the door. Noise wakes."
    assert cleaned("[substeps] Wait.") == " Wait." != cleaned(cleaned("[substeps] Wait."))


def test_examples_are_drawn_as_random_draws_them(tmp_path):
    folder = write_tasks(tmp_path)
    pool = pd.read_parquet(folder / "gsm8k_train_sample.parquet").to_dict("records")
    scored = pd.read_parquet(folder / "gsm8k_test.parquet").to_dict("records")
    draws = random.Random(1234)
    for item, row in zip(LOCAL_TASKS["gsm8k"].items(folder), scored, strict=True):
        shots = draws.sample(pool, 5)
        expected = [f"Question: {shot['question']}\nAnswer: {shot['answer']}" for shot in shots]
        assert item.prompt.split("\n\n") == [*expected, f"Question: {row['question']}\nAnswer:"]
        assert item.answer == row["answer"]


def test_fewer_rows_are_the_first_ones(tmp_path):
    folder = write_tasks(tmp_path)
    for task in PAINTED:
        assert LOCAL_TASKS[task].items(folder, 2) == LOCAL_TASKS[task].items(folder)[:2]


def test_a_file_of_ones_own_is_a_task(tmp_path):
    rows = [
        {"context": "Two and two is", "choices": ["four", "five", "six"], "label": 0},
        {"context": "A dog", "choices": ["barks", "sings"], "label": 0},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "mine.parquet")
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    pd.DataFrame([{**row, "choices": json.dumps(row["choices"])} for row in rows]).to_csv(
        tmp_path / "mine.csv", index=False
    )
    for ending in ("parquet", "jsonl", "csv"):
        task = named(str(tmp_path / f"mine.{ending}"))
        items = task.items(tmp_path)
        assert task.name == "mine"
        assert items[0].pairs == tuple(("Two and two is", f" {word}") for word in ("four", "five", "six"))
        assert items[0].lengths == (4, 4, 3)
        assert chance(items, task) == pytest.approx((1 / 3 + 1 / 2) / 2)


def write(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_wrong_input_is_refused(tmp_path):
    with pytest.raises(InputError, match="task: there is no 'arc' among the local ones; choose from lambada, arc_"):
        named("arc")
    with pytest.raises(InputError, match=r"folder: expected rows in .*lambada_openai_test.parquet, there is no such"):
        LOCAL_TASKS["lambada"].items(tmp_path)
    arc = tmp_path / "arc_challenge_test.parquet"
    cases = [
        ([{"question": "a", "choices": ["b", "c"]}], r"expected a column 'label', it has question, choices"),
        ([{"question": "a", "choices": ["b", "c"], "label": 2}], r"row 0 has 2 choices and the label 2, expected 0..1"),
        ([{"question": "a", "choices": ["b"], "label": None}], r"row 0 has nothing in column 'label'"),
    ]
    for rows, message in cases:
        write(arc, rows)
        with pytest.raises(InputError, match=message):
            LOCAL_TASKS["arc_challenge"].items(tmp_path)
    arc.write_text("no parquet")
    with pytest.raises(InputError, match="is no parquet file, or only a part of one"):
        LOCAL_TASKS["arc_challenge"].items(tmp_path)
    write(tmp_path / "winogrande_validation.parquet", [{"sentence": "none", "choices": ["a", "b"], "label": 0}])
    with pytest.raises(InputError, match=r"row 0 is no row of winogrande \(no blank in 'none'\)"):
        LOCAL_TASKS["winogrande"].items(tmp_path)
    write_tasks(tmp_path)
    write(tmp_path / "gsm8k_train_sample.parquet", [{"question": "a", "answer": "b"}] * 4)
    with pytest.raises(InputError, match="shots: 5 worked examples are needed, there are 4"):
        LOCAL_TASKS["gsm8k"].items(tmp_path)
    own = tmp_path / "mine.jsonl"
    for text, message in (
        ('{"context": "a", "choices": ["b"], "label": 0}', "choices: expected a list of two texts or more, got"),
        ("{", "line 1: not valid JSON"),
        ("[1]", "line 1: expected an object, got \\[1\\]"),
        ("", "has no row"),
    ):
        own.write_text(text)
        with pytest.raises(InputError, match=message):
            named(str(own)).items(tmp_path)
