"""Hooks of mkdocs: generate pages from notebooks, from files outside docs/ and from the package's docstrings."""

import base64
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
ROOMS = {
    "functional": "Metrics: pure functions on tensors",
    "analyses": "Analyses: from a model to records",
    "models": "Models as sequences of blocks",
    "series": "Checkpoint series",
    "training": "Training, with saving and measuring",
    "data": "Texts, tokens and images",
    "tasks": "Tasks",
    "records": "Records and measurements",
    "measuring": "Measuring models without changing their training",
}
REPORT = "sample_report.html"  # next to the page that describes it
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>(?!https?:|#)[^)\s]+)\)")
_LOOK = re.compile(r"<style.*?</style>", re.DOTALL)
_SPACE = re.compile(r"\s*\n\s*")  # removes line breaks from tables, so that Markdown does not parse their content


def on_files(files: Files, config: dict) -> Files:
    """Add the report of a run, notebooks, pages from outside docs/, and a reference page for each package."""
    files.append(File.generated(config, REPORT, content=sample_report()))
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        files.remove(file)
        page = file.src_uri.removesuffix(".ipynb") + ".md"
        text = notebook_page(json.loads((ROOT / "docs" / file.src_uri).read_text(encoding="utf-8")))
        files.append(File.generated(config, page, content=text))
    for name, source in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, name, content=text))
    entries = []
    for room, title in ROOMS.items():
        modules = "\n\n".join(f"::: lit_layers.{module}" for module in _modules(room))
        files.append(File.generated(config, f"reference/{room}.md", content=f"# {title}\n\n{modules}\n"))
        entries.append(f"- [{title}](reference/{room}.md)")
    overview = "# Reference\n\nEvery public function and class, from its docstring.\n\n" + "\n".join(entries) + "\n"
    files.append(File.generated(config, "reference.md", content=overview))
    return files


def on_page_markdown(markdown: str, *, page, files: Files, **_) -> str:
    """Link to the pages of notebooks, and replace links to files without a page by the name of the file."""

    def plain(match: re.Match) -> str:
        target = match["target"].partition("#")[0]
        there = (Path(page.file.src_uri).parent / target).as_posix()
        while "/../" in there or there.startswith("./"):
            there = re.sub(r"(^|/)[^/]+/\.\./", r"\1", there).removeprefix("./")
        if files.get_file_from_path(there.replace(".ipynb", ".md")) is not None:
            return f"[{match['text']}]({match['target'].replace('.ipynb', '.md')})"
        return f"{match['text']} (`{there.removeprefix('../')}`)"

    return LINK.sub(plain, markdown)


def sample_report() -> bytes:
    """Return the page that `lit-layers report` writes for one run of the study."""
    with tempfile.TemporaryDirectory() as folder:
        run, page = Path(folder) / "run", Path(folder) / REPORT
        study = [sys.executable, str(ROOT / "docs" / "studies" / "four_papers.py"), "--run", str(run)]
        subprocess.run(study, check=True, cwd=ROOT)
        report = [sys.executable, "-m", "lit_layers.cli.main", "report", str(run), "--root", str(page)]
        subprocess.run(report, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        return page.read_bytes()


def notebook_page(notebook: dict[str, Any]) -> str:
    """Return a notebook as Markdown: its text, its code, and the output of each cell (image, table or text)."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        parts += filter(None, map(_shown, cell["outputs"]))
    return "\n\n".join(parts) + "\n"


def _shown(output: dict[str, Any]) -> str:
    data = output.get("data", {"text/plain": output.get("text", "")})
    for kind in ("image/svg+xml", "text/html", "text/plain"):
        if kind in data:
            text = "".join(data[kind]).strip()
            break
    else:
        raise ValueError(f"a notebook shows {', '.join(data)}: expected a picture, a table or text")
    if kind == "text/plain":
        return f"```text\n{text}\n```" if text else ""
    if kind == "image/svg+xml":  # separate images, because inline SVGs on one page would share ids
        return f'<img alt="" src="data:image/svg+xml;base64,{base64.b64encode(text.encode()).decode()}">'
    return _SPACE.sub(" ", _LOOK.sub("", text).replace('<table border="1" class="dataframe">', "<table>"))


def _modules(room: str) -> list[str]:
    path = ROOT / "lit_layers" / room
    if not path.is_dir():
        return [room]
    files = sorted(file.relative_to(path.parent) for file in path.rglob("*.py") if not file.name.startswith("_"))
    return [".".join(file.with_suffix("").parts) for file in files]
