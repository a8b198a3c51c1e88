"""Read what a run logged to W&B from its local .wandb files, without network or login.

This reader is independent of the one in the package. A file whose writer was killed is read up to its last complete
record.
"""

import dataclasses
import json
import re
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, HEAD = 32768, 7
FULL, FIRST, LAST = 1, 2, 4
PATIENCE = 60.0  # seconds


def records(file: Path) -> Iterator[Any]:
    """Yield the protobuf records of a .wandb file (a LevelDB log) up to a torn end."""
    from wandb.proto import wandb_internal_pb2 as pb

    raw = file.read_bytes()
    if raw[:4] != b":W&B":
        raise ValueError(f"{file} is no .wandb file")
    offset, content = HEAD, b""
    while offset + HEAD <= len(raw):
        rest = BLOCK - offset % BLOCK
        if rest < HEAD:
            offset += rest
            continue
        crc, n, kind = struct.unpack_from("<IHB", raw, offset)
        data = raw[offset + HEAD : offset + HEAD + n]
        if crc != zlib.crc32(data, zlib.crc32(bytes([kind]))):
            return
        offset += HEAD + n
        content = data if kind in (FULL, FIRST) else content + data
        if kind in (FULL, LAST):
            record = pb.Record()
            record.ParseFromString(content)
            yield record


@dataclasses.dataclass
class Run:
    """The content of a run that W&B would show."""

    id: str = ""
    project: str = ""
    name: str = ""
    dirs: list[Path] = dataclasses.field(default_factory=list)
    config: dict = dataclasses.field(default_factory=dict)
    history: list[dict] = dataclasses.field(default_factory=list)
    metrics: dict[str, dict] = dataclasses.field(default_factory=dict)
    exit_code: int | None = None

    @property
    def state(self) -> str:
        return "unfinished" if self.exit_code is None else "finished" if self.exit_code == 0 else "failed"

    def names(self) -> list[str]:
        """Return all logged keys except W&B's own."""
        return sorted({key for row in self.history for key in row if not key.startswith("_")})

    def curve(self, key: str, x: str | None = None) -> list[tuple]:
        """Return the points that W&B draws for a key in logged order; x is its step metric by default."""
        x = x or self.step_metric(key) or "_step"
        return [(row.get(x), row[key]) for row in self.history if key in row]

    def step_metric(self, key: str) -> str | None:
        """Return the x axis that define_metric chose for a key: that of its exact name, or else of the longest glob."""
        hits = [
            (len(name.replace("*", "")) + (10**6 if name == key else 0), settings["step_metric"])
            for name, settings in self.metrics.items()
            if settings["step_metric"] not in (None, name) and re.fullmatch(re.escape(name).replace(r"\*", ".*"), key)
        ]
        return max(hits)[1] if hits else None

    def file(self, path: str) -> Path | None:
        return next((found for folder in reversed(self.dirs) if (found := folder / "files" / path).is_file()), None)

    def media(self, kind: str) -> dict[str, list[Path]]:
        """Return the files of one kind of media ("table-file", "plotly-file", ...) by key, in logged order."""
        found: dict[str, list[Path]] = {}
        for row in self.history:
            for key, value in row.items():
                if isinstance(value, dict) and value.get("_type") == kind:
                    path = self.file(value["path"])
                    if path is not None:
                        found.setdefault(key, []).append(path)
        return found

    @property
    def tables(self) -> dict[str, dict]:
        """Return the last table logged under each key, as {"columns": [...], "data": [...]}."""
        return {key: json.loads(files[-1].read_text()) for key, files in self.media("table-file").items()}


def read_finished(path: Path) -> dict[str, Run]:
    """Return every run under a path by its id; the folders of a run that was resumed offline are joined in order.

    Wait until the last file of each run holds the end of the run. The process of W&B answers `finish()` before its file
    is complete. The age of the file does not help: W&B buffers up to 32 KB for up to 15 seconds.

    Raises:
        TimeoutError: If a run has no end after `PATIENCE` seconds.
    """
    deadline = time.monotonic() + PATIENCE
    while True:
        runs, last = dict[str, Run](), dict[str, Path]()
        for file in _files(path):
            last[file.stem.removeprefix("run-")] = file
            run_id = next((r.run.run_id for r in records(file) if r.WhichOneof("record_type") == "run"), None)
            if run_id:
                _read_into(runs.setdefault(run_id, Run()), file)
        unfinished = [str(file) for name, file in last.items() if not _is_whole(runs.get(name), file)]
        if not unfinished:
            return runs
        if time.monotonic() > deadline:
            raise TimeoutError(f"no end of a run within {PATIENCE:.0f} s in {', '.join(unfinished)}")
        time.sleep(0.05)


def _is_whole(run: Run | None, file: Path) -> bool:
    return run is not None and run.exit_code is not None and run.dirs[-1] == file.parent


def _files(path: Path) -> list[Path]:
    files = {file.resolve() for file in path.glob("**/*run-*/*.wandb") if file.parent.name != "latest-run"}
    return sorted(files, key=lambda file: file.parent.name.removeprefix("offline-"))


def _read_into(run: Run, file: Path) -> None:
    run.dirs.append(file.parent)
    run.exit_code = None
    for record in records(file):
        kind = record.WhichOneof("record_type")
        content = getattr(record, kind) if kind else None
        if kind == "run":
            run.id, run.project, run.name = content.run_id, content.project, content.display_name
        if kind in ("run", "config"):
            for update in (content.config if kind == "run" else content).update:
                _put(run.config, _key(update), _value(update))
        elif kind == "history":
            row: dict = {}
            for item in content.item:
                _put(row, _key(item), _value(item))
            row.setdefault("_step", content.step.num)
            run.history.append(row)
        elif kind == "metric":
            name = content.name or content.glob_name
            if name and not content._control.overwrite and not content.expanded_from_glob:
                run.metrics[name] = {"step_metric": content.step_metric or None}
        elif kind == "exit":
            run.exit_code = content.exit_code
    run.config.pop("_wandb", None)


def _value(item: Any) -> Any:
    """Return the value of an item: the current protocol has a field per type, the older one has only JSON."""
    which = item.WhichOneof("value") if "value" in item.DESCRIPTOR.oneofs_by_name else None
    value = getattr(item, which or "value_json")
    if which in (None, "value_json", "json"):
        return json.loads(value) if value else None
    return None if which == "none" else value


def _key(item: Any) -> list[str]:
    return list(item.nested_key) or [item.key]


def _put(tree: dict, keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        if not isinstance(tree.get(key), dict):
            tree[key] = {}
        tree = tree[key]
    tree[keys[-1]] = value
