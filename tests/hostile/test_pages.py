"""Pages with texts of an attacker: a browser shows them and executes nothing."""

import re
from pathlib import Path

import pytest

from lit_layers.cli.main import main
from tests.hostile.pages import hostile_run
from tests.support.browser import CHROMIUM, dom_after

RUN = "window.ran = 1 + (window.ran || 0)"
PAYLOADS = (
    f"<script>{RUN}</script>",
    f"</script><script>{RUN}</script>",
    f"<img src=x onerror='{RUN}'>",
    f'"><svg onload="{RUN}">',
    f"' onmouseover='{RUN}' autofocus onfocus='{RUN}",
    f'<a href="javascript:{RUN}">x</a>',
    f'</textarea></style></title><iframe srcdoc="<script>parent.{RUN[7:]}</script>">',
    f"<!--<script>{RUN}</script>--><!--><script>{RUN}</script>",
    f"{{{{7*7}}}}${{{RUN}}}</b><details open ontoggle='{RUN}'>",
    f"\\u003cscript\\u003e{RUN}\\u003c/script\\u003e",
    f"`;{RUN};`'\";{RUN}//",
    f"]]><script>{RUN}</script>&lt;script&gt;{RUN}&lt;/script&gt;",
)
LOOK = """
  for (let n = 0; n < 1200; n++) {
    const states = [...document.querySelectorAll(".plot")].map((node) => node.dataset.state);
    if (states.every((state) => state === "drawn" || state === "failed")) break;
    document.querySelectorAll("details").forEach((node) => { node.open = true; });
    document.querySelectorAll(".plot").forEach((node) => node.scrollIntoView());
    await new Promise((done) => setTimeout(done, 100));
  }
  for (const node of document.querySelectorAll("*"))
    for (const kind of ["mouseover", "focus", "toggle"]) node.dispatchEvent(new Event(kind));
  for (const { tagName, attributes } of document.querySelectorAll("*"))
    for (const { name, value } of attributes)
      if (name.startsWith("on") || /^\\s*javascript:/i.test(value)) throw new Error(`${tagName} ${name}=${value}`);
  await new Promise((done) => setTimeout(done, 300));
  if (window.ran) throw new Error(`${window.ran} ran`);
  document.documentElement.dataset.looked = "yes";
"""


def test_no_payload_becomes_markup(tmp_path):
    """The page with all payloads has the same elements as a page with harmless texts."""
    harmless = write_page(tmp_path / "harmless", "harmless")
    hostile = write_page(tmp_path / "hostile", " ".join(PAYLOADS))
    tags = [
        sorted(re.findall(r"<(script|iframe|svg|img|a|details|style|textarea)\b", text)) for text in (harmless, hostile)
    ]
    assert tags[0] == tags[1]
    assert "window.ran" in hostile


def write_page(root: Path, text: str) -> str:
    assert main(["report", str(hostile_run(root, text)), "--allow_suspect"]) == 0
    return (root / "report.html").read_text()


@pytest.mark.nightly
@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_a_browser_executes_nothing_of_a_page(tmp_path):
    for number, payload in enumerate(PAYLOADS):
        root = tmp_path / str(number)
        write_page(root, payload)
        dom = dom_after(root / "report.html", LOOK, tmp_path / f"profile{number}")
        assert 'data-looked="yes"' in dom, payload
        assert 'data-state="drawn"' in dom, payload
