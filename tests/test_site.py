"""The site builds from the pages and docstrings without a warning, and no link of it leads nowhere."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[1]


class Links(HTMLParser):
    """The addresses that a page names, and the places in it that have a name."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.names: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.targets += [value for key in ("href", "src") if (value := given.get(key))]
        self.names |= {value for key in ("id", "name") if (value := given.get(key))}


@pytest.mark.soak  # twenty seconds of CPU
def test_the_site_builds_without_a_warning_and_no_link_leads_nowhere(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert built.returncode == 0, built.stderr[-3000:]
    assert "WARNING" not in built.stderr
    pages = {page: Links(page.read_text()) for page in (tmp_path / "site").rglob("*.html") if page.name != "404.html"}
    assert len(pages) > 30
    broken = [
        f"{page.relative_to(tmp_path)}: {to}" for page, links in pages.items() for to in _broken(page, links, pages)
    ]
    assert not broken, broken
    reference = (tmp_path / "site/reference/functional/index.html").read_text()
    assert "lit_layers.functional.trajectory.line_shape_score" in reference
    report = (tmp_path / "site" / "sample_report.html").read_text()
    assert "GPT-2, seed 0" in report
    assert "default-src 'none'" in report  # asks no server for anything
    assert not re.findall(r"""(?:src|href)=["']?(?:https?:)?//|url\(["']?https?:|@import""", report)
    assert len(report) < 2_000_000
    for notebook in (ROOT / "docs" / "notebooks").glob("*.ipynb"):
        page = (tmp_path / "site" / "notebooks" / notebook.stem / "index.html").read_text()
        assert page.count("data:image/svg+xml;base64,") == notebook.read_text().count('"image/svg+xml"') > 0


def _broken(page: Path, links: Links, pages: dict[Path, Links]) -> list[str]:
    broken = []
    for target in links.targets:
        address = urlsplit(target)
        if address.scheme or address.netloc:
            continue
        there = (page.parent / unquote(address.path)).resolve() if address.path else page
        there = there / "index.html" if there.is_dir() else there
        named = there in pages and address.fragment and unquote(address.fragment) not in pages[there].names
        if not there.exists() or named:
            broken.append(target)
    return broken
