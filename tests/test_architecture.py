"""The floors of the package hold, and it stays quick to look at."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from importlinter.application.use_cases import lint_imports
from importlinter.configuration import configure

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lit_layers"


def test_imports_go_down_the_floors_only(capsys):
    configure()
    passed = lint_imports(config_filename=str(ROOT / "pyproject.toml"), cache_dir=None)
    assert passed, capsys.readouterr().out


def test_nothing_inside_imports_the_package_root():
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                submodules = {alias.name for alias in node.names if (PACKAGE / f"{alias.name}.py").exists()}
                submodules |= {alias.name for alias in node.names if (PACKAGE / alias.name).is_dir()}
                assert node.module != "lit_layers" or submodules == {alias.name for alias in node.names}, path
            if isinstance(node, ast.Import):
                assert all(alias.name != "lit_layers" for alias in node.names), path


@pytest.mark.slow
@pytest.mark.parametrize("module", ["lit_layers", "lit_layers.cli.main", "lit_layers.errors"])
def test_the_front_door_imports_nothing_heavy(module):
    code = f"import sys, {module}; print(sorted({{'torch', 'lightning', 'transformers', 'pandas'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_analyses_need_no_lightning():
    code = "import sys, lit_layers.analyses, lit_layers.emergence; print('lightning' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "False"
