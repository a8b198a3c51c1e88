"""Folders of local data, with the file that says where each task lies."""

import shutil
from pathlib import Path

import yaml

from lit_layers.tasks.task_files import TaskFiles

MAPPING = Path(__file__).parent / "data_tasks.yaml"


def write_mapping(folder: Path) -> Path:
    """The folder, now with a `tasks.yaml`."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(MAPPING, folder / "tasks.yaml")
    return folder


def link_data(data: Path, folder: Path) -> Path:
    """A folder that holds all that a read-only one does, and a `tasks.yaml`."""
    for path in data.iterdir():
        if path.name != "tasks.yaml":
            (folder / path.name).symlink_to(path)
    return write_mapping(folder)


def mapped_files(use: str) -> dict[str, TaskFiles]:
    """What the mapping says of a use, by task."""
    entries = yaml.safe_load(MAPPING.read_text())[use]
    return {
        name: TaskFiles(folder=Path(), **({"files": entry} if isinstance(entry, str) else entry))
        for name, entry in entries.items()
    }
