"""Names in documentation and recipes can be imported, and metrics from `lit_layers.functional`."""

import ast
import importlib
import re
from pathlib import Path

from lit_layers import functional

ROOT = Path(__file__).parents[1]
PAGES = "\n".join(path.read_text() for path in [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"])
RECIPES = "\n".join(path.read_text() for path in sorted((ROOT / "recipes").rglob("*.yaml")))
FUNCTIONAL = ROOT / "lit_layers" / "functional"
METRIC_FILES = functional._FILES
PLUMBING = {"jacobian.block_call", "jacobian.linear_cut", "emergence.drawn_curves"}


def tree_of(file: str) -> ast.Module:
    return ast.parse((FUNCTIONAL / f"{file.replace('.', '/')}.py").read_text())


def public_names(file: str) -> set[str]:
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name for node in tree_of(file).body if isinstance(node, kinds) and not node.name.startswith("_")}


def imported_in_pages() -> set[tuple[str, str]]:
    blocks = [ast.parse(block) for block in re.findall(r"```python\n(.*?)```", PAGES, re.DOTALL)]
    nodes = [node for block in blocks for node in ast.walk(block) if isinstance(node, ast.ImportFrom)]
    names = {(node.module or "", alias.name) for node in nodes for alias in node.names}
    return {(module, name) for module, name in names if module.partition(".")[0] == "lit_layers"}


def test_the_names_that_pages_import_exist():
    names = imported_in_pages()
    assert len(names) > 30
    for module, name in names:
        defined = getattr(importlib.import_module(module), name, None)
        assert defined is not None or importlib.import_module(f"{module}.{name}"), (module, name)  # or a module


def test_the_class_paths_of_pages_and_recipes_exist():
    paths = set(re.findall(r"class_path: *(lit_layers[\w.]+)", PAGES + RECIPES))
    assert len(paths) > 15
    for path in paths:
        module, name = path.rsplit(".", 1)
        assert isinstance(getattr(importlib.import_module(module), name), type), path


def test_every_public_metric_is_exported_by_name():
    names = [(file, name) for file in METRIC_FILES for name in public_names(file)]
    assert len(names) > 100
    for file, name in names:
        assert getattr(functional, name) is getattr(importlib.import_module(f"lit_layers.functional.{file}"), name)
    assert len({name for _, name in names}) == len(names), "two files define a name: an export can be of one alone"


def test_an_unknown_name_raises_what_python_raises():
    for name in ("no_such_metric", "record_attention", "math"):
        assert not hasattr(functional, name), name


def test_every_file_of_metrics_is_exported():
    paths = (path.relative_to(FUNCTIONAL).with_suffix("") for path in FUNCTIONAL.rglob("[!_]*.py"))
    assert {".".join(path.parts) for path in paths} == {*METRIC_FILES, *PLUMBING}
