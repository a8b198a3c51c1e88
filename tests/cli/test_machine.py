"""Free memory of the machine, as the system reports it."""

from pathlib import Path

import torch

from lit_layers.models.offload import free_memory

MEMINFO = "MemTotal:  100 kB\nMemFree:  50 kB\nMemAvailable:  90 kB\nHugePages_Total:  0\n"
CPU = torch.device("cpu")


def write_machine(files: dict[str, str], folder: Path) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_free_memory_is_the_available_memory_that_the_system_reports(tmp_path):
    for number, (files, free) in enumerate(
        (({"proc/meminfo": MEMINFO}, 90 * 1024), ({"proc/meminfo": "MemTotal: 100 kB\n"}, None), ({}, None))
    ):
        assert free_memory(CPU, write_machine(files, tmp_path / str(number))) == free, files
