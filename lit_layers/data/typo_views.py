"""Views of texts: copies with typing errors, which readers still understand.

A view is made in three steps: `split` puts a space into words, `random character` puts a letter or digit in the place
of characters, `keyboard` the character of a key beside. Each step takes ceil(share x words) of a text's words, at least
one and at most `max_words`, among those of 4 or more characters; the last two change ceil(share x length) characters of
each.

Source: the defaults of Skean et al., arXiv 2502.02013, appendix D.
"""

import itertools
import math
import random
import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lit_layers.errors import InputError

Action = Literal["substitute", "insert", "swap", "delete"]
ACTIONS: tuple[Action, ...] = ("substitute", "insert", "swap", "delete")
LEAST_CHARACTERS = 4
MOST_EQUAL = 0.05  # share of texts with two equal views, above which views are refused

_LETTERS = string.ascii_letters + string.digits
_ROWS = ("1234567890-", "qwertyuiop[", "asdfghjkl;'", "zxcvbnm,./")


def _neighbours() -> dict[str, str]:
    """Keys that touch, on a US keyboard whose rows are shifted by half a key each."""
    neighbours: dict[str, str] = {}
    for number, row in enumerate(_ROWS):
        for place, key in enumerate(row):
            beside = [row[place - 1 : place], row[place + 1 : place + 2]]
            above = _ROWS[number - 1][place : place + 2] if number else ""
            below = _ROWS[number + 1][max(place - 1, 0) : place + 1] if number + 1 < len(_ROWS) else ""
            keys = "".join(beside) + above + below
            neighbours[key] = keys
            neighbours[key.upper()] = keys.upper() if key.isalpha() else keys
    return neighbours


_NEIGHBOURS = _neighbours()


@dataclass(frozen=True, eq=False)
class Views:
    """The views of texts, and how far they are from them."""

    texts: list[list[str]]  # texts[v][i]: view v of text i
    num_equal: int  # texts with two equal views
    num_unchanged: int  # texts none of whose words has four characters: their views are the text
    changed_fraction: float  # of the words of all texts, how many a view changes, on average


def make_views(
    texts: Sequence[str],
    num_views: int = 2,
    *,
    seed: int = 0,
    share: float = 0.3,
    max_words: int = 10,
    actions: Sequence[Action] = ("substitute",),
) -> Views:
    """`num_views` views of each text, all of them perturbed. Each depends on the seed, its number and its text's place.

    White space between words stays as it is. A text whose words all have fewer than 4 characters has no word to change:
    its views are the text itself, and it counts among those with equal views.

    Raises:
        InputError: two views that agree on all texts, or more than 5% of the texts with two equal views.
    """
    views = [
        [view_of(text, (seed, number, row), share=share, max_words=max_words, actions=actions) for row, text in rows]
        for number, rows in ((number, enumerate(texts)) for number in range(num_views))
    ]
    num_equal = sum(len({view[row] for view in views}) < num_views for row in range(len(texts)))
    _check_different(views, num_equal)
    changed = [  # how many words of each text its views lack
        (Counter(text.split()) - Counter(view[row].split())).total() for view in views for row, text in enumerate(texts)
    ]
    num_words = num_views * sum(len(text.split()) for text in texts)
    return Views(
        views,
        num_equal,
        num_unchanged=sum(not any(map(_is_long, text.split())) for text in texts),
        changed_fraction=sum(changed) / max(num_words, 1),
    )


def view_of(
    text: str,
    random_state: tuple[int, int, int],
    *,
    share: float = 0.3,
    max_words: int = 10,
    actions: Sequence[Action] = ("substitute",),
) -> str:
    """One view of a text; `random_state` is (seed, number of the view, place of the text) and decides all of it."""
    draw = random.Random("/".join(map(str, random_state)))
    for step in ("split", "random character", "keyboard"):
        pieces = re.split(r"(\s+)", text)  # words at even places, white space between them
        places = [place for place, piece in enumerate(pieces) if piece and not piece.isspace()]
        long = [place for place in places if _is_long(pieces[place])]
        count = min(max(1, math.ceil(share * len(places))), max_words, len(long))
        for place in sorted(draw.sample(long, count)):
            word = pieces[place]
            if step == "split":
                middle = draw.randrange(1, len(word))
                pieces[place] = f"{word[:middle]} {word[middle:]}"
            else:
                pieces[place] = _perturbed(word, draw, share, actions, _LETTERS if step != "keyboard" else None)
        text = "".join(pieces)
    return text


def _perturbed(word: str, draw: random.Random, share: float, actions: Sequence[Action], letters: str | None) -> str:
    """A word with changes in a share of its places; other characters are of `letters`, or keys beside theirs."""

    def other(character: str) -> str:
        choices = (_NEIGHBOURS.get(character, "") if letters is None else letters).replace(character, "")
        return draw.choice(choices) if choices else character  # no key has it

    action = actions[0] if len(actions) == 1 else draw.choice(list(actions))
    characters = list(word)
    for place in sorted(draw.sample(range(len(word)), math.ceil(share * len(word))), reverse=True):
        if action == "substitute":
            characters[place] = other(characters[place])
        elif action == "insert":
            characters.insert(place, other(characters[place]))
        elif action == "delete" and len(characters) > 1:
            del characters[place]
        elif action == "swap":
            beside = place + 1 if place + 1 < len(characters) else place - 1
            characters[place], characters[beside] = characters[beside], characters[place]
    return "".join(characters)


def _is_long(word: str) -> bool:
    return len(word) >= LEAST_CHARACTERS


def _check_different(views: list[list[str]], num_equal: int) -> None:
    num_texts = len(views[0])
    for (first, one), (second, other) in itertools.combinations(enumerate(views), 2):
        if num_texts and one == other:
            raise InputError(
                f"views: views {first} and {second} are equal for all {num_texts} texts: expected texts with words "
                f"of {LEAST_CHARACTERS} or more characters"
            )
    if num_equal > MOST_EQUAL * num_texts:
        raise InputError(
            f"views: {num_equal} of {num_texts} texts have two equal views, expected at most {MOST_EQUAL:.0%}"
        )
