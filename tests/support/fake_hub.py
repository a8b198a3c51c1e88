"""Serve a read-only Hugging Face Hub on loopback, to test the real client without a network.

    ROOT/ORG/NAME/REVISION/files...              a model repository with a folder per branch (`main` is required)
    ROOT/NAME/REVISION/files...                  a model without a namespace
    ROOT/datasets/ORG/NAME/REVISION/files...     a data set

    with FakeHub(root) as hub:
        hub.env(home)                            # the environment variables of a client
        hub.requests                             # [{"method", "path", "status", "bytes"}...]
        hub.fail(r"/resolve/step2/.*safetensors", status=503, times=2)
        hub.truncate(r"step2", at=1000, times=1) # close the connection in the middle of a file
        hub.delay(r"tree", 0.5)
        hub.set_token("hf_secret")               # every repository becomes gated

As on the real Hub, weights over 1 KiB are large files: HEAD answers 302 to another origin, with their sha256 and size.
HEAD of other files answers 200 with the id of their git blob. A missing file or repository answers 401 or 404 with the
Hub's error code. Range requests work, and every request accepts a commit instead of a branch.
"""

import hashlib
import json
import re
import threading
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, quote, unquote, urlsplit

LARGE_SUFFIXES = (".safetensors", ".bin", ".pt", ".ckpt", ".parquet", ".npz", ".h5", ".arrow", ".zip", ".gz")
LARGE = 1024
KINDS = ("models", "datasets")
EPOCH = "2023-02-08T12:00:00.000Z"


@cache
def _hashes(path: Path, size: int, changed: int) -> tuple[str, str]:
    content = path.read_bytes()
    blob = hashlib.sha1(f"blob {size}\0".encode() + content)
    return hashlib.sha256(content).hexdigest(), blob.hexdigest()


def hashes(path: Path) -> tuple[str, str]:
    """Return the sha256 and the id of the git blob of a file."""
    state = path.stat()
    return _hashes(path, state.st_size, state.st_mtime_ns)


def is_large(path: Path) -> bool:
    return path.suffix in LARGE_SUFFIXES and path.stat().st_size >= LARGE


class Repo(NamedTuple):
    kind: str
    name: str
    path: Path

    def branches(self) -> dict[str, Path]:
        """Return the folder of each branch by name; a slash in the name is %2F in that of the folder."""
        return {unquote(path.name): path for path in sorted(self.path.glob("[!.]*")) if path.is_dir()}

    def commit(self, folder: Path) -> str:
        found = hashlib.sha1(f"{self.kind}/{self.name}".encode())
        for path in files(folder):
            found.update(f"{path.relative_to(folder)}:{hashes(path)[1]}\n".encode())
        return found.hexdigest()

    def resolve(self, revision: str) -> tuple[str, Path] | None:
        """Return the commit and the folder of a branch or a commit."""
        for name, folder in self.branches().items():
            commit = self.commit(folder)
            if revision.removeprefix("refs/heads/") in (name, commit):
                return commit, folder
        return None


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


class Rule:
    def __init__(self, pattern: str, times: int, kind: str, value: float) -> None:
        self.pattern, self.left, self.kind, self.value = re.compile(pattern), times, kind, value


class FakeHub:
    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.requests: list[dict[str, Any]] = []
        self.rules: list[Rule] = []
        self.token: str | None = None
        self.lock = threading.Lock()
        self.closing = threading.Event()  # ends the delays
        handler = type("Handler", (_Handler,), {"hub": self})
        # Large files come from another origin, as on the real Hub: a client must not treat it as the Hub.
        self.servers = [ThreadingHTTPServer(("127.0.0.1", 0), handler) for _ in range(2)]
        ports = [server.server_address[1] for server in self.servers]
        self.url, self.cdn_url = f"http://127.0.0.1:{ports[0]}", f"http://localhost:{ports[1]}"

    def __enter__(self) -> "FakeHub":
        for server in self.servers:
            server.daemon_threads = True
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self.closing.set()
        for server in self.servers:
            server.shutdown()
            server.server_close()

    def env(self, home: Path) -> dict[str, str]:
        """Return the environment of a client of this Hub, with its own cache and without proxy and telemetry."""
        plain = {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
        hosts = dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost")
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(home), **plain, **hosts}

    def fail(self, pattern: str, status: int = 503, times: int = 1) -> None:
        self.rules.append(Rule(pattern, times, "status", status))

    def truncate(self, pattern: str, at: int = 1000, times: int = 1) -> None:
        self.rules.append(Rule(pattern, times, "truncate", at))

    def delay(self, pattern: str, seconds: float, times: int = 10**9) -> None:
        self.rules.append(Rule(pattern, times, "delay", seconds))

    def throttle(self, pattern: str, bytes_per_second: float) -> None:
        self.rules.append(Rule(pattern, 10**9, "throttle", bytes_per_second))

    def set_token(self, token: str) -> None:
        self.token = token

    def rule(self, path: str, kind: str) -> float | None:
        """Return the value of the last rule of this kind that matches and has uses left, and count the use."""
        value = None
        with self.lock:
            for rule in self.rules:
                if rule.left > 0 and rule.kind == kind and rule.pattern.search(path):
                    rule.left -= 1
                    value = rule.value
        return value

    def find(self, kind: str, parts: list[str]) -> tuple[Repo, list[str]] | None:
        """Return the repository named by the first two parts of a path, or else the first one, and the other parts."""
        base = self.root if kind == "models" else self.root / kind
        for number in (2, 1):
            path = base.joinpath(*parts[:number])
            if len(parts) >= number and (path / "main").is_dir():
                return Repo(kind, "/".join(parts[:number]), path), parts[number:]
        return None


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        try:
            self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if (seconds := self.hub.rule(self.path, "delay")) is not None:
                self.hub.closing.wait(seconds)
            if (status := self.hub.rule(self.path, "status")) is not None:
                self._refuse(int(status), None, f"told to answer {status}")
            else:
                self._route()
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    do_HEAD = do_POST = do_GET

    def _note(self, status: int, size: int) -> None:
        row = {"method": self.command, "path": self.path, "status": status, "bytes": size}
        with self.hub.lock:
            self.hub.requests.append(row)

    def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        # Note the request before sending: a client that has the answer may read `requests` at once.
        self._note(status, len(body) if self.command != "HEAD" else 0)
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, content: Any) -> None:
        self._answer(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str | None, message: str, **headers: str) -> None:
        fields = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {}), **headers}
        self._answer(status, json.dumps({"error": message}).encode(), fields)

    def _route(self) -> None:
        address = urlsplit(self.path)
        self.query = parse_qs(address.query)
        parts = [unquote(part) for part in address.path.split("/") if part]  # a revision may hold %2F
        if parts[:1] == ["_cdn"]:
            return self._large(parts[1], "/".join(parts[2:]))
        is_api = parts[:1] == ["api"]
        rest = parts[1:] if is_api else parts
        kind = rest[0] if rest[:1] and rest[0] in KINDS else "models"
        found = self.hub.find(kind, rest[1:] if rest[:1] == [kind] else rest)
        if found is None:
            return self._refuse(401, "RepoNotFound", "Repository not found")
        repo, rest = found
        if is_api and rest[:1] == ["refs"]:
            return self._json(self._refs(repo))
        if is_api and rest[:1] == ["discussions"]:
            return self._json({"discussions": [], "count": 0, "start": 0, "numClosedDiscussions": 0})
        if self.hub.token is not None and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            return self._refuse(401, "GatedRepo", f"Access to {repo.name} is restricted. You must be authenticated.")
        revision = rest[1] if len(rest) > 1 else "main"
        resolved = repo.resolve(revision)
        if resolved is None:
            return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        commit, folder = resolved
        match rest[:1]:
            case ["resolve"]:
                return self._file(commit, folder, rest[2:])
            case [] | ["revision"]:
                return self._json(self._info(repo, commit, folder))
            case ["tree"]:
                return self._tree(commit, folder, rest[2:])
            case ["paths-info"]:
                is_json = "json" in self.headers["Content-Type"]
                query = json.loads(self.body) if is_json else parse_qs(self.body.decode())
                paths = [folder / name for name in query.get("paths", [])]
                return self._json([self._row(folder, path) for path in paths if path.exists()])
        return self._refuse(404, None, f"{rest[0]} is not served")

    @staticmethod
    def _refs(repo: Repo) -> dict[str, Any]:
        branches = [
            {"name": name, "ref": f"refs/heads/{name}", "targetCommit": repo.commit(folder)}
            for name, folder in repo.branches().items()
        ]
        return {"branches": branches, "tags": [], "converts": [], "pullRequests": []}

    def _info(self, repo: Repo, commit: str, folder: Path) -> dict[str, Any]:
        siblings = [{"rfilename": str(path.relative_to(folder))} for path in files(folder)]
        plain = {"private": False, "gated": False, "disabled": False, "downloads": 0, "likes": 0, "tags": []}
        dates = dict.fromkeys(("lastModified", "createdAt"), EPOCH)
        return {"id": repo.name, "modelId": repo.name, "sha": commit, "siblings": siblings, **plain, **dates}

    @staticmethod
    def _row(folder: Path, path: Path) -> dict[str, Any]:
        name = str(path.relative_to(folder))
        if path.is_dir():
            return {"type": "directory", "oid": hashlib.sha1(name.encode()).hexdigest(), "size": 0, "path": name}
        (sha, blob), size = hashes(path), path.stat().st_size
        large = {"lfs": {"oid": sha, "size": size, "pointerSize": 134}} if is_large(path) else {}
        return {"type": "file", "oid": blob, "size": size, "path": name, **large}

    def _tree(self, commit: str, folder: Path, parts: list[str]) -> None:
        base = folder.joinpath(*parts)
        if not base.exists():
            return self._refuse(404, "EntryNotFound", f"{'/'.join(parts)} does not exist on {commit}")
        recursive = self.query.get("recursive", ["false"])[0]
        found = base.rglob("*") if recursive.lower() in ("true", "1") else base.iterdir()
        return self._json([self._row(folder, path) for path in sorted(found)])

    def _file(self, commit: str, folder: Path, parts: list[str]) -> None:
        path = folder.joinpath(*parts)
        if not path.is_file():
            return self._refuse(404, "EntryNotFound", "Entry not found", **{"X-Repo-Commit": commit})
        sha, blob = hashes(path)
        headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes", "ETag": f'"{blob}"'}
        if not is_large(path):
            return self._bytes(path, headers)
        headers |= {"X-Linked-Etag": f'"{sha}"', "X-Linked-Size": str(path.stat().st_size)}
        headers["Location"] = f"{self.hub.cdn_url}/_cdn/{sha}/{quote(str(path.relative_to(self.hub.root)))}"
        return self._answer(302, b"Found", headers)

    def _large(self, sha: str, name: str) -> None:
        path = self.hub.root / name
        self._bytes(path, {"ETag": f'"{sha}"', "Accept-Ranges": "bytes"})

    def _bytes(self, path: Path, headers: dict[str, str]) -> None:
        size = path.stat().st_size
        first, last, status = 0, size - 1, 200
        if requested := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            first, last = int(requested[1]), min(int(requested[2] or size - 1), size - 1)
            status, headers = 206, headers | {"Content-Range": f"bytes {first}-{last}/{size}"}
        length, sent = last - first + 1, 0
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(length)}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            end = self.hub.rule(self.path, "truncate")
            sent = length if end is None else min(length, int(end))
            rate = self.hub.rule(self.path, "throttle")
            with path.open("rb") as file:
                file.seek(first)
                for begin in range(0, sent, 1 << 16):
                    if rate is not None:
                        self.hub.closing.wait((1 << 16) / rate)
                    self.wfile.write(file.read(min(1 << 16, sent - begin)))
            self.close_connection = sent < length
        self._note(status, sent)
