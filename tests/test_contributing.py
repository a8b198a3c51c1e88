"""What the pages for contributors name is there."""

import re
import sys
import tomllib
from fnmatch import fnmatch
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


# Arrays, tensors or records that are compared to the last digit.
EXACT = re.compile(
    r"(?<!not )(?:torch|np)\.(?:array_)?equal\(|assert_array_equal\(|rtol=0(?:\.0)?, atol=0(?:\.0)?[,)]|"
    r"\.(?P<records>records) == \S+\.records\b"
)


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


def test_what_is_compared_to_the_last_digit_has_its_reason_in_the_list():
    """Products differ in it with where their operands lie: a new comparison is by `tests.support.rounding`, or for one
    of the reasons of the list in README.md, beside which its file then stands."""
    folder = ROOT / "tests"
    rows = [row.split("|") for row in (folder / "README.md").read_text().splitlines() if row.startswith("| ")]
    names = [name for row in rows[1:] for name in re.findall(r"`([\w/*]*(?:test_[\w*]+|/))`", row[3])]
    of_records = "analyses/test_*"  # any analysis, measured twice
    files = {path: path.relative_to(folder).with_suffix("").as_posix() for path in sorted(folder.rglob("test_*.py"))}

    def named(file: str, name: str) -> bool:
        return fnmatch(f"/{file}", f"*/{name}*" if name.endswith("/") else f"*/{name}")

    assert len(names) > 80
    assert [name for name in names if not any(named(file, name) for file in files.values())] == []
    without = [
        f"{file}:{number}"
        for path, file in files.items()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for found in EXACT.finditer(line)
        if not any(named(file, name) for name in names if name != of_records or found["records"])
    ]
    assert without == []
