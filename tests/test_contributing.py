"""The files and requirements that pages for contributors name exist."""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_files_that_contributing_names_exist():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`([\w./]+(?:/|\.py|\.md|\.toml))`|\]\(([\w./]+)\)", page)
    paths = {path or link for path, link in named}
    assert len(paths) > 15
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_the_package_says_that_it_is_typed():
    assert (ROOT / "lit_layers" / "py.typed").read_text() == ""


def test_what_the_package_imports_is_required_and_has_a_least_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    of_users = [
        rows for extra, rows in project["optional-dependencies"].items() if extra not in ("dev", "site", "real")
    ]
    required = [row for rows in (project["dependencies"], *of_users) for row in rows]
    assert [row for row in required if ">=" not in row] == []
    names = {re.match(r"[\w.-]+", row)[0].lower().replace("_", "-") for row in required}
    names |= {"omegaconf", "pydantic-core", "requests"}  # come with jsonargparse[omegaconf], pydantic and wandb
    other = {"PIL": "pillow", "sklearn": "scikit-learn", "vl_convert": "vl-convert-python", "yaml": "pyyaml"}
    imported = set[str]()
    for path in (ROOT / "lit_layers").rglob("*.py"):
        imported |= {*re.findall(r"^\s*(?:import|from) (\w+)[\w.]*(?: import| as|$)", path.read_text(), re.MULTILINE)}
    imported -= {*sys.stdlib_module_names, "lit_layers"}
    assert len(imported) > 25
    assert {other.get(name, name).replace("_", "-") for name in imported} - names == set()
