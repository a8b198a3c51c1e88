"""Benchmark tasks as prompts: what a model is given of a row, what counts as right, in the words of lm-eval.

Source: the task files of lm-eval 0.4.13 (github.com/EleutherAI/lm-evaluation-harness), whose prompts, targets and
examples these are; its data sets of the Hub are read here from local copies.
"""

import hashlib
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lit_layers.errors import InputError
from lit_layers.intervene.task_items import SUFFIXES, Row, read_rows

Kind = Literal["choice", "completion", "generation"]
NUM_SHOTS, SHOT_SEED = 5, 1234  # of gsm8k; the seed is lm-eval's own
STOPS = ("Question:", "</s>", "<|im_end|>")  # of gsm8k


@dataclass(frozen=True)
class Choice:
    """Continuations of a context each, of which one is right; a completion has that one alone."""

    pairs: tuple[tuple[str, str], ...]
    gold: int
    lengths: tuple[int, ...]  # characters of the choices: what acc_norm divides by


@dataclass(frozen=True)
class Question:
    """A prompt that the model goes on with, and the answer."""

    prompt: str
    answer: str


Item = Choice | Question


@dataclass(frozen=True, kw_only=True)
class LocalTask:
    """A task over local files.

    `random_score` is what guessing scores; None: the mean of 1/choices over the very rows.
    """

    name: str
    file: str
    kind: Kind
    columns: tuple[str, ...]
    item: Callable[[Row], Choice] | None = None  # of a row; None for generation
    normed: bool = False  # whether it has acc_norm
    random_score: float | None = None
    shots: str | None = None  # the file of worked examples
    lm_eval: str | None = None  # its name there, where it is not `name`
    difference: str = ""  # from what lm-eval scores

    def items(self, folder: Path, limit: int | None = None) -> list[Item]:
        """The first `limit` rows as prompts.

        Raises:
            InputError: files or columns that are missing, or a row that is no item of the task.
        """
        path = folder / self.file
        rows = read_rows(path, self.columns, limit)
        if self.item is None:
            assert self.shots is not None, "every task of generation has examples"
            return list(_worked(rows, read_rows(folder / self.shots, self.columns)))
        items: list[Item] = []
        for number, row in enumerate(rows):
            try:
                found = self.item(row)
            except (TypeError, ValueError, AttributeError, IndexError) as error:
                raise InputError(f"{path}: row {number} is no row of {self.name} ({error})") from error
            if not 0 <= found.gold < len(found.lengths):
                raise InputError(
                    f"{path}: row {number} has {len(found.lengths)} choices and the label {found.gold}, expected "
                    f"0..{len(found.lengths) - 1}"
                )
            items.append(found)
        return items


def of_own(path: str) -> LocalTask:
    """A task of the user's: a file with the columns context, choices (a list, in CSV written as JSON) and label."""
    return LocalTask(
        name=Path(path).stem, file=path, kind="choice", columns=("context", "choices", "label"), item=_own, normed=True
    )


def named(task: str) -> LocalTask:
    """The task of this name, or of this file.

    Raises:
        InputError: there is none.
    """
    if task.endswith(SUFFIXES):
        return of_own(task)
    if task not in LOCAL_TASKS:
        raise InputError(
            f"task: there is no {task!r} among the local ones; choose from {', '.join(LOCAL_TASKS)}, or name a file "
            f"({', '.join(SUFFIXES)}) with the columns context, choices and label"
        )
    return LOCAL_TASKS[task]


def chance(items: list[Item], task: LocalTask) -> float:
    """What guessing scores on these rows."""
    if task.random_score is not None:
        return task.random_score
    return sum(1 / len(item.lengths) for item in items if isinstance(item, Choice)) / len(items)


def items_hash(items: list[Item]) -> str:
    """Sixteen hex digits over every prompt, choice and answer, in their order."""
    plain = [[type(item).__name__, *vars(item).values()] for item in items]
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]


def cleaned(text: str) -> str:
    """A text of HellaSwag without the marks that WikiHow left in it, as lm-eval cleans it.

    Not to be done twice: what a mark leaves at the start of a text is stripped the second time.
    """
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def _choice(context: str, choices: list[str], gold: Any) -> Choice:
    return Choice(tuple((context, f" {choice}") for choice in choices), int(gold), tuple(map(len, choices)))


def _lambada(row: Row) -> Choice:
    *context, target = row["text"].split(" ")
    return Choice(((" ".join(context), f" {target}"),), 0, (len(target),))


def _question_and_choices(row: Row) -> Choice:
    return _choice(f"Question: {row['question']}\nAnswer:", row["choices"], row["label"])


def _hellaswag(row: Row) -> Choice:
    return _choice(row["query"], row["choices"], row["label"])


def _hellaswag_raw(row: Row) -> Choice:
    context = cleaned(row["query"]).lstrip()  # "[header]" stood in front of it
    if not row["query"].startswith("["):  # a caption: the sentence that was begun gets its capital letter
        before, end, begun = context.rpartition(". ")
        context = before + end + begun.capitalize()
    return _choice(context, [cleaned(choice) for choice in row["choices"]], row["label"])


def _winogrande(row: Row) -> Choice:
    before, mark, after = row["sentence"].partition("_")
    if not mark:
        raise ValueError(f"no blank in {row['sentence']!r}")
    pairs = tuple((before + choice, f" {after.strip()}") for choice in row["choices"])
    return Choice(pairs, int(row["label"]), tuple(map(len, row["choices"])))


def _piqa(row: Row) -> Choice:
    return _choice(f"Question: {row['goal']}\nAnswer:", row["choices"], row["label"])


def _openbookqa(row: Row) -> Choice:
    return _choice(row["question"], row["choices"], row["label"])


def _sciq(row: Row) -> Choice:
    context = f"{row['support'].lstrip()}\nQuestion: {row['question']}\nAnswer:"
    return _choice(context, [*row["distractors"], row["correct_answer"]], len(row["distractors"]))


def _boolq(row: Row) -> Choice:
    return _choice(f"{row['passage']}\nQuestion: {row['question']}?\nAnswer:", ["no", "yes"], row["label"])


def _own(row: Row) -> Choice:
    choices = json.loads(row["choices"]) if isinstance(row["choices"], str) else row["choices"]
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(choice, str) for choice in choices):
        raise ValueError(f"choices: expected a list of two texts or more, got {choices!r}")
    return _choice(row["context"], choices, row["label"])


def _worked(rows: list[Row], pool: list[Row]) -> list[Question]:
    """Each question behind worked examples, which are drawn for it as lm-eval draws them from its training split."""
    if len(pool) < NUM_SHOTS:
        raise InputError(f"shots: {NUM_SHOTS} worked examples are needed, there are {len(pool)}")
    draws, found = random.Random(SHOT_SEED), []
    for row in rows:
        shots = draws.sample(pool, NUM_SHOTS)
        worked = "".join(f"Question: {shot['question']}\nAnswer: {shot['answer']}\n\n" for shot in shots)
        found.append(Question(f"{worked}Question: {row['question']}\nAnswer:", row["answer"]))
    return found


_ASKED = ("question", "choices", "label")
_PART = "a fixed random part of the official rows"
LOCAL_TASKS = {
    task.name: task
    for task in (
        LocalTask(
            name="lambada",
            file="lambada_openai_test.parquet",
            kind="completion",
            columns=("text",),
            item=_lambada,
            random_score=0.0,
            lm_eval="lambada_openai",
        ),
        LocalTask(
            name="arc_challenge",
            file="arc_challenge_test.parquet",
            kind="choice",
            columns=_ASKED,
            item=_question_and_choices,
            normed=True,
            difference=_PART,
        ),
        LocalTask(
            name="hellaswag",
            file="hellaswag_validation.parquet",
            kind="choice",
            columns=("query", "choices", "label"),
            item=_hellaswag,
            normed=True,
            random_score=0.25,
            difference=_PART,
        ),
        LocalTask(
            name="winogrande",
            file="winogrande_validation.parquet",
            kind="choice",
            columns=("sentence", "choices", "label"),
            item=_winogrande,
            random_score=0.5,
        ),
        LocalTask(
            name="gsm8k",
            file="gsm8k_test.parquet",
            kind="generation",
            columns=("question", "answer"),
            random_score=0.0,
            shots="gsm8k_train_sample.parquet",
            difference=f"{_PART}; examples drawn from 1,000 training questions instead of 7,473",
        ),
        LocalTask(
            name="arc_easy",
            file="arc_easy_test.parquet",
            kind="choice",
            columns=_ASKED,
            item=_question_and_choices,
            normed=True,
            difference=_PART,
        ),
        LocalTask(
            name="hellaswag_raw",
            file="hellaswag_validation_raw.parquet",
            kind="choice",
            columns=("query", "choices", "label"),
            item=_hellaswag_raw,
            normed=True,
            random_score=0.25,
            lm_eval="hellaswag",
            difference=f"{_PART}; without the activity that lm-eval puts in front of each context",
        ),
        LocalTask(
            name="piqa",
            file="piqa_validation.parquet",
            kind="choice",
            columns=("goal", "choices", "label"),
            item=_piqa,
            normed=True,
        ),
        LocalTask(
            name="openbookqa",
            file="openbookqa_validation.parquet",
            kind="choice",
            columns=_ASKED,
            item=_openbookqa,
            normed=True,
            difference="the validation split; lm-eval scores the test split",
        ),
        LocalTask(
            name="sciq",
            file="sciq_validation.parquet",
            kind="choice",
            columns=("question", "support", "correct_answer", "distractors"),
            item=_sciq,
            normed=True,
            difference="the validation split; lm-eval scores the test split",
        ),
        LocalTask(
            name="boolq",
            file="boolq_validation_sample.parquet",
            kind="choice",
            columns=("passage", "question", "label"),
            item=_boolq,
            difference=_PART,
        ),
    )
}
# The five whose normalised scores have a median, in the published figures.
PAINTED = ("lambada", "arc_challenge", "hellaswag", "winogrande", "gsm8k")
