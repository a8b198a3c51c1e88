"""Count the code lines of the package by room, without blank lines, comments and docstrings.

python -m tests.support.code_lines [--largest 30]
"""

import argparse
import ast
import io
import tokenize
from collections import Counter
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[2] / "lit_layers"
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_HAVE_DOCSTRINGS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Size(NamedTuple):
    lines: int
    characters: int
    files: int


def code(source: str) -> dict[int, str]:
    """Return the stripped lines that hold code by their line numbers."""
    numbers = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            numbers.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _HAVE_DOCSTRINGS) and ast.get_docstring(node, clean=False) is not None:
            numbers.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = source.splitlines()
    return {number: lines[number - 1].strip() for number in sorted(numbers)}


def rooms() -> dict[str, Size]:
    """Return the size of each room: a folder of the package, or a file at its root."""
    sizes: dict[str, Size] = {}
    for path in PACKAGE.rglob("*.py"):
        lines, room = code(path.read_text(encoding="utf-8")), path.relative_to(PACKAGE).parts[0]
        before = sizes.get(room, Size(0, 0, 0))
        own = (len(lines), sum(map(len, lines.values())), 1)
        sizes[room] = Size(*(a + b for a, b in zip(before, own, strict=True)))
    return sizes


def whole(sizes: dict[str, Size]) -> Size:
    return Size(*map(sum, zip(*sizes.values(), strict=True)))


def table(sizes: dict[str, Size]) -> str:
    """Return a table with a line per room, the largest first, and a line for the whole package."""
    ordered = sorted(sizes.items(), key=lambda room: -room[1].lines)
    rows = [("lines", "characters", "files", "room")]
    rows += [(*map(str, size), name) for name, size in [*ordered, ("in all", whole(sizes))]]
    return "\n".join(f"{lines:>6} {characters:>10} {files:>5} {name}" for lines, characters, files, name in rows)


def largest(most: int) -> str:
    """Return the functions and classes with the most lines of code."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        numbers = code(source).keys()
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                own = sum(node.lineno <= number <= (node.end_lineno or 0) for number in numbers)
                found.append((own, f"{path.relative_to(PACKAGE)}: {node.name}"))
    return "\n".join(f"{number:6} {name}" for number, name in sorted(found)[::-1][:most])


def most_crowded() -> tuple[str, int]:
    """Return the folder with the most Python files besides __init__.py, subfolders not counted, and their number."""
    files = Counter(str(path.parent.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if path.stem != "__init__")
    return files.most_common(1)[0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--largest", type=int, default=0, help="how many functions and classes are listed")
    print(table(rooms()), largest(parser.parse_args().largest), sep="\n")  # noqa: T201
