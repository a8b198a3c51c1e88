"""What the local files of a W&B run hold, read without network: W&B's log of records, up to a torn tail."""

import configparser
import json
import os
import struct
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_layers.errors import InputError

AXIS = "trainer/global_step"
_BLOCK, _HEAD = 32768, 7
_FULL, _FIRST, _LAST = 1, 2, 4
# Seconds: W&B's own process outlives a killed one by up to two and may still write what it had received; all files
# together are waited for no longer than that.
_SETTLED, _LONGEST = 3.0, 15.0
_SERVER = "https://api.wandb.ai"  # which `wandb init` writes down, too
_NAMES = {"entity", "project", "base_url", "disabled", "mode", "anonymous"}  # settings that reach no address


@dataclass
class Mirrored:
    """The points of one run that W&B's files hold: the names logged at each step, and the last row's number."""

    names: dict[int | None, frozenset[str]] = field(default_factory=dict)
    last_row: int = -1
    is_closed: bool = False  # the last file has the end of a run
    _shared: dict[frozenset[str], frozenset[str]] = field(default_factory=dict)

    def add(self, step: int | None, names: set[str]) -> None:
        # Most steps hold the same names: one set serves them all, or a long run would need gigabytes.
        joined = self.names.get(step, frozenset()) | names
        self.names[step] = self._shared.setdefault(joined, joined)


def refuse_settings_of_folder() -> None:
    """Refuses a `wandb/settings` of the working directory that sends data, and the key with it, to another server.

    W&B reads it, and a folder that was downloaded with a run may hold one.

    Raises:
        InputError: naming the setting.
    """
    file, content = Path("wandb") / "settings", configparser.ConfigParser(interpolation=None)
    try:
        content.read(file, encoding="utf-8")
    except (configparser.Error, OSError, UnicodeDecodeError):
        return  # nor does W&B read it
    for section in content.values():
        for name, value in section.items():
            is_known = name in _NAMES and (name != "base_url" or value.rstrip("/") == _SERVER)
            if not is_known and not (name == "base_url" and os.environ.get("WANDB_BASE_URL")):
                raise InputError(
                    f"{file} of this folder says {name} = {value[:200]}, and W&B would send the run and your key "
                    "there: say so by WANDB_BASE_URL, or remove that line"
                )


def run_files(root: Path, run_id: str) -> list[Path]:
    """Returns the files that hold the run's records, oldest first.

    Of one run begun twice in a second W&B numbers the folders: `run-20261127_110659-ID`, then `...-ID-1`.
    """
    files = root.glob(f"wandb/*run-*-{run_id}*/run-{run_id}.wandb")
    return sorted(files, key=lambda file: _begun(file.parent.name, run_id))


def _begun(folder: str, run_id: str) -> tuple[str, int]:
    """The second in which a folder's records begin, and the folder's number in it."""
    second, _, rest = folder.removeprefix("offline-").removeprefix("run-").partition("-")
    number = rest.removeprefix(f"{run_id}-")
    return second, int(number) if number != rest and number.isdecimal() else 0


def mirrored(files: list[Path], *, before: int | None = None) -> Mirrored:
    """Returns the points in these files, in rows numbered below `before` where that is given.

    Waits until a process that was just killed has written its last.
    """
    points, deadline = Mirrored(), time.monotonic() + _LONGEST
    for file in files:
        kinds = _read_into(points, file, before)
        if "exit" not in kinds:
            _wait_until_quiet(file, deadline)
            kinds = _read_into(points, file, before)
        points.is_closed = "exit" in kinds
    return points


def _wait_until_quiet(file: Path, deadline: float) -> None:
    """Until it has not grown for a while; its age says little, as clocks are set and those of file servers differ."""
    if time.time() - file.stat().st_mtime > _SETTLED:
        return
    size, since = file.stat().st_size, time.monotonic()
    while time.monotonic() < min(since + _SETTLED, deadline):
        time.sleep(0.1)
        if file.stat().st_size != size:
            size, since = file.stat().st_size, time.monotonic()


def _read_into(points: Mirrored, file: Path, before: int | None) -> set[str]:
    """Adds the rows of one file, and returns which kinds of records it has."""
    kinds = set()
    for record in _records(file):
        kind = record.WhichOneof("record_type")
        kinds.add(kind)
        if kind != "history":
            continue
        row = {_name(item): item for item in record.history.item}
        number = int(_value(row["_step"])) if "_step" in row else record.history.step.num
        if before is not None and number >= before:
            continue
        step = _value(row[AXIS]) if AXIS in row else None
        points.add(None if step is None else int(step), {name for name in row if not name.startswith("_")})
        points.last_row = max(points.last_row, number)
    return kinds


def _name(item: Any) -> str:
    return item.key or item.nested_key[0]


def _value(item: Any) -> Any:
    """The value of a history item: JSON text, or in newer files a typed field."""
    kind = "value_json"
    if "value" in item.DESCRIPTOR.oneofs_by_name:
        kind = item.WhichOneof("value") or "value_json"
    value = getattr(item, kind)
    return json.loads(value) if kind in ("value_json", "json") else value


def _records(file: Path) -> Iterator[Any]:
    """Yields the protobuf records of a LevelDB log; stops at a torn tail."""
    from wandb.proto import wandb_internal_pb2

    raw = file.read_bytes()
    at, parts = _HEAD, b""
    while at + _HEAD <= len(raw):
        left = _BLOCK - at % _BLOCK
        if left < _HEAD:  # too short for a record: zeros up to the next block
            at += left
            continue
        checksum, length, kind = struct.unpack_from("<IHB", raw, at)
        data = raw[at + _HEAD : at + _HEAD + length]
        if len(data) < length or checksum != zlib.crc32(data, zlib.crc32(bytes([kind]))):
            return
        at += _HEAD + length
        parts = data if kind in (_FULL, _FIRST) else parts + data
        if kind in (_FULL, _LAST):
            record = wandb_internal_pb2.Record()  # pyright: ignore[reportAttributeAccessIssue]
            record.ParseFromString(parts)
            yield record
