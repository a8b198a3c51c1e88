"""The floors of the package hold, no file imports one that imports it back, and the package stays quick to look at."""

import ast
import functools
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from importlinter.application.use_cases import lint_imports
from importlinter.configuration import configure

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lit_layers"
# what takes a tenth of a second or more to import
HEAVY = {"datasets", "huggingface_hub", "jsonargparse", "lightning", "lm_eval", "mteb", "pandas", "sklearn"}
HEAVY |= {"altair", "jinja2", "timm", "tokenizers", "torch", "transformers", "wandb", "ray"}
ONLY_IN = {  # libraries: the rooms whose files may import them
    "lightning": {"cli", "training"},
    "wandb": {"report"},
    "transformers": {"models", "files", "integrations"},
    "timm": {"models", "training"},
    "datasets": {"data", "tasks"},
    "tokenizers": {"data", "tasks"},
    "mteb": {"tasks"},
    "lm_eval": {"tasks"},
    "ray": {"measuring"},
}
Graph = dict[str, set[str]]


def test_imports_go_down_the_floors_only(capsys):
    configure()
    passed = lint_imports(config_filename=str(ROOT / "pyproject.toml"), cache_dir=None)
    assert passed, capsys.readouterr().out


def test_nothing_inside_imports_the_package_root():
    for name, tree in modules(PACKAGE).items():
        for node in imports(tree):
            names = {alias.name for alias in node.names}
            if isinstance(node, ast.ImportFrom) and node.module == "lit_layers":
                assert all((PACKAGE / f"{each}.py").exists() or (PACKAGE / each).is_dir() for each in names), name
            assert isinstance(node, ast.ImportFrom) or "lit_layers" not in names, name


@pytest.mark.slow
def test_the_front_door_imports_nothing_heavy_and_the_report_needs_neither_torch_nor_what_draws():
    code = """
import sys
import lit_layers, lit_layers.cli.main, lit_layers.errors
assert not {'torch', 'lightning', 'transformers', 'pandas'} & sys.modules.keys()
sys.modules['vl_convert'] = sys.modules['wandb'] = None
import lit_layers.report
assert not {'torch', 'lightning'} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@functools.cache
def modules(package: Path) -> dict[str, ast.Module]:
    trees = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        trees[name] = parsed(path)
    return trees


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imports(tree: ast.Module) -> list[ast.Import | ast.ImportFrom]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


def imported(node: ast.AST, trees: dict[str, ast.Module]) -> Iterator[str]:
    """What one statement imports: `from a import b` is the file a.b where there is one, else a.

    Where a imports b only when b is asked for, it is the file that a has it from.
    """
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        homes = late_names(trees[node.module]) if node.module in trees else {}
        for alias in node.names:
            inner = f"{node.module}.{alias.name}"
            yield inner if inner in trees else homes.get(alias.name, node.module)


@functools.cache
def late_names(tree: ast.Module) -> dict[str, str]:
    """The names that a file with a `__getattr__` imports for type checkers, each with its file."""
    if not any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in tree.body):
        return {}
    late = (node for node in imports(tree) if node in inner(tree, is_for_types) and isinstance(node, ast.ImportFrom))
    return {alias.name: str(node.module) for node in late for alias in node.names}


def is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def is_late(node: ast.AST) -> bool:
    """Inside a function, or below `if TYPE_CHECKING`."""
    return is_function(node) or is_for_types(node)


@functools.cache
def inner(tree: ast.Module, kind: Callable[[ast.AST], bool]) -> set[ast.AST]:
    """The imports below what is of that kind."""
    chosen, left = set(), [(tree, False)]
    while left:
        node, within = left.pop()
        within = within or kind(node)
        if within and isinstance(node, ast.Import | ast.ImportFrom):
            chosen.add(node)
        left += [(child, within) for child in ast.iter_child_nodes(node)]
    return chosen


def circles(graph: Graph) -> list[set[str]]:
    """Sets of files each of which reaches all the others."""

    def reached(start: str) -> set[str]:
        seen, left = set(), [start]
        while left:
            fresh = graph[left.pop()] - seen
            seen |= fresh
            left += fresh
        return seen

    below = {name: reached(name) for name in graph}
    joined = {
        frozenset(other for other in below[name] if name in below[other]) for name in graph if name in below[name]
    }
    return [set(circle) for circle in joined]


def all_imports(trees: dict[str, ast.Module]) -> Graph:
    return {
        name: {there for node in imports(tree) for there in imported(node, trees) if there in trees} - {name}
        for name, tree in trees.items()
    }


def test_no_files_import_each_other():
    assert not circles(all_imports(modules(PACKAGE))), "put what both need into a file below them"


def libraries(trees: dict[str, ast.Module]) -> Graph:
    """The heavy libraries that are loaded by importing each file, through whatever it imports at once."""
    at_once = {
        name: {there for node in set(imports(tree)) - inner(tree, is_late) for there in imported(node, trees)}
        for name, tree in trees.items()
    }
    loaded = {}
    for name in trees:
        seen, left = {name}, [name]
        while left:
            there = left.pop()
            parents = {there.rpartition(".")[0]} - {""}  # a folder's __init__ runs first
            fresh = (at_once.get(there, set()) | parents) - seen
            seen |= fresh
            left += fresh
        loaded[name] = {there.partition(".")[0] for there in seen} & HEAVY
    return loaded


def test_analyses_load_no_lightning_and_no_command_what_evaluates():
    loaded = libraries(modules(PACKAGE))
    for name in ("lit_layers.analyses", "lit_layers.measuring.one_model"):
        assert "lightning" not in loaded[name], name
    assert "lightning" in loaded["lit_layers.training"]  # such a graph would see it
    commands = [name for name in loaded if name.startswith("lit_layers.cli")]
    assert [name for name in commands if loaded[name] & {"mteb", "datasets"}] == []
    assert len(commands) > 10


def test_no_two_files_have_one_name():
    """But the commands, which bear the names of what they call."""
    names = [path.stem for path in PACKAGE.rglob("*.py") if path.parent.name != "verbs" and path.stem != "__init__"]
    assert {name for name in names if names.count(name) > 1} == set()


def test_python_itself_is_imported_at_the_head_of_a_file():
    late = {
        (name, library.partition(".")[0])
        for name, tree in modules(PACKAGE).items()
        for node in inner(tree, is_function)
        for library in imported(node, {})
    }
    assert [(name, library) for name, library in late if library in sys.stdlib_module_names] == []


def test_libraries_are_imported_in_their_rooms_only():
    misplaced = {
        (name, library)
        for name, tree in modules(PACKAGE).items()
        for node in imports(tree)
        for library in (there.partition(".")[0] for there in imported(node, modules(PACKAGE)))
        if library in ONLY_IN and name.split(".")[1:2] not in [[room] for room in ONLY_IN[library]]
    }
    assert not misplaced


def test_functional_is_tensors_in_tensors_out():
    """Nor does any file that it imports, at once or later, import a library of models, data or tables."""
    trees = modules(PACKAGE)
    graph = {name: {there for node in imports(tree) for there in imported(node, trees)} for name, tree in trees.items()}
    left = [name for name in trees if name.startswith("lit_layers.functional")]
    seen = set(left)
    while left:
        fresh = graph.get(left.pop(), set()) - seen
        seen |= fresh
        left += fresh
    assert not {name.partition(".")[0] for name in seen} & {*ONLY_IN, "pandas", "vl_convert"}


def test_pictures_are_drawn_in_a_process_of_their_own():
    """vl-convert keeps Python's lock while its thread draws, and a forked process lacks that thread."""
    trees = modules(PACKAGE)
    importing = {
        there: {name for name, tree in trees.items() for node in imports(tree) if there in imported(node, trees)}
        for there in ("vl_convert", "lit_layers.figures.drawing")
    }
    assert importing == {"vl_convert": {"lit_layers.figures.drawing"}, "lit_layers.figures.drawing": set()}
