"""Tasks of linear probes: how files are read, which split each row belongs to, and what is refused and counted."""

import json
import random
import re
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq
import pytest
import torch

from lit_layers.errors import InputError
from lit_layers.tasks.catalogue import TASKS, find_task
from lit_layers.tasks.probe_task import ProbeTask, TaskData, TaskSplit, draw, hold_out, normalised
from tests.support.data_mapping import mapped_files, write_mapping

WORDS = ["card", "lost", "rate", "home", "game", "vote", "rain", "song", "mail", "tram"]


def made_rows(number: int, seed: int = 0) -> dict[str, list]:
    """Return different texts of three classes with shares 5 : 3 : 2."""
    rng = random.Random(seed)
    texts = [f"{rng.choice(WORDS)} {rng.choice(WORDS)} number {row} of {seed}" for row in range(number)]
    labels = (["sport"] * 5 + ["world"] * 3 + ["art"] * 2) * (number // 10)
    rng.shuffle(labels)
    return {"text": texts, "label": labels}


def write(path: Path, columns: dict[str, list]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.table(columns), path)
    elif path.suffix == ".csv":
        pc.write_csv(pa.table(columns), path)
    else:
        rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def write_splits(folder: Path, suffix: str = ".parquet", **splits: dict[str, list]) -> str:
    for name, columns in splits.items():
        write(folder / f"{name}{suffix}", columns)
    return str(folder)


def refusal(task: ProbeTask, folder: Path | None = None) -> str:
    with pytest.raises(InputError) as refused:
        task.load(None if folder is None else str(folder))
    sentence = str(refused.value)
    assert "\n" not in sentence
    return sentence


def plain(text: str) -> str:
    """Normalise a text independently of the package, so that equal texts compare equal."""
    return re.sub(r"\s+", " ", unicodedata.normalize("NFKC", text).casefold()).strip()


def split_texts(data: TaskData) -> list[set[str]]:
    """Return the texts of each split, and check that no two splits share one."""
    parts = [{plain(text) for text in part.texts} for part in (data.train, data.validation, data.test)]
    assert not parts[0] & parts[1] | parts[0] & parts[2] | parts[1] & parts[2]
    return parts


# --- shares -----------------------------------------------------------------------------------------------------------


def held_out_counts(strata: list, share: float) -> Counter:
    keys = [f"text {row}" for row in range(len(strata))]
    held = hold_out(keys, strata, share, seed=0, purpose="test")
    return Counter(stratum for stratum, each in zip(strata, held, strict=True) if each)


def test_a_share_of_each_class_is_held_out_and_rounding_keeps_the_total():
    assert held_out_counts(["a"] * 10 + ["b"] * 20 + ["c"] * 5, 0.2) == {"a": 2, "b": 4, "c": 1}
    # 0.6 + 2.7 + 2.7 = 6 rows: rounding down gives 0, 2 and 2, and the two largest remainders get one more each.
    assert held_out_counts(["a"] * 2 + ["b"] * 9 + ["c"] * 9, 0.3) == {"b": 3, "c": 3}
    assert held_out_counts(["a"] * 9 + ["b"], 0.45)["b"] == 0, "a class lost its last row"
    assert held_out_counts(["a", "a", "b", "b"], 0.9) == {"a": 1, "b": 1}
    strata = random.Random(0).choices("abcdefg", k=200)
    found, sizes = held_out_counts(strata, 0.15), Counter(strata)
    assert found.total() == 30
    assert all(abs(found[each] - 0.15 * sizes[each]) < 1 for each in sizes)


def test_held_out_rows_depend_on_the_texts_and_the_seed_and_not_on_the_order_of_rows():
    keys = [f"{word} {row}" for row in range(20) for word in WORDS]
    strata = [len(key) % 3 for key in keys]

    def held(order: list[int], seed: int = 0, purpose: str = "test") -> set[str]:
        some, classes = [keys[row] for row in order], [strata[row] for row in order]
        found = hold_out(some, classes, 0.3, seed=seed, purpose=purpose)
        return {key for key, each in zip(some, found, strict=True) if each}

    order = list(range(200))
    once = held(order)
    random.Random(1).shuffle(order)
    assert held(order) == once
    assert held(order, seed=1) != once
    assert held(order, purpose="validation") != once


def test_every_row_is_held_out_equally_often_over_seeds():
    times = Counter()
    keys, strata = [f"text {row}" for row in range(40)], ["a", "b"] * 20
    for seed in range(1000):
        held = hold_out(keys, strata, 0.25, seed=seed, purpose="test")
        times.update(row for row, each in enumerate(held) if each)
    # The mean is 250, the standard deviation sqrt(1000 x 0.25 x 0.75) = 13.7.
    assert all(abs(times[row] - 250) < 4.5 * 13.7 for row in range(40))


def test_texts_more_frequent_than_the_share_of_a_class_are_still_held_out():
    # Ten texts with ten rows and one class each. A class needs 4 of its 20 rows, less than half of the rows of one
    # text.
    strata = [label for label in "abcde" for _ in range(20)]
    keys = [f"text {row // 10}" for row in range(100)]
    assert sum(hold_out(keys, strata, 0.2, seed=0, purpose="test")) == 10
    # Four texts with five rows each: one fits into 8 rows, and two are closer to 8 than one.
    four = [f"text {row // 5}" for row in range(20)]
    assert sum(hold_out(four, ["a"] * 20, 0.4, seed=0, purpose="test")) == 10
    assert sum(hold_out(four, ["a"] * 20, 0.35, seed=0, purpose="test")) == 5
    assert not any(hold_out(["one"] * 100, strata, 0.2, seed=0, purpose="test"))


def test_drawn_rows_are_part_of_a_larger_draw_and_do_not_depend_on_the_order():
    keys = [f"text {row % 60}" for row in range(100)]  # some keys occur twice
    some, more = (draw(keys, number, seed=0, purpose="num_train") for number in (30, 50))
    assert len(set(some)) == 30
    assert set(some) < set(more)
    assert some == sorted(some)
    order = random.Random(0).sample(range(100), 100)
    again = draw([keys[row] for row in order], 30, seed=0, purpose="num_train")
    assert sorted(keys[order[row]] for row in again) == sorted(keys[row] for row in some)
    assert draw(keys, 30, seed=1, purpose="num_train") != some
    assert draw(keys, 200, seed=0, purpose="num_train") == list(range(100))
    equal = ["the same"] * 50 + keys[:50]  # each is drawn separately: mean 10, standard deviation 2
    assert 3 <= sum(row < 50 for row in draw(equal, 20, seed=0, purpose="num_train")) <= 17


def test_texts_are_compared_without_case_white_space_and_unicode_form():
    assert normalised("  ﬁne\tSTRASSE \n") == normalised("Fine Straße") == "fine strasse"
    assert normalised("\uff43afe\u0301") == normalised("café") != normalised("cafe")


# --- splits of a task -------------------------------------------------------------------------------------------------


def test_a_published_test_split_is_kept_and_validation_rows_come_from_train(tmp_path):
    train, test = made_rows(100), made_rows(20, seed=1)
    data = ProbeTask("t", write_splits(tmp_path, train=train, test=test)).load()
    names = ("art", "sport", "world")
    assert (data.name, data.kind, data.classes) == ("t", "classification", names)
    assert (len(data.train), len(data.validation), len(data.test)) == (80, 20, 20)
    assert data.test.texts == tuple(test["text"])
    assert [names[target] for target in data.test.targets.tolist()] == test["label"]
    assert data.train.targets.dtype == torch.int64
    assert data.validation.targets.bincount().tolist() == [4, 10, 6]
    for part in (data.train, data.validation):
        assert list(part.rows) == sorted(part.rows)
        assert [train["text"][row] for row in part.rows] == list(part.texts)
        assert [train["label"][row] for row in part.rows] == [names[each] for each in part.targets.tolist()]
    both = data.train_and_validation()
    assert both.texts == data.train.texts + data.validation.texts
    assert both.targets.tolist() == data.train.targets.tolist() + data.validation.targets.tolist()
    assert sorted(both.rows) == list(range(100))


def test_without_a_test_split_a_share_of_train_becomes_the_test_split(tmp_path):
    source = write(tmp_path / "all.csv", made_rows(200))
    data = ProbeTask("t", source, test=None).load()
    assert (len(data.train), len(data.validation), len(data.test)) == (112, 28, 60)
    assert data.test.targets.bincount().tolist() == [12, 30, 18]
    assert sorted(data.train.rows + data.validation.rows + data.test.rows) == list(range(200))
    fewer = ProbeTask("t", source, test=None, test_share=0.1, validation_share=0.5).load()
    assert (len(fewer.train), len(fewer.validation), len(fewer.test)) == (90, 90, 20)


def test_a_training_row_with_the_text_of_a_test_row_is_left_out_and_counted(tmp_path):
    train, test = made_rows(100), made_rows(20, seed=1)
    for row, text in ((3, test["text"][0].upper()), (4, f"  {test['text'][0]}"), (50, test["text"][9])):
        train["text"][row] = text
    validation = made_rows(10, seed=2)
    validation["text"][0], train["text"][60], train["text"][61] = test["text"][1], *validation["text"][4:6]
    folder = write_splits(tmp_path, train=train, test=test, validation=validation)
    data = ProbeTask("t", folder).load()
    assert (len(data.train_and_validation()), data.num_duplicates, data.num_validation_duplicates) == (97, 3, 0)
    assert set(data.train_and_validation().rows) == set(range(100)) - {3, 4, 50}
    own = ProbeTask("t", folder, validation="validation").load()
    assert (len(own.train), len(own.validation), len(own.test)) == (95, 9, 20)
    assert (own.num_duplicates, own.num_validation_duplicates) == (4, 2)
    assert set(own.train.rows) == set(range(100)) - {3, 4, 50, 60, 61}


def test_no_text_is_in_two_splits(tmp_path):
    rows = made_rows(200)
    for row in range(0, 120, 2):
        rows["text"][row + 1] = rows["text"][row].title()
    folder = write_splits(tmp_path, train=rows, test=made_rows(10, seed=5))
    for test in ("test", None):
        data = ProbeTask("t", folder, test=test).load()
        parts = split_texts(data)
        assert sum(map(len, parts)) < len(data.train) + len(data.validation) + len(data.test)


def test_random_rows_are_drawn_after_duplicates_are_removed_and_fewer_are_part_of_more(tmp_path):
    train, test = made_rows(100), made_rows(20, seed=1)
    train["text"][:10] = test["text"][:10]
    folder = write_splits(tmp_path, train=train, test=test)

    def rows(**options) -> tuple[set[int], set[int]]:
        data = ProbeTask("t", folder, **options).load()
        return set(data.train_and_validation().rows), set(data.test.rows)

    assert len(rows(num_train=90)[0]) == 90
    assert rows(num_train=30)[0] < rows(num_train=50)[0] < rows()[0]
    assert rows(num_train=30)[0] != rows(num_train=30, seed=1)[0]
    assert len(rows(num_test=5)[1]) == 5
    sentence = refusal(ProbeTask("t", folder, num_train=91))
    assert sentence == "task t: num_train: train has 90 rows, 91 were asked for"
    assert refusal(ProbeTask("t", folder, num_test=21)).startswith("task t: num_test: test has 20 rows, 21")


def test_a_balanced_task_has_equally_many_rows_of_each_class(tmp_path):
    source = write(tmp_path / "all.parquet", made_rows(500))  # 100 rows of the rarest class
    data = ProbeTask("t", source, test=None, balance=100).load()
    assert data.test.targets.bincount().tolist() == [30, 30, 30]
    assert data.validation.targets.bincount().tolist() == [14, 14, 14]
    assert data.train.targets.bincount().tolist() == [56, 56, 56]
    assert refusal(ProbeTask("t", source, test=None, balance=101)) == (
        f"task t: balance: {source} has a label of 100 rows: ask for as many at most"
    )


def test_conflicting_labels_and_test_classes_without_training_rows_are_counted_and_kept(tmp_path):
    train, test = made_rows(100), made_rows(20, seed=1)
    train["text"][:5] = ["same text", "Same  text", "SAME TEXT", "other", "other"]
    train["label"][:5] = ["art", "world", "art", "sport", "sport"]
    test["label"][:3] = ["weather", "weather", "chess"]
    data = ProbeTask("t", write_splits(tmp_path, train=train, test=test)).load()
    assert data.num_conflicting == 3
    assert len(data.train_and_validation()) == 100
    assert data.classes == ("art", "chess", "sport", "weather", "world")
    assert data.num_unseen_test_rows == 3


def test_rows_without_text_are_left_out_and_counted(tmp_path):
    train, test = made_rows(100), made_rows(20, seed=1)
    train["text"][7], train["text"][8], test["text"][2] = "", " \n", None
    folder = write_splits(tmp_path, train=train, test=test)
    data = ProbeTask("t", folder).load()
    assert (len(data.train_and_validation()), len(data.test), data.num_empty) == (98, 19, 3)
    assert not {7, 8} & set(data.train_and_validation().rows)


# --- reading files ----------------------------------------------------------------------------------------------------


def test_parquet_csv_and_jsonl_give_the_same_task(tmp_path):
    rows, test = made_rows(100), made_rows(20, seed=1)
    rows["text"][:3] = ["a, b\nand “c”", 'say "no"', "NA"]
    rows["text"][3] = "17"
    found = [
        ProbeTask("t", write_splits(tmp_path / suffix[1:], suffix, train=rows, test=test)).load()
        for suffix in (".parquet", ".csv", ".jsonl")
    ]
    assert len({data.content_hash() for data in found}) == 1
    assert len({data.train.rows for data in found}) == 1
    assert {*rows["text"]} == {*found[1].train_and_validation().texts}


def test_cells_of_a_csv_are_read_as_written_except_numbers_of_a_regression(tmp_path):
    codes, values = tmp_path / "codes.csv", tmp_path / "values.csv"
    codes.write_text("text,label,q,costs\n" + "".join(f"text {n},{['01', '1'][n % 2]},007,0.50\n" for n in range(60)))
    data = ProbeTask("t", str(codes), text="{text} {q} costs {costs}", test=None).load()
    assert data.classes == ("01", "1")
    for text, label in zip(data.train.texts, data.train.targets.tolist(), strict=True):
        number = int(text.split()[1])
        assert text == f"text {number} 007 costs 0.50"
        assert label == number % 2
    values.write_text("text,label\n" + "".join(f"text {n},{n * 0.5}\n" for n in range(60)))
    data = ProbeTask("t", str(values), kind="regression", test=None).load()
    assert data.train.targets.tolist() == [int(text.split()[1]) * 0.5 for text in data.train.texts]


def test_a_large_csv_may_have_line_ends_in_its_texts(tmp_path):
    texts = [f"{row}\n" + "a line, and\nanother\n" * 100 for row in range(1000)]  # 2 MB: read in several blocks
    data = ProbeTask("t", write(tmp_path / "all.csv", {"text": texts, "label": [0, 1] * 500}), test=None).load()
    assert [texts[row] for row in data.test.rows] == list(data.test.texts)
    assert len(data.train_and_validation()) == 700


def test_blank_lines_and_half_surrogate_pairs_in_jsonl_are_accepted(tmp_path):
    path = tmp_path / "all.jsonl"
    lines = [json.dumps({"text": f"{row} \ud83d", "label": row % 2}) for row in range(20)]
    path.write_text("\n\n".join(lines) + "\n \n", encoding="utf-8")
    data = ProbeTask("t", str(path), test=None).load()
    assert sorted(data.train.rows + data.validation.rows + data.test.rows) == list(range(20))
    assert data.test.texts == tuple(f"{row} ?" for row in data.test.rows)


def test_a_source_is_a_folder_a_file_or_a_pattern(tmp_path):
    rows, test = made_rows(100), made_rows(20, seed=1)
    write(tmp_path / "x_train.csv", rows)
    write(tmp_path / "x_test.csv", test)
    folder = write_splits(tmp_path / "folder", train=rows, test=test)
    pattern_data, folder_data = (ProbeTask("t", source).load() for source in (str(tmp_path / "x_{split}.csv"), folder))
    assert pattern_data.content_hash() == folder_data.content_hash()
    joined = ProbeTask("t", folder, train=["train", "test"], test=None).load()
    numbers = joined.train.rows + joined.validation.rows + joined.test.rows
    assert sorted(numbers) == list(range(120))
    texts = rows["text"] + test["text"]
    assert [texts[row] for row in joined.test.rows] == list(joined.test.texts)


def test_a_text_can_be_composed_from_columns(tmp_path):
    rows = made_rows(100) | {"choices": [[f"yes {row}", f"no {row}"] for row in range(100)]}
    source = write(tmp_path / "all.jsonl", rows)
    data = ProbeTask("t", source, text="{text}? A. {choices[0]}, B. {choices[1]}.", test=None).load()
    row = data.train.rows[0]
    assert data.train.texts[0] == f"{rows['text'][row]}? A. yes {row}, B. no {row}."  # the last braces name no column


def test_only_the_requested_rows_are_used(tmp_path):
    rows = made_rows(100) | {"year": [2000 + row % 4 for row in range(100)]}
    source = write(tmp_path / "all.parquet", rows)
    data = ProbeTask("t", source, test=None, where={"year": [2001, 2003], "label": ["art", "sport"]}).load()
    wanted = {row for row in range(100) if row % 2 and rows["label"][row] != "world"}
    assert set(data.train.rows + data.validation.rows + data.test.rows) == wanted
    assert data.classes == ("art", "sport")


def test_labels_are_integers_or_names(tmp_path):
    three = ("no", "maybe", "yes")
    cases = [  # three labels, the `classes` option, the names, the index of each label
        ([10, 2, 7], None, ("2", "7", "10"), [2, 0, 1]),
        (["b", "c", "a"], None, ("a", "b", "c"), [1, 2, 0]),
        ([2.0, 0.0, 1.0], three, three, [2, 0, 1]),
        (["yes", "no", "no"], three, three, [2, 0, 0]),
        ([True, False, True], None, ("0", "1"), [1, 0, 1]),
    ]
    for labels, classes, names, numbers in cases:
        source = write(tmp_path / "all.parquet", {"text": made_rows(60)["text"], "label": labels * 20})
        data = ProbeTask("t", source, test=None, classes=classes).load()
        assert data.classes == names
        assert data.train.targets.tolist() == [numbers[row % 3] for row in data.train.rows], labels


def test_a_regression_has_numbers_and_is_split_value_by_value_if_few_differ(tmp_path):
    texts = made_rows(200)["text"]
    stars = [0, 1, 2, 3, 4] * 40
    few = write(tmp_path / "few.parquet", {"text": texts, "stars": stars})
    data = ProbeTask("t", few, kind="regression", label="stars", label_offset=1.0, test=None).load()
    assert data.classes is None
    assert data.train.targets.dtype == torch.float64
    assert Counter(data.test.targets.tolist()) == {1: 12, 2: 12, 3: 12, 4: 12, 5: 12}
    assert [stars[row] + 1 for row in data.train.rows] == data.train.targets.tolist()
    assert data.num_unseen_test_rows == 0
    many = write(tmp_path / "many.parquet", {"text": texts, "stars": [row / 7 for row in range(200)]})
    data = ProbeTask("t", many, kind="regression", label="stars", test=None).load()
    assert len(data.test) == 60
    assert data.test.targets.tolist() == [row / 7 for row in data.test.rows]


def test_the_hash_depends_on_texts_targets_and_splits(tmp_path):
    train, test = made_rows(100), made_rows(20, seed=1)

    def digest(name: str = "t", train=train, test=test, **options) -> str:
        folder = write_splits(tmp_path / str(random.random()), train=train, test=test)
        return ProbeTask(name, folder, **options).load().content_hash()

    assert digest() == digest() == digest("other name") == digest(classes=("art", "sport", "world"))
    text, label = ({name: list(values) for name, values in test.items()} for _ in range(2))
    text["text"][3] += "!"
    label["label"][0] = "art" if label["label"][0] != "art" else "sport"
    others = [digest(test=text), digest(test=label), digest(seed=1), digest(validation_share=0.1)]
    others += [digest(num_test=19), digest(classes=("art", "sport", "world", "more"))]
    assert len({digest(), *others}) == 7
    assert re.fullmatch("[0-9a-f]{16}", digest())
    one, two = (TaskSplit((text,), torch.tensor([target]), (target,)) for target, text in enumerate("ab"))
    moved = [
        TaskData("t", "classification", *parts, ("x", "y")) for parts in ((one + two, one, two), (one, two + one, two))
    ]
    assert moved[0].content_hash() != moved[1].content_hash()


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_invalid_options_are_refused_before_anything_is_read():
    cases = [
        ({"test_share": 1.0}, "task t: test_share: expected less than 1, got 1.0"),
        ({"validation_share": 0.0}, "task t: validation_share: expected more than 0, got 0.0"),
        ({"balance": -1}, "task t: balance: expected at least 1, got -1"),
        ({"seed": -1}, "task t: seed: expected at least 0, got -1"),
    ]
    for options, sentence in cases:
        task = ProbeTask("t", "nowhere.csv", **options)
        for refuse in (task.check, lambda task=task: find_task(task), task.load):
            with pytest.raises(InputError, match="^" + re.escape(sentence)):
                refuse()


def test_invalid_labels_are_refused_with_their_row(tmp_path):
    missing = "task t: label: row 2 of FILE has no value in column 'label'"
    numbers, classes = {"kind": "regression"}, {"classes": ("no", "yes")}
    cases = [
        (["a", "b", None, "a", "b", "b"], ".parquet", {}, missing),
        (["a", "b", "", "a", "b", "b"], ".csv", {}, missing),
        ([1, 0, None, 0, 1, 1], ".csv", {}, missing),
        ([1.0, 0.0, float("nan"), 0.0, 1.0, 1.0], ".parquet", numbers, missing),
        ([0, 1, 5, 1, 0, 1], ".parquet", classes, "the label 5, expected one of no, yes or a number from 0 to 1"),
        ([0, 1, 1, -1, 0, 1], ".parquet", classes, "row 3 of FILE has the label -1, "),
        (["no", "maybe"] * 3, ".parquet", classes, "row 1 of FILE has the label 'maybe', "),
        (["a"] * 6, ".parquet", {}, "task t: label: all rows of train have 'a', a probe needs two labels"),
        ([3.0] * 6, ".parquet", numbers, "task t: label: all rows of train have 3.0, "),
        ([0.5, 1.0] * 3, ".parquet", {}, "row 0 of FILE has 0.5, expected an integer or a name, or kind regression"),
        ([1, "a", 2, "b", 3, "c"], ".jsonl", {}, "column 'label' mixes numbers and names: use one"),
        (["a", "b"] * 3, ".parquet", numbers, "row 0 of FILE has 'a', a regression needs finite numbers"),
        ([[1], [2]] * 3, ".parquet", {}, "task t: label: row 0 of FILE has [1], expected an integer or a name"),
    ]
    for labels, suffix, options, sentence in cases:
        rows = {"text": [f"text {row}" for row in range(6)], "label": labels}
        source = write(tmp_path / f"all{suffix}", rows)
        assert sentence in refusal(ProbeTask("t", source, test=None, **options)).replace(source, "FILE")


def test_missing_or_damaged_files_splits_columns_and_rows_are_refused_in_one_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_splits(tmp_path / "set", train=made_rows(20), test=made_rows(20, seed=1))
    write_splits(tmp_path / "same", train=made_rows(20), test=made_rows(20))
    write_splits(tmp_path / "two", train=made_rows(20), test=made_rows(20, seed=1))
    write(tmp_path / "two" / "train.csv", made_rows(20))
    write(tmp_path / "one.csv", made_rows(20))
    write(tmp_path / "few.csv", {"text": ["a", "b"], "label": [0, 1]})
    write(tmp_path / "year.jsonl", made_rows(20) | {"year": [2000, 2001] * 10, "choices": [["yes", "no"]] * 20})
    write(tmp_path / "numbers.parquet", {"text": [1, 2], "label": [0, 1]})
    write(tmp_path / "none.parquet", {"text": pa.array([], pa.string()), "label": pa.array([], pa.int64())})
    pq.write_table(pa.table([pa.array(["a"])] * 3, names=["text", "label", "label"]), tmp_path / "twice.parquet")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and no more")
    (tmp_path / "broken.jsonl").write_text('{"text": "a", "label": 1}\n{"text": ')
    (tmp_path / "list.jsonl").write_text("[1]\n")
    (tmp_path / "broken.csv").write_bytes(b"text,label\na\xff,1\n")
    one: dict[str, Any] = {"test": None}
    cases = [
        ("set", {"validation": "dev"}, "source: expected one file dev.parquet|.csv|.jsonl in set, it has test.parquet"),
        ("two", {}, "train.parquet|.csv|.jsonl in two, it has test.parquet, train.csv, train.parquet"),
        ("none.csv", one, "source: expected the split 'train' in none.csv, there is no such file"),
        ("data/x_{split}.csv", {}, "expected the split 'train' in data/x_train.csv, there is no"),
        ("one.csv", {}, "test: one.csv is one file without splits: set test to null to cut off a share"),
        ("set", {"where": {"x": 1}}, "where: set/train.parquet has no column 'x'"),
        ("twice.parquet", one, "label: twice.parquet has several columns 'label'"),
        ("broken.parquet", one, "broken.parquet is no parquet file, or only a part of one ("),
        ("broken.jsonl", one, "broken.jsonl, line 2: expected a JSON object ("),
        ("list.jsonl", one, "list.jsonl, line 1: expected a JSON object ("),
        ("broken.csv", one, "broken.csv cannot be read as UTF-8 csv with a head line ("),
        ("numbers.parquet", one, "row 0 of numbers.parquet does not fit 'text' (expected text, found int)"),
        ("none.parquet", one, "source: no row of none.parquet is left"),
        ("year.jsonl", one | {"text": "{text} {answer}"}, "year.jsonl has no column 'answer': it has text, label, "),
        ("year.jsonl", one | {"text": "{choices[2]}"}, "does not fit '{choices[2]}' (list index out of range)"),
        ("year.jsonl", one | {"text": "{text.__class__}"}, "text: expected {column} or {column[0]} in '{text._"),
        ("year.jsonl", one | {"where": {"year": "2001"}}, "has no '2001' in column 'year': it holds 2000, 2001"),
        ("few.csv", one | {"where": {"text": "a", "label": 1}}, "where: no row of few.csv is left"),
        ("few.csv", one, "validation_share: cannot cut 0.2 off 1 rows, equal texts together"),
        ("same", {}, "train: all its texts are in test, too"),
    ]
    for source, options, sentence in cases:
        found = refusal(ProbeTask("t", source, **options))
        assert found.startswith("task t: ")
        assert sentence in found


def test_a_task_without_a_local_copy_is_refused(tmp_path):
    write_mapping(tmp_path)
    assert refusal(TASKS["trec"], tmp_path).startswith(f"folder: {tmp_path}/tasks.yaml has no probe 'trec', it has ")
    assert refusal(TASKS["sst2"], tmp_path) == (
        f"task sst2: source: expected the split 'train' in {tmp_path}/glue/sst2_train.parquet, there is no such file"
    )
    own = write(tmp_path / "own.csv", made_rows(20))
    assert len(ProbeTask("t", own, test=None).load(str(tmp_path)).test) == 6  # own files need no copy


# --- the Hub, the catalogue, recipes ----------------------------------------------------------------------------------


def test_without_a_folder_the_splits_and_class_names_of_the_hub_are_used(monkeypatch):
    import datasets

    asked, rows = [], made_rows(60)
    known = datasets.ClassLabel(names=["world", "weather", "sport", "art"])
    features = datasets.Features({"text": datasets.Value("string"), "label": known})

    def load_dataset(path, config, *, split):
        asked.append((path, config, split))
        texts = [f"{split} {text}" for text in rows["text"]]
        return datasets.Dataset.from_dict({"text": texts, "label": known.str2int(rows["label"])}, features=features)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    data = ProbeTask("t", "org/name:config", validation="dev").load()
    assert asked == [("org/name", "config", "train"), ("org/name", "config", "dev"), ("org/name", "config", "test")]
    names = ("world", "sport", "art")  # in the order of the Hub, without the class that has no row
    assert data.classes == names
    assert [names[target] for target in data.test.targets.tolist()] == rows["label"]
    ProbeTask("t", "org/name", test=None).load()
    assert asked[3:] == [("org/name", None, "train")]
    some = ProbeTask("t", "org/name", test=None, where={"label": [0, 3]}).load()
    assert some.classes == ("world", "art")
    assert refusal(ProbeTask("t", "org/name", text="words")) == (
        "task t: text: the train split of org/name has no column 'words': it has text, label"
    )

    def refuse(*_, **__):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    assert refusal(ProbeTask("t", "org/name")) == (
        "task t: source: the split 'train' of 'org/name' is no local file and cannot be had from the Hub "
        "(ConnectionError: no network): check the names and the network"
    )


def test_the_catalogue_has_the_tasks_of_the_paper_and_every_row_is_a_task():
    assert {"banking77", "ag_news", "tweet_sentiment", "yelp", "mmlu_humanities"} < set(TASKS)
    for name, task in TASKS.items():
        assert task.name == name
        assert task.description
        assert find_task(name) is task
    paper = {name: (TASKS[name].num_train, TASKS[name].num_test) for name in ("ag_news", "tweet_sentiment")}
    assert paper == {"ag_news": (10_000, None), "tweet_sentiment": (10_223, 4_382)}
    assert (TASKS["yelp"].kind, TASKS["yelp"].balance, TASKS["yelp"].test_share) == ("regression", 2_000, 0.3)


def test_the_page_of_tasks_lists_the_catalogue():
    page = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|.*\| `(\S+/\S+)` \|$", page, re.MULTILINE)
    assert rows == [(task.name, task.kind, task.source) for task in TASKS.values()]


# --- real data --------------------------------------------------------------------------------------------------------

# Rows of (train, validation, test) from the pages of the data sets, and the number of classes.
PUBLISHED = {
    "banking77": (10_003, 0, 3_080, 77),
    "ag_news": (8_000, 0, 7_600, 4),
    "tweet_sentiment_extraction": (27_480, 0, 3_534, 3),
    "sst2": (67_349, 0, 872, 2),
    "emotion": (16_000, 2_000, 2_000, 6),
    "imdb": (10_000, 0, 5_000, 2),
    "twenty_newsgroups": (11_314, 0, 7_532, 20),
    "cola": (8_551, 0, 1_043, 2),
    "tweeteval_emotion": (3_257, 374, 1_421, 4),
    "tweeteval_irony": (2_862, 955, 784, 2),
}


@pytest.fixture
def loaded(realdata):
    def load(name: str) -> TaskData:
        if not (realdata / str(mapped_files("probe")[name].files).split("/")[0]).is_dir():
            pytest.skip(f"no files of {name} in {realdata}")
        return find_task(name).load(str(realdata))

    return load


def check_splits(data: TaskData) -> None:
    """Check that no text is in two splits, and that every class is in every split."""
    assert all(all(part) for part in split_texts(data))
    assert data.num_unseen_test_rows == 0
    if data.classes is not None:
        for part in (data.train, data.validation, data.test):
            assert set(part.targets.tolist()) == set(range(len(data.classes)))


@pytest.mark.soak
@pytest.mark.realdata
def test_a_published_data_set_is_read_completely_except_for_texts_of_its_test_split(loaded, realdata):
    for name in PUBLISHED:
        check_published(name, loaded(name), realdata)
    data = loaded("tweet_sentiment")  # the sizes in the paper
    assert (len(data.train_and_validation()), len(data.test)) == (10_223, 4_382)
    assert data.classes == ("negative", "positive")
    check_splits(data)


def check_published(name: str, data: TaskData, realdata: Path) -> None:
    """Check that every row is in a split, or is counted as a duplicate or as empty."""
    (*numbers, num_classes), task = PUBLISHED[name], TASKS[name]
    pattern, texts = str(realdata / str(mapped_files("probe")[name].files)), []
    for split, number in zip((task.train, task.validation, task.test), numbers, strict=True):
        rows = pq.read_table(pattern.replace("{split}", str(split)))[task.text].to_pylist() if number else []
        assert len(rows) == number, (name, split)
        texts.append([plain(text) for text in rows])
    test_texts = {*texts[2]}
    assert data.num_empty == sum(not text for part in texts for text in part), name
    kept = len(data.train) + len(data.validation) + len(data.test)
    assert kept + data.num_duplicates + data.num_validation_duplicates + data.num_empty == sum(numbers), name
    assert data.num_duplicates == sum(bool(text) and text in test_texts for text in texts[0] + texts[1]), name
    assert len(data.classes or ()) == num_classes, name
    check_splits(data)


@pytest.mark.realdata
def test_yelp_has_equally_many_reviews_of_each_star(loaded):
    data = loaded("yelp")
    # Two stars are rarest, with 435 + 419 reviews. The paper has 2,000 of each: 7,000 for training, 3,000 for testing.
    both, test = (Counter(part.targets.tolist()) for part in (data.train_and_validation(), data.test))
    assert both + test == dict.fromkeys([1.0, 2.0, 3.0, 4.0, 5.0], 854)
    assert set(test.values()) <= {256, 257}
    check_splits(data)


@pytest.mark.realdata
def test_mmlu_humanities_has_the_questions_of_the_thirteen_subjects(loaded, realdata):
    data = loaded("mmlu_humanities")
    rows = pq.read_table(realdata / "benchmarks" / "mmlu_test.parquet").to_pylist()
    humanities = {number for number, row in enumerate(rows) if row["category"] == "humanities"}
    assert set(data.train_and_validation().rows + data.test.rows) == humanities
    assert len(humanities) == 4_705
    assert abs(len(data.test) - 0.3 * 4_705) <= 1
    first = rows[data.test.rows[0]]
    a, b, c, d = first["choices"]
    assert data.test.texts[0] == f"question: {first['question']} answer: A. {a}, B. {b}, C. {c}, D. {d}"
    assert [rows[number]["label"] for number in data.test.rows] == data.test.targets.tolist()
    assert data.classes == ("A", "B", "C", "D")
    check_splits(data)
