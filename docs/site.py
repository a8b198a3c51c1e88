"""Hooks of the site: pages made of files outside docs/ and of the package's docstrings."""

import re
from pathlib import Path

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
ROOMS = {
    "functional": "Metrics: pure functions on tensors",
    "analyses": "Analyses: from a model to records",
    "models": "Models, taken apart layer by layer",
    "series": "Checkpoint series",
    "training": "Training, saving and measuring on the way",
    "data": "Texts, tokens and images",
    "tasks": "Tasks",
    "records": "Records and measurements",
    "measuring": "Measuring models, without disturbing what trains",
}
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>(?!https?:|#)[^)\s]+)\)")


def on_files(files: Files, config: dict) -> Files:
    """Adds the pages that stand outside docs/, and a page of docstrings for each room of the package."""
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
    """Names files of the repository that are no page of the site, in place of a link that would lead nowhere."""

    def plain(match: re.Match) -> str:
        target = match["target"].partition("#")[0]
        there = (Path(page.file.src_uri).parent / target).as_posix()
        while "/../" in there or there.startswith("./"):
            there = re.sub(r"(^|/)[^/]+/\.\./", r"\1", there).removeprefix("./")
        if files.get_file_from_path(there) is not None:
            return match[0]
        return f"{match['text']} (`{there.removeprefix('../')}`)"

    return LINK.sub(plain, markdown)


def _modules(room: str) -> list[str]:
    path = ROOT / "lit_layers" / room
    if not path.is_dir():
        return [room]
    files = sorted(file.relative_to(path.parent) for file in path.rglob("*.py") if not file.name.startswith("_"))
    return [".".join(file.with_suffix("").parts) for file in files]
