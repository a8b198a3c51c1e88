"""Lines of code of the package by room: without blank lines, comments and docstrings.

python -m tests.support.code_lines [--largest 30]
"""

import argparse
import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "lit_layers"
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_WITH_DOCSTRINGS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(source: str) -> set[int]:
    """The numbers of the lines that hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _WITH_DOCSTRINGS) and ast.get_docstring(node, clean=False) is not None:
            lines.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return lines


def report(largest: int) -> str:
    """A line a room, lines and files; the longest functions and classes; the files of more than 450 lines in all."""
    rooms, files, definitions, long = Counter[str](), Counter[str](), [], []
    for path in sorted(PACKAGE.rglob("*.py")):
        source, place = path.read_text(encoding="utf-8"), path.relative_to(PACKAGE)
        lines, room = code_lines(source), place.parts[0]
        rooms[room] += len(lines)
        files[room] += 1
        if (whole := source.count("\n")) > 450:
            long.append(f"{place} has {whole} lines")
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                own = lines.intersection(range(node.lineno, (node.end_lineno or 0) + 1))
                definitions.append((len(own), f"{place}: {node.name}"))
    table = [f"{number:6} {files[room]:4} {room}" for room, number in rooms.most_common()]
    table.append(f"{rooms.total():6} {files.total():4} in all")
    return "\n".join([*table, *(f"{number:6} {name}" for number, name in sorted(definitions)[::-1][:largest]), *long])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--largest", type=int, default=0, help="how many functions and classes are listed")
    print(report(parser.parse_args().largest))  # noqa: T201
