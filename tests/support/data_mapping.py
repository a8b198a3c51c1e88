"""Give folders of local data a `tasks.yaml`, which maps each task to its files."""

import shutil
from pathlib import Path

import yaml

from lit_layers.tasks.task_files import TaskFiles

MAPPING = Path(__file__).parent / "data_tasks.yaml"


def write_mapping(folder: Path) -> Path:
    """Write `tasks.yaml` to a folder and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(MAPPING, folder / "tasks.yaml")
    return folder


def link_data(data: Path, folder: Path) -> Path:
    """Fill a folder with links to the files of read-only `data`, write `tasks.yaml`, and return the folder."""
    for path in data.iterdir():
        if path.name != "tasks.yaml":
            (folder / path.name).symlink_to(path)
    return write_mapping(folder)


def mapped_files(use: str) -> dict[str, TaskFiles]:
    """Return the files of each task that the mapping has for a use (a top-level key, such as "probe")."""
    entries = yaml.safe_load(MAPPING.read_text())[use]
    return {
        name: TaskFiles(folder=Path(), **({"files": entry} if isinstance(entry, str) else entry))
        for name, entry in entries.items()
    }
