"""A run on a store (s3://bucket/run) is worked on in its local copy, of which all that is whole is sent.

The commands know the local folder alone. What they write there as a whole is sent by a thread within seconds:

- a log of lines as objects of what was added, `measurements.jsonl.parts/000000001234.jsonl` from that byte on, which
  become one `measurements.jsonl` again when the writer ends;
- any other file as it is;
- the folder of a checkpoint with the file last without which nobody takes it for one.

What a file refers to is sent before it: values before the lines that they belong to, lines before the checkpoint to
resume from that counts them. So what is on the store at any moment is a run that was killed a little earlier.

One writer a run: whoever writes holds the highest claim (`remote_store`) and gives signs of life. The copy of the
last writer goes on with all it has; any other one is first made what is on the store.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import Timeout

from lit_layers.errors import InputError, RunLostError
from lit_layers.files.remote_copy import LocalCopy, NameFilter, numbers
from lit_layers.files.remote_store import Claim, Store, is_remote

logger = logging.getLogger(__name__)
LEASE, HEARTBEAT, LOOK = 60.0, 5.0, 0.5  # seconds
PATIENCE, TRIES = 120.0, 3  # at the end: seconds that a silent store is waited for; what it refuses is tried as often
_writers: "list[Writer]" = []
copies: dict[str, str] = {}  # the local copies that this process has worked in, and what they are copies of


def read(place: str | Path, name_filter: NameFilter = numbers) -> Path:
    """Returns where a run can be read: a folder itself; of a run on a store its local copy, with what is there now.

    Raises:
        InputError: a place where nothing is, or that cannot be had.
    """
    if not is_remote(place):
        return Path(place)
    copy = _known(place)
    if not any(writer.copy.home == copy.home for writer in _writers):
        copy.refresh(name_filter)
    if not copy.folder.is_dir():
        raise InputError(f"{copy.store.url}: nothing is there")
    return copy.folder


def holds(place: str | Path, name: str) -> bool:
    """Returns whether a folder on a store has a small file of this name.

    Raises:
        InputError: a store that cannot be had.
    """
    with contextlib.suppress(FileNotFoundError):
        Store(place).read(name)
        return True
    return False


@contextlib.contextmanager
def written(place: str | Path, name_filter: NameFilter = numbers) -> Iterator[Path]:
    """Gives the folder that a run is to be written in, of a run on a store its local copy; at the end all is sent.

    Raises:
        InputError: where another process writes there, or nobody can.
        RunLostError: at the end, where another process took the run over, or something could not be sent.
    """
    if not is_remote(place):
        yield Path(place)
        return
    with Writer(_known(place), name_filter) as writer:
        yield writer.copy.folder


def _known(place: str | Path) -> LocalCopy:
    copy = LocalCopy(place)
    copies[str(copy.folder)] = copy.store.url
    return copy


def addressed(text: str) -> str:
    """Returns a text with addresses on a store where it names files of its local copies."""
    for folder, url in copies.items():
        text = text.replace(folder, url)
    return text


def check(path: Path) -> None:
    """Raises RunLostError where `path` lies in a copy whose run another process has taken over."""
    for writer in _of(path):
        writer.check()


def wrote(path: Path) -> None:
    """Notes that something whole can be sent."""
    for writer in _of(path):
        writer.copy.being_cut.discard(path.name)
        writer.news.set()


def forget(path: Path, keep: int | None) -> None:
    """Notes, before it is done, that a log is cut to `keep` bytes, or a file or folder removed: only then what is on
    the store goes, too.
    """
    for writer in _of(path):
        writer.copy.note(path, keep)


def _of(path: Path) -> "list[Writer]":
    return [each for each in _writers if path.resolve().is_relative_to(each.copy.folder)] if _writers else []


class Additions:
    """What a command that only reads a run adds to its local copy, such as a page."""

    def __init__(self, place: str | Path) -> None:
        self._copy = LocalCopy(place)
        self._before = self._copy.files()

    def send(self) -> None:
        self._copy.send_files(self._before)


class Writer:
    """A run on a store while this process writes it: threads send what is new and give signs of life."""

    def __init__(self, copy: LocalCopy, name_filter: NameFilter) -> None:
        self.copy, self.name_filter, self.news = copy, name_filter, threading.Event()
        self.lost = ""  # why this process may write no more
        self._over, self._sent, self._is_done = threading.Event(), threading.Event(), False
        self._wrong = ""  # what the store said last
        self._heard = 0.0  # when it last did what it was asked, or its writer's end
        self._sender, self._beater = (threading.Thread(target=each, daemon=True) for each in (self._send, self._beat))

    def __enter__(self) -> "Writer":
        url = self.copy.store.url
        try:
            self.copy.lock.acquire(timeout=LEASE)
        except Timeout as error:
            raise InputError(f"root: {url} is being written by another command on this machine: wait for it") from error
        try:
            self.copy._read_state()
            while True:
                newest = self._free()
                if newest is None or newest.token != self.copy.token:
                    self.copy._drop_stale(self.copy.store.listing())
                number = 1 if newest is None else newest.number + 1
                if (claim := self.copy.store.claim(number, self.copy.token)) is not None:
                    break
            self.claim = claim
            self.copy.fetch(self.name_filter)
            self.ends = self.copy.ends()
        except BaseException:
            with contextlib.suppress(InputError, AttributeError):
                self.copy.store.renew(self.claim, is_over=True)
            self.copy.lock.release()
            raise
        _writers.append(self)
        self._sender.start()
        self._beater.start()
        return self

    def _free(self) -> Claim | None:
        """The newest claim, once its holder has ended or gives no sign of life.

        Raises:
            InputError: where it lives.
        """
        first, since, is_said = self.copy.store.newest_claim(), time.monotonic(), False
        while True:
            newest = self.copy.store.newest_claim()
            if newest is None or newest.is_over or newest.token == self.copy.token:
                return newest
            if newest != first:
                raise InputError(
                    f"root: {self.copy.store.url} is being written by {newest.holder}; wait for its end, or choose "
                    "another folder"
                )
            if time.monotonic() - since > LEASE:
                return newest
            if not is_said and time.monotonic() - since > 3 * HEARTBEAT:
                is_said = True
                logger.warning(
                    "no sign of life from %s: its claim ends %.0f s after its last one", newest.holder, LEASE
                )
            time.sleep(LOOK)

    def check(self) -> None:
        """Raises RunLostError where another process writes there now."""
        if self.lost:
            raise RunLostError(self.lost)

    def _may_write(self) -> None:
        newest = self.copy.store.newest_claim()
        if newest is None or (newest.number, newest.token) != (self.claim.number, self.claim.token):
            who = "nobody" if newest is None else newest.holder
            self.lost = (
                f"{self.copy.store.url}: it is {who} that writes there now, as this command was paused for more than "
                "a minute or its claim was removed; it stops and writes nothing more there"
            )
        self.check()

    def _beat(self) -> None:
        while not self._sent.wait(HEARTBEAT) and not self.lost:
            with contextlib.suppress(InputError, FileExistsError):  # what is wrong is said by who sends
                self._may_write()
                self.claim = self.copy.store.renew(self.claim)
                self._heard = time.monotonic()

    def _send(self) -> None:
        while not self._over.is_set() and not self.lost:
            self.news.wait(HEARTBEAT)
            self.news.clear()
            try:
                if not self.copy.send(self.ends, self._may_write):
                    self.news.set()
                self._wrong = ""
            except (InputError, OSError) as error:
                self._say(error)
                self._over.wait(HEARTBEAT)
            self._over.wait(LOOK)
        self._send_the_rest()

    def _say(self, error: Exception) -> None:
        if str(error) not in (self._wrong, self.lost):
            then = "the run goes on in" if not self._over.is_set() else "what is left is in"
            logger.warning("%s; %s %s, and sending is tried again", error, then, self.copy.folder)
        self._wrong = str(error)

    def _send_the_rest(self) -> None:
        until, tries, checks = time.monotonic() + PATIENCE, 0, TRIES
        while not self.lost:
            try:
                self.copy.send(self.ends, self._may_write, is_last=True)
                self.copy.join_parts(self.ends)
                if not self.copy.is_all_there(self.ends):
                    if checks:
                        checks -= 1
                        continue
                    logger.warning(
                        "%s: what was sent is not seen there; all is in %s, and the same command sends it again",
                        *(self.copy.store.url, self.copy.folder),
                    )
                self._sent.set()
                self._beater.join()
                self.copy.store.renew(self.claim, is_over=True)
                self._is_done = True
                return
            except (InputError, OSError) as error:
                self._say(error)
                tries += 1
                if tries >= TRIES and time.monotonic() > until:
                    return
                time.sleep(HEARTBEAT)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._heard, self._wrong = time.monotonic(), ""
        self._over.set()
        self.news.set()
        try:
            while self._sender.is_alive() and time.monotonic() < self._heard + PATIENCE + LEASE:
                self._sender.join(LOOK)
            self.check()
            if not self._is_done:
                raise RunLostError(
                    f"{self._wrong or f'{self.copy.store.url}: it gives no answer'}; not all could be sent: it is in "
                    f"{self.copy.folder}, and the same command sends it"
                )
        except RunLostError as error:
            if kind is None:
                raise
            logger.warning("%s", error)
        finally:
            self.lost = self.lost or "its end is over"  # which ends the threads of a silent store
            self._sent.set()
            _writers.remove(self)
            self.copy.lock.release()
