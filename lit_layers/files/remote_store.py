"""A folder on a store that fsspec reaches (s3://, gs://, ...): what is there, whole objects, and who may write.

A store has no append, no rename and no lock. Its objects appear whole or not at all, and some name can be taken only by
one: so writers number themselves by objects `.writer/000001.json`, and the highest number is the one who may write.
"""

import contextlib
import dataclasses
import json
import os
import re
import shlex
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lit_layers.errors import InputError
from lit_layers.files.durable import own_draft_of

_URL = re.compile(r"([a-z][a-z0-9+.-]+):/{1,3}([^/].*)", re.DOTALL)  # one slash: what `Path` leaves of two; file:///x
_NO_STORES = ("file", "local", "http", "https", "memory")
_CHANGES = ("ETag", "etag", "LastModified", "mtime", "updated", "last_modified", "created")
TRIES = 3  # of a claim that is gone when it is read
# Seconds that a call may take; those that listing a folder of many files may take beyond them; and bytes a second, of
# which there may be eight streams. Without limits s3fs waits for a store that takes connections and never answers for
# 5 x 5 x 15 s a call, and while it uploads for as long as that machine is there.
ANSWER, LISTING, SLOWEST = 20.0, 100.0, 20_000
_CLAIM = re.compile(r"\.writer/(\d{6,15})\.json")
_LONG = 2**16  # bytes of a claim: what is longer is none


def is_remote(place: str | Path) -> bool:
    """Whether a place is named by a protocol, as s3://bucket/run is."""
    return _URL.fullmatch(str(place)) is not None


@dataclasses.dataclass(frozen=True)
class Entry:
    """An object: its bytes, and what changes when it is written again."""

    size: int
    signature: str


@dataclasses.dataclass(frozen=True)
class Claim:
    """Who may write: `token` is of the local copy, `beat` counts the signs of life."""

    number: int
    token: str
    beat: int = 0
    is_over: bool = False
    holder: str = "another process"


class Store:
    """One folder of a store; names are relative to it.

    Raises:
        InputError: a URL with keys in it, a protocol that is not known or whose package is missing. Each method: what
            the store says, such as no permission.
    """

    def __init__(self, place: str | Path) -> None:
        import fsspec

        match = _URL.fullmatch(str(place).rstrip("/"))
        if match is None:
            raise InputError(f"expected a folder such as s3://bucket/run, got {place}")
        protocol, path = match.groups()
        if "@" in path.partition("/")[0] or "?" in path:
            raise InputError(
                f"{protocol}://...: expected a bucket and a folder alone: keys belong in the environment or in the "
                "file of credentials that the store's package reads"
            )
        self.url = f"{protocol}://{path}"
        if {".", ".."} & set(path.split("/")):  # its local copy would be another folder
            raise InputError(f"{self.url}: expected a bucket and a folder, without . and ..")
        if protocol in _NO_STORES:
            raise InputError(
                f"{self.url}: {protocol} is no store that can be written: name a folder, or s3://bucket/run"
            )
        try:
            with _explained(self.url):
                self._files: Any = fsspec.filesystem(protocol, use_listings_cache=False)
        except ValueError as error:
            if "rotocol not known" not in str(error.__cause__ or error):
                raise
            raise InputError(
                f"{self.url}: {protocol} is no protocol that fsspec knows: s3://, gs://, abfs:// or a folder"
            ) from error
        self._base = path

    @property
    def endpoint(self) -> str:
        """Where the store is, as far as it can be told: the same bucket may be at two places."""
        options = getattr(self._files, "client_kwargs", None) or {}
        named = options.get("endpoint_url") or getattr(self._files, "endpoint_url", None)
        return str(named or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or "")

    def listing(self, folder: str = "") -> dict[str, Entry]:
        """All objects of the folder, those of claims among them; or those of a folder in it.

        Left out are those that no file below a folder can be named by, such as `/etc/x` and `../x`: names are foreign.
        """
        with _explained(self.url):
            try:
                limits = self._limits() if folder else self._limits(LISTING)
                objects = self._files.find(f"{self._base}/{folder}".rstrip("/"), detail=True, **limits)
            except FileNotFoundError as error:
                if "bucket" in str(error):
                    raise
                objects = {}
        base = self._files._strip_protocol(self.url).strip("/") + "/"
        entries = {}
        for path, facts in objects.items():
            changed = [str(facts[each]) for each in _CHANGES if facts.get(each)]
            name = path.lstrip("/").removeprefix(base)
            if path.lstrip("/").startswith(base) and _is_below(name):
                signature = " ".join([str(facts.get("size")), *changed[:1]])
                entries[name] = Entry(int(facts.get("size") or 0), signature)
        return entries

    def _limits(self, more: float = 0) -> dict[str, float]:
        """How long a call may take; what is no asynchronous implementation of fsspec's has limits of its own."""
        return {"timeout": ANSWER + more} if getattr(self._files, "async_impl", False) else {}

    def read(self, name: str, size: int = 0) -> bytes:
        """Raises FileNotFoundError where it is gone."""
        with _explained(self.url, FileNotFoundError):
            return self._files.cat_file(f"{self._base}/{name}", **self._limits(size / SLOWEST))

    def get(self, name: str, path: Path, size: int) -> None:
        """Downloads an object, whole or not at all; raises FileNotFoundError where it is gone."""
        draft = own_draft_of(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with _explained(self.url, FileNotFoundError):
                self._files.get_file(f"{self._base}/{name}", str(draft), **self._limits(size / SLOWEST))
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)

    def put(self, path: Path, name: str) -> None:
        """Uploads a file; raises FileNotFoundError where that is gone."""
        limits = self._limits(path.stat().st_size / SLOWEST)
        with open(path, "rb"), _explained(self.url):
            self._files.put_file(str(path), f"{self._base}/{name}", **limits)

    def write(self, name: str, content: bytes, *, is_new: bool = False) -> None:
        """Writes an object; with `is_new` raises FileExistsError where there is one."""
        mode, limits = "create" if is_new else "overwrite", self._limits(len(content) / SLOWEST)
        with _explained(self.url, FileExistsError):
            self._files.pipe_file(f"{self._base}/{name}", content, mode=mode, **limits)

    def remove(self, name: str) -> None:
        """Removes an object, if it is there."""
        with contextlib.suppress(FileNotFoundError), _explained(self.url, FileNotFoundError):
            self._files.rm_file(f"{self._base}/{name}", **self._limits())

    def newest_claim(self) -> Claim | None:
        """The claim of the highest number. What it says is foreign: of who holds it what a terminal can print."""
        for _ in range(TRIES):
            there = self.listing(".writer")
            numbers = [int(match[1]) for name in there if (match := _CLAIM.fullmatch(name))]
            if not numbers:
                return None
            if there[_name(max(numbers))].size > _LONG:
                return Claim(max(numbers), token="")
            try:
                content = self.read(_name(max(numbers)))
            except FileNotFoundError:  # a later one took its place between the two
                continue
            try:
                claim = Claim(**{**json.loads(content), "number": max(numbers)})
            except (ValueError, TypeError, RecursionError):
                return Claim(max(numbers), token="")
            return dataclasses.replace(claim, holder="".join(filter(str.isprintable, str(claim.holder)))[:300])
        raise InputError(f"{self.url}: its claims in .writer are listed and cannot be read: is reading allowed?")

    def claim(self, number: int, token: str) -> Claim | None:
        """Takes a number; None where another was faster. Lower ones are removed."""
        mine = Claim(number, token, holder=_this_process())
        try:
            self.write(_name(number), _content(mine), is_new=True)
        except FileExistsError:  # perhaps ours, of which the answer was lost
            there = self.newest_claim()
            if there is None or there.number != number or there.token != token:
                return None
        for name in self.listing(".writer"):
            if (match := _CLAIM.fullmatch(name)) and int(match[1]) < number:
                self.remove(name)
        return mine

    def renew(self, claim: Claim, *, is_over: bool = False) -> Claim:
        """Gives a sign of life, or the last one."""
        renewed = dataclasses.replace(claim, beat=claim.beat + 1, is_over=is_over)
        self.write(_name(claim.number), _content(renewed))
        return renewed


def _is_below(name: str) -> bool:
    return name.isprintable() and "\\" not in name and {"", ".", ".."}.isdisjoint(name.split("/"))


def _name(number: int) -> str:
    return f".writer/{number:06d}.json"


def _content(claim: Claim) -> bytes:
    return json.dumps(dataclasses.asdict(claim)).encode()


def _this_process() -> str:
    command = shlex.join([Path(sys.argv[0] if sys.argv else "").name, *sys.argv[1:]])[:200]
    return f"`{command}` (host {socket.gethostname()}, process {os.getpid()})"


@contextlib.contextmanager
def _explained(url: str, *passed: type[BaseException]) -> Iterator[None]:
    """Makes one sentence of what a store says, but for the kinds that are passed on."""
    try:
        yield
    except (InputError, *passed):
        raise
    except ImportError as error:
        package = {"s3": "'lit_layers[remote]'", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}
        name = package.get(url.partition(":")[0])  # a package that is called as the protocol may be anybody's
        advice = f"pip install {name}" if name else _without_secrets(str(error))
        raise InputError(f"{url}: its package is missing: {advice}") from error
    except Exception as error:  # each store has kinds of its own, which no class unites
        if isinstance(error, PermissionError):
            why = "no permission"
        elif isinstance(error, FileNotFoundError):
            why = "no such bucket or object"
        elif isinstance(error, TimeoutError):
            why = "it gives no answer"
        else:
            why = f"it cannot be reached or refuses: {_without_secrets(str(error) or type(error).__name__)}"
        raise InputError(f"{url}: {why}") from error


def _without_secrets(text: str) -> str:
    """A store's words without what the environment holds as a key, in one line."""
    words = ("KEY", "SECRET", "TOKEN", "PASSWORD", "CREDENTIAL", "CONNECTION_STRING")
    for name, value in os.environ.items():
        if len(value) > 5 and any(word in name.upper() for word in words):
            text = text.replace(value, "...")
    return " ".join(text.split())[:200]
