"""Scores of a task over local files, by this package's own log-likelihoods and generation."""

from collections.abc import Sequence
from typing import cast

from lit_layers.errors import InputError
from lit_layers.intervene import generation, likelihoods
from lit_layers.intervene.prompt_tokens import Pair, PromptTokenizer
from lit_layers.intervene.scores import TaskScores, choice_values, completion_values, match_values, rows_of
from lit_layers.intervene.task_prompts import STOPS, Choice, Item, LocalTask, Question, chance, items_hash
from lit_layers.models.families import Network

MAX_NEW_TOKENS = 256  # lm-eval's own


class OwnScorer:
    """The rows of one task, made into tokens once and scored as often as wanted.

    Raises:
        InputError: a continuation of no token.
    """

    def __init__(
        self,
        task: LocalTask,
        items: Sequence[Item],
        tokenizer: PromptTokenizer,
        *,
        max_length: int | None = None,
        batch_size: int = 16,
        max_new_tokens: int | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self.task, self.items, self.tokenizer = task, list(items), tokenizer
        self.max_length = likelihoods.DEFAULT_MAX_LENGTH if max_length is None else max_length
        self.max_new_tokens = MAX_NEW_TOKENS if max_new_tokens is None else max_new_tokens
        self.batch_size, self.vocab_size = batch_size, vocab_size
        self.pairs: list[Pair] = []
        if task.kind != "generation":
            choices = cast("list[Choice]", self.items)
            self.pairs = tokenizer.pairs([pair for item in choices for pair in item.pairs])

    def score(self, model: Network) -> TaskScores:
        """What the model, in evaluation mode, makes of every row.

        Raises:
            InputError: an input that the model does not take.
            FloatingPointError: a log-likelihood that is not a number.
        """
        texts: list[str] = []
        rows: list[list[float]] = []
        if self.task.kind == "generation":
            questions = cast("list[Question]", self.items)
            prompts = [item.prompt for item in questions]
            texts = generation.generate_until(
                model,
                prompts,
                STOPS,
                self.tokenizer,
                max_length=self.max_length,
                max_new_tokens=self.max_new_tokens,
                batch_size=self.batch_size,
                vocab_size=self.vocab_size,
            )
            values = match_values(questions, texts)
            num_cut = generation.num_cut(prompts, self.tokenizer, self.max_length, self.max_new_tokens)
        else:
            choices = cast("list[Choice]", self.items)
            found = likelihoods.log_likelihoods(
                model,
                self.pairs,
                max_length=self.max_length,
                batch_size=self.batch_size,
                vocab_size=self.vocab_size,
            )
            rows, num_cut = rows_of(choices, found), likelihoods.num_cut(self.pairs, self.max_length)
            if self.task.kind == "completion":
                values = completion_values(choices, found)
            else:
                values = choice_values(choices, found, normed=self.task.normed)
        return TaskScores(
            values=values,
            log_likelihoods=rows,
            texts=texts,
            random_score=chance(self.items, self.task),
            rows_hash=items_hash(self.items),
            num_cut=num_cut,
        )


def refuse_unknown_tokens(tokenizer: PromptTokenizer, vocab_size: int) -> None:
    """Refuses a tokenizer whose tokens the model does not all have.

    Raises:
        InputError: it has more.
    """
    if tokenizer.found.vocab_size > vocab_size:
        raise InputError(
            f"tokenizer: it has {tokenizer.found.vocab_size} tokens and the model {vocab_size}: give the model's own"
        )
