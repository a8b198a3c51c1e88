"""The site builds without a warning; mkdocs checks every link and anchor."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.soak  # twenty seconds of CPU
def test_the_site_builds_without_a_warning_and_asks_no_server_for_anything(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert built.returncode == 0, built.stderr[-3000:]
    assert "WARNING" not in built.stderr
    assert len([*(tmp_path / "site").rglob("*.html")]) > 30
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
