"""Views of texts: the changes of each step, what their randomness depends on, and when views are refused."""

import pytest

from lit_layers.data.prompt_texts import make_view, make_views
from lit_layers.errors import InputError
from tests.support.labelled_texts import labelled

TEXTS = [text for text, _ in labelled(40)]
LONG = " ".join(f"wonderful{chr(97 + number)}" for number in range(26)) + " and 60 of us"


def test_a_view_depends_only_on_the_seed_its_index_and_the_index_of_the_text():
    two, three = make_views(TEXTS, 2), make_views(TEXTS, 3)
    assert two.texts == three.texts[:2]
    assert make_views(TEXTS[:7], 2).texts == [view[:7] for view in two.texts]
    assert two.texts[1][5] == make_view(TEXTS[5], (0, 1, 5))
    states = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    assert len({make_view(LONG, state) for state in states}) == 4
    assert make_views(TEXTS, 2, seed=1).texts != two.texts


def test_nine_of_thirty_words_are_split_and_words_of_three_characters_stay():
    view = make_view(LONG, (0, 0, 0)).split(" ")
    assert len(view) == len(LONG.split()) + 9
    assert view[-4:] == ["and", "60", "of", "us"]
    assert make_view("four", (0, 0, 0)) != "four"
    assert len("".join(view)) == len(LONG.replace(" ", "")), "characters are put in the place of others"


def test_three_tenths_of_the_words_are_split_up_to_the_limit():
    for words, split in ((1, 1), (3, 1), (4, 2), (7, 3), (34, 10)):
        text = " ".join(["mountain"] * words)
        assert len(make_view(text, (0, 0, 3)).split()) == words + split
        assert len(make_view(text, (0, 0, 3), max_words=1).split()) == words + 1


def test_three_tenths_of_the_characters_of_a_word_are_replaced():
    steps = [make_view("abcdefghijkl", (seed, 0, 0)).replace(" ", "") for seed in range(30)]
    changes = [sum(a != b for a, b in zip(view, "abcdefghijkl", strict=True)) for view in steps]
    # The word has two parts with 12 characters together. In a part of 4 or more, three tenths change, twice.
    assert max(changes) <= 8
    assert min(changes) >= 2
    assert all(len(view) == 12 for view in steps)


def test_letters_are_replaced_by_neighbouring_keys():
    from lit_layers.data.prompt_texts import _NEIGHBOURS

    assert set(_NEIGHBOURS["g"]) == set("fhtyvb")
    assert set(_NEIGHBOURS["G"]) == set("FHTYVB")
    assert set(_NEIGHBOURS["q"]) == set("12wa")
    for key, others in _NEIGHBOURS.items():
        for other in others:
            assert key.lower() in _NEIGHBOURS[other].lower(), (key, other)


def test_white_space_and_unknown_characters_are_kept():
    text = "\tनमस्ते दुनिया\n\n  zwei Zeilen und mehr  "
    view = make_view(text, (0, 0, 0))
    assert view.startswith("\t")
    assert view.endswith("  ")
    assert "\n\n  " in view


def test_unchanged_and_equal_views_and_changed_words_are_counted():
    found = make_views([*TEXTS, "a bc def"], 2)
    assert (found.num_equal, found.num_unchanged) == (1, 1)
    assert found.texts[0][-1] == found.texts[1][-1] == "a bc def"
    whole = make_views(["mountains everywhere " * 20] * 4, 2)
    # Each of three steps changes 10 of 40 or more words, so 10 to 30 words are changed.
    assert 10 / 40 <= whole.changed_fraction <= 30 / 40
    assert whole.num_equal == 0


def test_equal_views_are_refused():
    with pytest.raises(InputError, match="views: 2 of 2 texts have two equal views, .*: give texts with words of 4"):
        make_views(["a b c", "it is so"])
    with pytest.raises(InputError, match="views: 1 of 11 texts have two equal views, expected at most 5%"):
        make_views([*TEXTS[:10], "a b c"])
