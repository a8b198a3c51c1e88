"""What the pages for contributors name is there."""

import re
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
