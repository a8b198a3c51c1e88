"""The local copy of a run on a store: what of it is fetched, and what is sent of what is written, in which order."""

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from filelock import FileLock, Timeout

from lit_layers.errors import InputError
from lit_layers.files.durable import sync, write_json
from lit_layers.files.remote_store import Entry, Store

logger = logging.getLogger(__name__)
SETTLED = 1.0  # seconds without a change
PATIENCE, TRIES = 5.0, 3  # seconds that a reader waits for another one; times that it looks anew
ROOM = 2**28  # bytes that are left on a disk
_PART = re.compile(r"([^/]+\.jsonl)\.parts/(\d{12,})\.jsonl")
_FOLDER = re.compile(r"((?:resume/)?step-\d+)/.+")
CHECKPOINT = re.compile(r"(?P<run>.+)/(?P<name>step-\d+)")
_LAST = ("config.json", "meta.json")  # of a checkpoint's folder: without them it is none
_AT_THE_END = re.compile(r"wandb/.*|.*\.log")  # they grow all the time
_REPLACED = re.compile(r"values/.*|run\.json")  # as a whole: never half written
NameFilter = Callable[[str], bool]


def numbers(name: str) -> bool:
    """Whether a file of a run is no checkpoint's."""
    return _FOLDER.fullmatch(name) is None


def to_resume(name: str) -> bool:
    """The same, or of a checkpoint to resume from."""
    return not name.startswith("step-") or numbers(name)


def to_measure(checkpoint: str, name: str) -> bool:
    """Whether a file of a run belongs to this checkpoint, or says how it was trained."""
    return name == "run.json" or name.startswith(f"{checkpoint}/")


def checkpoints(name: str) -> bool:
    """Whether a file is no checkpoint to resume from."""
    return not name.startswith("resume/")


class LocalCopy:
    """The local folder of a run on a store, and what is known of either."""

    def __init__(self, place: str | Path) -> None:
        self.store = Store(place)
        name = self.store.url.rpartition("/")[2]
        key = f"{self.store.endpoint} {self.store.url} {socket.gethostname()}"  # a home folder may be many machines'
        key = hashlib.sha256(key.encode()).hexdigest()[:12]
        base = os.environ.get("LIT_LAYERS_REMOTE") or Path(
            os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "lit_layers", "remote"
        )
        self.home = (Path(base) / f"{re.sub(r'[^A-Za-z0-9.-]+', '-', self.store.url)[:80]}-{key}").resolve()
        self.folder = self.home / name
        self.home.mkdir(parents=True, exist_ok=True)
        self.lock = FileLock(self.home / "lock")
        self.being_cut: set[str] = set()  # logs that are to be cut, and have no line since
        self._changing = threading.Lock()
        self._state_file = self.home / "state.json"
        self._read_state()

    def _read_state(self) -> None:
        """`sent`: files as they were when they and the store were the same; `seen`: their signatures there."""
        try:
            state = dict(json.loads(self._state_file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            state = {}
        self.token: str = state.get("token") or uuid.uuid4().hex
        self.sent: dict[str, list[int]] = state.get("sent", {})
        self.seen: dict[str, str] = state.get("seen", {})
        self.fresh: set[str] = set()  # sent by this process: what others removed since is not sent again
        self.cuts: dict[str, int] = state.get("cuts", {})
        self.gone: list[str] = state.get("gone", [])
        self.doubtful: list[str] = state.get("doubtful", [])  # of which a sending was given up: it may arrive late

    def _save_state(self) -> None:
        state = {"token": self.token, "cuts": self.cuts, "gone": self.gone, "doubtful": self.doubtful}
        write_json(self._state_file, state | {"sent": dict(self.sent), "seen": dict(self.seen)})  # which threads change

    def note(self, path: Path, keep: int | None) -> None:
        """Keeps on the disk, until it is done on the store, that a log was cut or something removed."""
        name = path.resolve().relative_to(self.folder).as_posix()
        with self._changing:
            if keep is not None:
                self.cuts[name] = min(keep, self.cuts.get(name, keep))
                self.being_cut.add(name)
            elif name not in self.gone:
                self.gone.append(name)
            self._save_state()

    # ------------------------------------------------------------------------------------------ from the store

    def refresh(self, name_filter: NameFilter) -> None:
        """Makes it what is on the store; while its writer lives, or where that was killed, it is ahead."""
        with contextlib.suppress(Timeout), self.lock.acquire(timeout=PATIENCE):
            self._read_state()  # of whoever held it before
            self.fetch(name_filter)

    def fetch(self, name_filter: NameFilter) -> None:
        """The same for who holds the lock."""
        for _ in range(TRIES):
            with contextlib.suppress(FileNotFoundError):  # its writer put parts together meanwhile
                self._fetch(name_filter, self.store.listing())
                return
        raise InputError(f"{self.store.url}: it changes faster than it can be read: try again")

    def _fetch(self, name_filter: NameFilter, listing: dict[str, Entry]) -> None:
        claim = self.store.newest_claim()
        is_ours = claim is not None and claim.token == self.token
        if not is_ours:
            self._drop_stale(listing)
        due = [name for name in self._whole(listing) if name_filter(name) and not _is_log(name)]
        due = [name for name in due if not (self.folder / name).exists() and not self._is_gone(name)]
        logs = {match[1] if (match := _PART.fullmatch(name)) else name for name in listing}
        logs = {log for log in logs if _is_log(log) and not (is_ours and self._is_ahead(log, listing))}
        self._refuse_beyond_disk(sum(listing[name].size for name in due) + sum(_end(log, listing) for log in logs))

        def get(name: str) -> None:
            self.store.get(name, self.folder / name, listing[name].size)
            self.seen[name], self.sent[name] = listing[name].signature, _stat(self.folder / name)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(get, due))
        for log in logs:
            self._get_log(log, listing)
        self._save_state()

    def _refuse_beyond_disk(self, size: int) -> None:
        """Whoever may write to the store decides how much there is."""
        if size > (free := shutil.disk_usage(self.home).free - ROOM):
            raise InputError(
                f"{self.store.url}: {size / 1e9:,.1f} GB of it are to be copied, and {self.home.parent} has room for "
                f"{max(0, free) / 1e9:,.1f} GB: name a larger place in LIT_LAYERS_REMOTE"
            )

    def _is_gone(self, name: str) -> bool:
        return any(name == each or name.startswith(f"{each}/") for each in self.gone)

    def _is_ahead(self, log: str, listing: dict[str, Entry]) -> bool:
        """Whether the copy's log has all lines that are on the store, or fewer on purpose."""
        path = self.folder / log
        return path.exists() and (log in self.cuts or path.stat().st_size >= _end(log, listing))

    def _drop_stale(self, listing: dict[str, Entry]) -> None:
        """Removes what another writer has changed since, and what was never sent."""
        self.cuts, self.gone, self.doubtful = {}, [], []
        for name, stat in self.files().items():
            there = listing.get(name)
            if _is_log(name) or there is None or self.seen.get(name) != there.signature or self.sent.get(name) != stat:
                (self.folder / name).unlink(missing_ok=True)
        there = self.files()
        self.sent = {name: stat for name, stat in self.sent.items() if name in there}
        for hidden in self.folder.glob(".*") if self.folder.is_dir() else ():  # drafts, and what is known of files
            shutil.rmtree(hidden) if hidden.is_dir() else hidden.unlink()
        for folder in sorted(self.folder.rglob("*/"), reverse=True):
            with contextlib.suppress(OSError):
                folder.rmdir()
        self._save_state()

    def _whole(self, listing: dict[str, Entry]) -> Iterator[str]:
        """The objects that are files of the run; of folders of checkpoints those that are complete."""
        for name in listing:
            folder = _FOLDER.fullmatch(name)
            is_torn = folder is not None and not any(f"{folder[1]}/{last}" in listing for last in _LAST)
            if not (_is_hidden(name) or _PART.fullmatch(name) or is_torn):
                yield name

    def _get_log(self, log: str, listing: dict[str, Entry]) -> None:
        """Joins a log with its parts in a file, as neither need fit into memory, and puts that in its place."""
        whole, part = (self.home / f".{log}.{uuid.uuid4().hex}.{kind}" for kind in ("whole", "part"))
        try:
            whole.touch()
            if log in listing:
                self.store.get(log, whole, listing[log].size)
            with open(whole, "ab") as joined:
                for start, name in _parts(log, listing):
                    if start > joined.tell():
                        break
                    if start + listing[name].size > joined.tell():  # else it is already among the rest
                        self.store.get(name, part, listing[name].size)
                        with open(part, "rb") as more:
                            more.seek(joined.tell() - start)
                            shutil.copyfileobj(more, joined)
            sync(whole)
            self.folder.mkdir(parents=True, exist_ok=True)
            whole.replace(self.folder / log)
        finally:
            for draft in (whole, part):
                draft.unlink(missing_ok=True)

    # -------------------------------------------------------------------------------------------- to the store

    def send(self, ends: dict[str, int], may_write: Callable[[], None], *, is_last: bool = False) -> bool:
        """Sends what is new; returns whether nothing was left, as it was written just now.

        `ends` has how much of each log is on the store; `may_write` raises where another process writes now.
        """
        files = self._in_order()
        logs = [each for each in files if _is_log(each) and (each in self.cuts or files[each][0] > ends.get(each, 0))]
        new = [name for name, stat in files.items() if self.sent.get(name) != stat and not _is_log(name)]
        plain = [each for each in new if numbers(each) and (is_last or not _AT_THE_END.fullmatch(each))]
        folders, gone = _folders(new), [*self.gone]
        if not (logs or plain or folders or gone):
            return True
        may_write()
        now = time.time_ns()
        young = [each for each in plain if not _REPLACED.fullmatch(each) and files[each][1] > now - SETTLED * 1e9]
        waits = not is_last and bool(young or self.being_cut.intersection(logs))
        try:
            for name in plain:
                if is_last or name not in young:
                    self._put(name, files[name])
            if waits:
                return False
            for name in logs:
                self._send_log(name, files[name][0], ends, may_write)
            for folder in folders:  # those to resume from last
                may_write()
                self._send_folder(folder, files)
            for name in gone:
                self._remove(name)
            return True
        finally:
            with self._changing:
                self._save_state()

    def send_files(self, before: dict[str, list[int]]) -> None:
        """Sends files that are not those of `before`, but for lines and checkpoints: what a reader adds to a run."""
        for name, stat in self.files().items():
            if before.get(name) != stat and numbers(name) and not _is_log(name):
                self._put(name, stat)

    def ends(self) -> dict[str, int]:
        """How much of each log is on the store, from where parts beyond a gap are removed: readers pass over them, and
        would take what they hold for the end of what is written from here on.
        """
        listing = self.store.listing()
        logs = {match[1] if (match := _PART.fullmatch(name)) else name for name in listing}
        ends = {log: _end(log, listing) for log in logs if _is_log(log)}
        for log, end in ends.items():
            for name in [name for start, name in _parts(log, listing) if start > end]:
                self.store.remove(name)
        return ends

    def join_parts(self, ends: dict[str, int]) -> None:
        """Makes each log one object again: the whole first, then the parts go, which readers pass over meanwhile."""
        listing = self.store.listing()
        for log, end in ends.items():
            if parts := _parts(log, listing):
                with open(self.folder / log, "rb") as file:
                    self.store.write(log, file.read(end))
                for _, name in parts:
                    self.store.remove(name)

    def is_all_there(self, ends: dict[str, int]) -> bool:
        """Whether the store has what was sent: a sending or removal that was given up may arrive after the next one.
        What is another size, and what may be older, is to be sent again.
        """
        listing, files = self.store.listing(), self.files()
        sizes = {name: entry.size for name, entry in listing.items()}
        late = {
            name for name in self.fresh if name in files and name in self.sent and sizes.get(name) != self.sent[name][0]
        }
        late.update(name for name in self.doubtful if name in files)
        self.sent = {name: stat for name, stat in self.sent.items() if name not in late}
        self.doubtful = []
        logs = [log for log, end in ends.items() if log in files and (sizes.get(log) != end or _parts(log, listing))]
        ends.update(dict.fromkeys(logs, 0))
        return not (late or logs)

    def _put(self, name: str, stat: list[int]) -> None:
        path = self.folder / name
        try:
            self.store.put(path, name)
            if _stat(path) == stat:
                self.sent[name] = stat
                self.fresh.add(name)
        except (FileNotFoundError, InputError):
            if path.exists():  # else it went meanwhile
                self.doubtful += [name] * numbers(name)  # weights of a name are not written twice
                raise

    def _send_folder(self, folder: str, files: dict[str, list[int]]) -> None:
        """First what makes it a checkpoint is removed, last it is sent."""
        for last in _LAST:
            self.store.remove(f"{folder}/{last}")
        for name in [each for each in self.sent if each.startswith(f"{folder}/")]:
            if name not in files:
                self.store.remove(name)
            if self.sent[name] != files.get(name) or name.rpartition("/")[2] in _LAST:
                del self.sent[name]
        new = [name for name in files if name.startswith(f"{folder}/") and name not in self.sent]
        for name in sorted(new, key=lambda each: each.rpartition("/")[2] in _LAST):
            self._put(name, files[name])
            if name not in self.sent:
                return  # it went, or is another one: the next time

    def _remove(self, gone: str) -> None:
        """Removes a file or folder that was removed here; of a checkpoint first what makes it one."""
        if not (self.folder / gone).exists():
            names = [each for each in self.store.listing() if each == gone or each.startswith(f"{gone}/")]
            for name in sorted(names, key=lambda each: each.rpartition("/")[2] not in _LAST):
                self.store.remove(name)
                self.sent.pop(name, None)
        with self._changing:
            self.gone.remove(gone)

    def _send_log(self, log: str, size: int, ends: dict[str, int], may_write: Callable[[], None]) -> None:
        with self._changing:
            shortened = self.cuts.get(log)
        if shortened is not None:
            self._cut(log, shortened, ends)
        end = ends.setdefault(log, 0)
        with open(self.folder / log, "rb") as file:
            file.seek(end)
            content = file.read(max(0, size - end))
        content = content[: content.rfind(b"\n") + 1]  # a line is being written
        while content:
            sent, name = content, f"{log}.parts/{ends[log]:012d}.jsonl"
            try:
                self.store.write(name, content, is_new=True)
            except FileExistsError:
                may_write()
                sent = self.store.read(name, len(content))
                if not (sent and content.startswith(sent)):  # of a writer that lost the run while it wrote
                    self.store.write(name, sent := content)
                # Else it is ours, of which the answer was lost, and is never written over: that, too, could come late.
            ends[log] += len(sent)
            content = content[len(sent) :]

    def _cut(self, log: str, size: int, ends: dict[str, int]) -> None:
        """Shortens a log on the store, from its end on: at any moment a beginning of it is there."""
        listing = self.store.listing()
        objects = [(start, listing[name].size, name) for start, name in _parts(log, listing)]
        objects += [(0, listing[log].size, log)] if log in listing else []
        for start, length, name in sorted(objects, reverse=True):
            if start >= size and name != log:
                self.store.remove(name)
            elif start + length > size:
                self.store.write(name, self.store.read(name, length)[: size - start])
        with self._changing:
            ends[log] = min(size, ends.get(log, size))
            if self.cuts.get(log) == size:
                del self.cuts[log]
                self._save_state()  # who goes on after a kill would cut again, below what folders sent by then refer to

    def _in_order(self) -> dict[str, list[int]]:
        """The files, looked at in such an order that what one refers to is among them."""
        checkpoints = {name: stat for name, stat in self.files().items() if not numbers(name)}
        logs = {name: stat for name, stat in self.files().items() if _is_log(name)}
        others = {name: stat for name, stat in self.files().items() if numbers(name) and not _is_log(name)}
        return {**checkpoints, **logs, **others}

    def files(self) -> dict[str, list[int]]:
        """Size and time of each file of the run."""
        files = {}
        for path in sorted(self.folder.rglob("*")) if self.folder.is_dir() else ():
            name = path.relative_to(self.folder).as_posix()
            if not _is_hidden(name):
                with contextlib.suppress(FileNotFoundError):
                    if path.is_file() and not path.is_symlink():
                        files[name] = _stat(path)
        return files


def _parts(log: str, listing: dict[str, Entry]) -> list[tuple[int, str]]:
    """Where each part of a log begins, and its name."""
    matches = [match for name in listing if (match := _PART.fullmatch(name)) and match[1] == log]
    return sorted((int(match[2]), match[0]) for match in matches)


def _end(log: str, listing: dict[str, Entry]) -> int:
    """How many bytes of a log are on the store, without a gap."""
    end = listing[log].size if log in listing else 0
    for start, name in _parts(log, listing):
        if start <= end:
            end = max(end, start + listing[name].size)
    return end


def _folders(names: list[str]) -> list[str]:
    """The checkpoints that files belong to, those to resume from last."""
    folders = {match[1] for name in names if (match := _FOLDER.fullmatch(name))}
    return sorted(folders, key=lambda folder: (folder.startswith("resume/"), folder))


def _is_log(name: str) -> bool:
    return "/" not in name and name.endswith(".jsonl")


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


def _stat(path: Path) -> list[int]:
    facts = path.stat()
    return [facts.st_size, facts.st_mtime_ns]
