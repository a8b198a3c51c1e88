"""Lines of code are counted without blank lines, comments and docstrings."""

from tests.support.code_lines import code_lines

SOURCE = '''"""A docstring
of two lines."""

import os  # with a comment


# A comment.
def first(
    number: int,
) -> str:
    """A docstring."""
    text = """no docstring

    of three lines"""
    return text * number


class Second:
    "A docstring, too."
    "and a string that is none"
'''


def test_code_is_what_is_neither_blank_nor_a_comment_nor_a_docstring():
    assert code_lines(SOURCE) == {4, 8, 9, 10, 12, 13, 14, 15, 18, 20}
