"""Import rules of the package: layers, no cycles, and fast imports."""

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from importlinter.application.use_cases import lint_imports
from importlinter.configuration import configure

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lit_layers"
ONLY_IN = {  # libraries, and the rooms whose files may import them
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
def test_importing_the_package_loads_nothing_heavy_and_reports_need_neither_torch_nor_a_renderer():
    code = """
import sys
import lit_layers, lit_layers.cli.main, lit_layers.errors
assert not {'torch', 'lightning', 'transformers', 'pandas'} & sys.modules.keys()
sys.modules['vl_convert'] = sys.modules['wandb'] = None
import lit_layers.report
assert not {'torch', 'lightning'} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.soak
def test_analyses_do_not_import_lightning_and_commands_do_not_import_evaluators():
    code = """
import importlib, pkgutil, sys
import lit_layers.analyses, lit_layers.measuring.one_model
from lit_layers.cli import verbs
assert 'lightning' not in sys.modules
names = [each.name for each in pkgutil.iter_modules(verbs.__path__)]
assert len(names) > 10
for name in names:
    importlib.import_module(f'lit_layers.cli.verbs.{name}')
assert not {'datasets', 'lm_eval', 'mteb', 'ray', 'wandb'} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@functools.cache
def modules(package: Path) -> dict[str, ast.Module]:
    trees = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        trees[name] = ast.parse(path.read_text())
    return trees


@functools.cache
def imports(tree: ast.Module) -> list[ast.Import | ast.ImportFrom]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


def imported(node: ast.AST, trees: dict[str, ast.Module]) -> Iterator[str]:
    """Return the files that an import statement reads: `from a import b` is the file a.b if it exists, else a.

    If a imports b lazily, it is the file that a takes b from.
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
    """Return the names that a file with `__getattr__` imports lazily, each with its file."""
    if not any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in tree.body):
        return {}
    for_types = [node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    late = (node for part in for_types for node in part.body if isinstance(node, ast.ImportFrom))
    return {alias.name: str(node.module) for node in late for alias in node.names}


def reached(graph: Graph, *starts: str) -> set[str]:
    """Return all files that these import, directly or not, eagerly or lazily."""
    seen, left = set(), [*starts]
    while left:
        fresh = graph.get(left.pop(), set()) - seen
        seen |= fresh
        left += fresh
    return seen


@functools.cache
def all_imports() -> Graph:
    trees = modules(PACKAGE)
    return {
        name: {there for node in imports(tree) for there in imported(node, trees)} - {name}
        for name, tree in trees.items()
    }


def test_no_files_import_each_other():
    graph = all_imports()
    circles = [name for name in graph if name in reached(graph, name)]
    assert not circles, "put what both need into a file below them"


def test_no_two_files_have_one_name():
    """Commands are exempt: they have the name of the function they call."""
    names = [path.stem for path in PACKAGE.rglob("*.py") if path.parent.name != "verbs" and path.stem != "__init__"]
    assert {name for name in names if names.count(name) > 1} == set()


def test_each_library_is_imported_only_in_its_rooms():
    misplaced = {
        (name, library)
        for name, found in all_imports().items()
        for library in {there.partition(".")[0] for there in found} & ONLY_IN.keys()
        if name.split(".")[1:2] not in [[room] for room in ONLY_IN[library]]
    }
    assert not misplaced


def test_functional_takes_and_returns_tensors():
    """None of the files it imports, directly or not, imports a library of models, data or tables."""
    graph = all_imports()
    seen = reached(graph, *(name for name in graph if name.startswith("lit_layers.functional")))
    assert not {name.partition(".")[0] for name in seen} & {*ONLY_IN, "pandas", "vl_convert"}


def test_pictures_are_drawn_in_a_separate_process():
    """vl-convert holds the GIL while its thread draws, and a forked process has no such thread."""
    for there, users in (("vl_convert", {"lit_layers.figures.drawing"}), ("lit_layers.figures.drawing", set())):
        assert {name for name, found in all_imports().items() if there in found} == users
