"""Draw one-line faults by a seed, plant one at a time, run the tests of its room, and report which test fails.

    python -m tests.support.mutants OUT.csv [--only NUMBER,...]
    python -m tests.support.mutants --list

Each fault changes one comparison, operator, constant or call, in a copy of the repository. Test files named after the
changed file run first, then the other tests of its room. If no test of the quick tier fails, the additional tests of CI
run. OUT.csv gets a row per fault, and faults that already have a row are skipped.
"""

import argparse
import ast
import csv
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

REPO = Path(__file__).parents[2]
SEED = 49_120
DRAWN = {"functional": 44, "models": 27, "training": 22, "series": 17, "": 25}  # "" stands for all other rooms
TIERS = {"quick": "not soak and not nightly", "soak": "soak and not nightly"}
PROCESSES = 2
LIMIT = 1500  # seconds; a fault that hangs the tests counts as noticed

_WORDS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}
_CALLS = {"min": "max", "max": "min", "sum": "mean", "mean": "sum", "any": "all", "all": "any"}
# Arguments whose change does not change any correct result.
_HARMLESS = {"strict", "kw_only", "frozen", "eq", "slots", "seed"}


class Fault(NamedTuple):
    file: str  # relative to lit_layers/
    line: int
    old: str
    new: str


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _mutated(node: ast.expr, text: str) -> str | None:
    """Return the changed text of an expression, or None if no change is known for it."""

    def changed_operator(left: ast.expr, right: ast.expr, operator: ast.AST) -> str | None:
        if type(operator) not in _WORDS:
            return None
        old, new = _WORDS[type(operator)]
        start, end = (left.end_col_offset or 0) - node.col_offset, right.col_offset - node.col_offset
        return text[:start] + text[start:end].replace(old, new, 1) + text[end:]

    match node:
        case ast.Compare(ops=[operator]):
            return changed_operator(node.left, node.comparators[0], operator)
        case ast.BinOp() if not any(map(_is_text, (node.left, node.right))):
            return changed_operator(node.left, node.right, node.op)
        case ast.BoolOp():
            return changed_operator(node.values[0], node.values[1], node.op)
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            return text[node.operand.col_offset - node.col_offset :]
        case ast.Constant(value=bool()):
            return str(not node.value)
        case ast.Constant(value=int(value)):
            return str(value + 1)
        case ast.Constant(value=float(value)):
            return str(value * 2)
        case ast.Attribute() if node.attr in _CALLS:
            return text[: -len(node.attr)] + _CALLS[node.attr]
    return None


def _ignored(tree: ast.Module) -> set[ast.AST]:
    """Return the nodes whose change no test has to notice: annotations, raises, f-strings, shapes and `_HARMLESS`."""
    ignored: set[ast.AST] = set()
    for node in ast.walk(tree):
        subtrees = [getattr(node, name, None) for name in ("annotation", "returns")]
        if isinstance(node, ast.Raise | ast.JoinedStr) or (isinstance(node, ast.keyword) and node.arg in _HARMLESS):
            subtrees.append(node)
        if isinstance(node, ast.Subscript):  # a shape in a type
            subtrees += [node] if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str) else []
        for subtree in subtrees:
            if isinstance(subtree, ast.AST):
                ignored.update(ast.walk(subtree))
    return ignored


def faults_of(path: Path) -> list[Fault]:
    """Return all faults of one file, sorted by line."""
    source = path.read_text(encoding="utf-8")
    lines, tree = source.splitlines(), ast.parse(source)
    ignored, found = _ignored(tree), []
    for node in ast.walk(tree):
        if node in ignored or not isinstance(node, ast.expr) or node.lineno != node.end_lineno:
            continue
        line = lines[node.lineno - 1]
        if not line.isascii():
            continue
        text = line[node.col_offset : node.end_col_offset]
        new = _mutated(node, text)
        if new is not None and new != text:
            changed = line[: node.col_offset] + new + line[node.end_col_offset :]
            found.append(Fault(str(path.relative_to(REPO / "lit_layers")), node.lineno, line.strip(), changed.strip()))
    return sorted(set(found))


def _draw_order(fault: Fault) -> bytes:
    """Return the random sort key of a fault, which does not change when other lines of the package change."""
    return hashlib.sha256(f"{SEED} {fault.file} {fault.old} {fault.new}".encode()).digest()


def drawn() -> list[Fault]:
    """Draw the faults of each room, at most one per line."""
    by_room: dict[str, list[Fault]] = {room: [] for room in DRAWN}
    for path in sorted((REPO / "lit_layers").rglob("*.py")):
        own = path.relative_to(REPO / "lit_layers").parts[0]
        by_room[own if own in DRAWN else ""] += faults_of(path)
    chosen: list[Fault] = []
    for room, faults in by_room.items():
        ordered = sorted(faults, key=_draw_order)
        by_line = {(fault.file, fault.line): fault for fault in reversed(ordered)}
        chosen += sorted(by_line.values(), key=_draw_order)[: DRAWN[room]]
    return chosen


def _tests_of(fault: Fault, tests: Path) -> list[list[str]]:
    """Return the test files to run in up to two groups: those named after the changed file, then its room."""
    path = Path(fault.file)
    nearest = sorted(str(each.relative_to(tests.parent)) for each in tests.rglob(f"test_{path.stem}*.py"))
    room = tests / path.parts[0]
    if room.is_dir():
        rest = [str(room.relative_to(tests.parent))]
    else:
        # test_house.py counts characters and would notice faults that no other test does.
        rest = sorted(f"tests/{each.name}" for each in tests.glob("test_*.py") if each.name != "test_house.py")
    return [group for group in (nearest, rest) if group]


def killer_of(fault: Fault, copy: Path) -> tuple[str, str]:
    """Return the tier and the first test that fails with this fault planted, or two dashes if all pass."""
    path = copy / "lit_layers" / fault.file
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines(keepends=True)
    lines[fault.line - 1] = lines[fault.line - 1].replace(fault.old, fault.new)
    path.write_text("".join(lines), encoding="utf-8")
    own = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(copy)}
    try:
        for tier, marks in TIERS.items():
            for tests in _tests_of(fault, copy / "tests"):
                command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "--tb=no", "-m", marks, *tests]
                done = subprocess.run(
                    command,
                    cwd=copy,
                    env=os.environ | own,
                    capture_output=True,
                    text=True,
                    timeout=LIMIT,
                    check=False,
                )
                if done.returncode not in (0, 5):  # 5: no test in this tier
                    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
                    return tier, failed[1] if failed else f"exit code {done.returncode}"
    except subprocess.TimeoutExpired:
        return tier, "time limit"
    finally:
        path.write_text(source, encoding="utf-8")
    return "-", "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--only", type=lambda text: [int(number) for number in text.split(",")])
    parser.add_argument("--list", action="store_true", help="print the faults and end")
    chosen = parser.parse_args()
    faults = drawn()
    if chosen.list or chosen.out is None:
        for number, fault in enumerate(faults):
            print(f"{number:3} {fault.file}:{fault.line}\n    - {fault.old}\n    + {fault.new}")  # noqa: T201
        return
    chosen.out.touch()
    with chosen.out.open(encoding="utf-8", newline="") as file:
        seen = {int(row[0]) for row in csv.reader(file)}
    numbers = [number for number in chosen.only or range(len(faults)) if number not in seen]
    copies: SimpleQueue[Path] = SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        for process in range(PROCESSES):
            copy = Path(folder) / str(process)
            shutil.copytree(REPO, copy, ignore=shutil.ignore_patterns(".git", ".venv", "runs"), symlinks=True)
            copies.put(copy)

        def tried(number: int) -> None:
            copy, started, fault = copies.get(), time.monotonic(), faults[number]
            tier, test = killer_of(fault, copy)
            copies.put(copy)
            row = [number, tier, test, round(time.monotonic() - started), fault.file, fault.line, fault.new]
            with chosen.out.open("a", encoding="utf-8", newline="") as file:
                csv.writer(file).writerow(row)
            print(*row, sep="  ", flush=True)  # noqa: T201

        with ThreadPoolExecutor(PROCESSES) as pool:
            list(pool.map(tried, numbers))


if __name__ == "__main__":
    main()
