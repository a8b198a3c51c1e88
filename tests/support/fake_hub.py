"""A read-only Hugging Face Hub on loopback, standard library only.

It serves a folder tree the way huggingface.co serves repositories, so that what talks to the Hub is tested with the
real client and without a network:

    ROOT/ORG/NAME/REVISION/files...              a model repository, one folder a branch (`main` is required)
    ROOT/NAME/REVISION/files...                  a model without a namespace
    ROOT/datasets/ORG/NAME/REVISION/files...     a data set repository (likewise ROOT/spaces/...)
    ROOT/ORG/NAME/.tags/TAG/files...             a tag

    with FakeHub(root) as hub:
        subprocess.run([...], env={**os.environ, **hub.env(tmp_home)})
        hub.requests                             # [{"method", "path", "status", "bytes", "range"}...]
        hub.fail(r"/resolve/step2/.*safetensors", status=503, times=2)
        hub.truncate(r"step2", at=1000, times=1) # close the connection in the middle of a file
        hub.delay(r"tree", 0.5)
        hub.throttle(r"_cdn", 1e6)               # bytes a second
        hub.set_token("hf_secret")               # every repository becomes gated

Like the real Hub: files over 1 KiB with a weights suffix are "LFS": HEAD answers 302 to a CDN address with
X-Linked-Etag (sha256) and X-Linked-Size; the others answer 200 with a git blob ETag; X-Repo-Commit names the
commit; a missing repository, revision or file answers 401/404/404 with the Hub's X-Error-Code; Range works;
a commit hash is accepted wherever a branch is. Nothing can be written. Binds 127.0.0.1 only.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import monotonic, sleep  # by name: a test may take its own waits away
from typing import ClassVar
from urllib.parse import parse_qs, quote, unquote, urlsplit

LFS_SUFFIXES = (".safetensors", ".bin", ".pt", ".ckpt", ".parquet", ".npz", ".h5", ".msgpack", ".arrow", ".zip", ".gz")
LFS_MIN = 1024
EPOCH = "2023-02-08T12:00:00.000Z"


class Repo:
    """One repository folder: its branches and tags, their files, and a stable commit id for each."""

    def __init__(self, kind: str, rid: str, path: Path):
        self.kind, self.id, self.path = kind, rid, path

    def refs(self) -> dict[str, Path]:
        """By name; a folder for refs/convert/parquet is called refs%2Fconvert%2Fparquet."""
        return {unquote(p.name): p for p in sorted(self.path.iterdir()) if p.is_dir() and not p.name.startswith(".")}

    def tags(self) -> dict[str, Path]:
        d = self.path / ".tags"
        return {p.name: p for p in sorted(d.iterdir()) if p.is_dir()} if d.is_dir() else {}

    @staticmethod
    def files(d: Path) -> list[Path]:
        return sorted(p for p in d.rglob("*") if p.is_file())

    def commit(self, d: Path) -> str:
        h = hashlib.sha1(f"{self.kind}/{self.id}".encode())
        for p in self.files(d):
            h.update(f"{p.relative_to(d)}:{Hashes.git(p)}\n".encode())
        return h.hexdigest()

    def resolve(self, rev: str) -> tuple[str, Path] | None:
        rev = rev.removeprefix("refs/heads/").removeprefix("refs/tags/")
        every = {**self.tags(), **self.refs()}
        if rev in every:
            return self.commit(every[rev]), every[rev]
        if re.fullmatch(r"[0-9a-f]{7,40}", rev):
            for d in every.values():
                c = self.commit(d)
                if c.startswith(rev):
                    return c, d
        return None


class Hashes:
    """sha256 and git blob sha1 of a file, remembered until it changes."""

    _seen: ClassVar[dict[tuple, tuple[str, str]]] = {}
    _lock = threading.Lock()

    @classmethod
    def _of(cls, p: Path) -> tuple[str, str]:
        st = p.stat()
        key = (str(p), st.st_size, st.st_mtime_ns)
        with cls._lock:
            if key in cls._seen:
                return cls._seen[key]
        s256, s1 = hashlib.sha256(), hashlib.sha1(f"blob {st.st_size}\0".encode())
        with p.open("rb") as f:
            while chunk := f.read(1 << 20):
                s256.update(chunk)
                s1.update(chunk)
        with cls._lock:
            cls._seen[key] = (s256.hexdigest(), s1.hexdigest())
            return cls._seen[key]

    @classmethod
    def sha256(cls, p: Path) -> str:
        return cls._of(p)[0]

    @classmethod
    def git(cls, p: Path) -> str:
        return cls._of(p)[1]


def is_lfs(p: Path) -> bool:
    return p.suffix in LFS_SUFFIXES and p.stat().st_size >= LFS_MIN


class Rule:
    def __init__(self, pattern: str, times: int, **what):
        self.re, self.left, self.what = re.compile(pattern), times, what


class FakeHub:
    def __init__(self, root: str | os.PathLike, port: int = 0, log: str | None = None, token: str | None = None):
        self.root = Path(root).resolve()
        self.requests: list[dict] = []
        self.rules: list[Rule] = []
        self.token = token
        self._log = open(log, "a", buffering=1) if log else None  # noqa: SIM115
        self._lock = threading.Lock()
        self.closing = threading.Event()  # ends the delays
        handler = type("Handler", (_Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        # large files come from another origin, as on the real Hub: a client must not take it for the Hub itself
        self.cdn = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.cdn.daemon_threads = True
        self.cdn_url = f"http://localhost:{self.cdn.server_address[1]}"

    # -- life
    def start(self) -> FakeHub:
        for s in (self.server, self.cdn):
            threading.Thread(target=s.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def stop(self) -> None:
        self.closing.set()
        for s in (self.server, self.cdn):
            s.shutdown()
            s.server_close()

    def __enter__(self):
        return self.start()

    def __exit__(self, *_):
        self.stop()

    def env(self, home: str | os.PathLike) -> dict[str, str]:
        """The environment a client needs: this endpoint, a cache of its own, no proxy, no telemetry."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
        }

    # -- trouble
    def fail(self, pattern: str, status: int = 503, times: int = 1) -> None:
        self.rules.append(Rule(pattern, times, status=status))

    def truncate(self, pattern: str, at: int = 1000, times: int = 1) -> None:
        self.rules.append(Rule(pattern, times, truncate=at))

    def delay(self, pattern: str, seconds: float, times: int = 10**9) -> None:
        self.rules.append(Rule(pattern, times, delay=seconds))

    def throttle(self, pattern: str, bytes_per_second: float, times: int = 10**9) -> None:
        self.rules.append(Rule(pattern, times, throttle=bytes_per_second))

    def set_token(self, token: str | None) -> None:
        self.token = token

    def rule(self, path: str, *keys: str) -> dict:
        out: dict = {}
        with self._lock:
            for r in self.rules:
                if r.left > 0 and any(k in r.what for k in keys) and r.re.search(path):
                    r.left -= 1
                    out.update(r.what)
        return out

    def note(self, **row) -> None:
        with self._lock:
            self.requests.append(row)
        if self._log:
            self._log.write(json.dumps(row) + "\n")

    # -- repositories
    def find(self, kind: str, parts: list[str]) -> tuple[Repo, list[str]] | None:
        """The repository that the leading path parts name (two parts, else one), and what is left of them."""
        base = self.root if kind == "models" else self.root / kind
        for n in (2, 1):
            if len(parts) >= n and all(p and p not in (".", "..") and not p.startswith(".") for p in parts[:n]):
                d = base.joinpath(*parts[:n])
                if (d / "main").is_dir():
                    return Repo(kind, "/".join(parts[:n]), d), parts[n:]
        return None


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"
    server_version = "fake-hub/1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self._go()

    def do_GET(self):
        self._go()

    def do_POST(self):
        self._go()

    # -- answers
    def _send(self, status: int, body: bytes = b"", ctype: str = "application/json", headers: dict | None = None):
        # Noted first: who has the answer may look at once.
        self.hub.note(
            method=self.command,
            path=self.path,
            status=status,
            bytes=len(body) if self.command != "HEAD" else 0,
            range=self.headers.get("Range"),
        )
        self.send_response(status)
        self.send_header("Content-Type", ctype)
        for k, v in (headers or {}).items():
            self.send_header(k, v)
        if "Content-Length" not in (headers or {}):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, data, headers: dict | None = None):
        self._send(200, json.dumps(data).encode(), headers=headers)

    def _error(self, status: int, code: str | None, message: str):
        h = {"X-Error-Message": message}
        if code:
            h["X-Error-Code"] = code
        self._send(status, json.dumps({"error": message}).encode(), headers=h)

    # -- routes
    def _go(self):
        try:
            self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            slow = self.hub.rule(self.path, "delay")
            if slow:
                self.hub.closing.wait(slow["delay"])
            bad = self.hub.rule(self.path, "status")
            if bad:
                return self._error(bad["status"], None, f"fake_hub was told to answer {bad['status']}")
            self._route()
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _route(self):
        u = urlsplit(self.path)
        self.query = parse_qs(u.query)
        raw = [p for p in u.path.split("/") if p]  # still quoted: a revision may hold %2F
        parts = [unquote(p) for p in raw]
        if parts[:1] == ["_cdn"] and len(parts) >= 3:
            return self._cdn(parts[1], "/".join(parts[2:]))
        if parts[:2] == ["api", "whoami-v2"]:
            if self.headers.get("Authorization") == f"Bearer {self.hub.token}":
                return self._json(
                    {
                        "type": "user",
                        "name": "tester",
                        "fullname": "Tester",
                        "orgs": [],
                        "auth": {"accessToken": {"role": "read"}},
                    }
                )
            return self._error(401, None, "Invalid credentials in Authorization header")
        if parts[:1] == ["api"] and len(parts) >= 3 and parts[1] in ("models", "datasets", "spaces"):
            return self._api(parts[1], parts[2:])
        if parts[:2] == ["api", "resolve-cache"] and len(parts) > 3:
            parts = ([] if parts[2] == "models" else [parts[2]]) + parts[3:]
            found = self.hub.find(
                parts[0] if parts[0] in ("datasets", "spaces") else "models",
                parts[1:] if parts[0] in ("datasets", "spaces") else parts,
            )
            if found:
                return self._file(found[0], found[1][0], found[1][1:])
        kind = parts[0] if parts and parts[0] in ("datasets", "spaces") else "models"
        found = self.hub.find(kind, parts if kind == "models" else parts[1:])
        if found and found[1][:1] and found[1][0] in ("resolve", "raw") and len(found[1]) >= 3:
            return self._file(found[0], found[1][1], found[1][2:])
        if len(parts) >= 2 and "resolve" in parts:
            return self._error(401, "RepoNotFound", "Repository not found")
        return self._error(404, None, "Sorry, we can't find the page you are looking for.")

    def _gated(self, repo: Repo) -> bool:
        if self.hub.token is None or self.headers.get("Authorization") == f"Bearer {self.hub.token}":
            return False
        self._error(
            401,
            "GatedRepo",
            f"Access to {repo.kind[:-1]} {repo.id} is restricted. You must be authenticated to access it.",
        )
        return True

    def _api(self, kind: str, parts: list[str]):
        found = self.hub.find(kind, parts)
        if not found:
            return self._error(401, "RepoNotFound", "Repository not found")
        repo, rest = found
        if rest[:1] == ["refs"]:

            def row(n, d, ns):
                return {"name": n, "ref": f"refs/{ns}/{n}", "targetCommit": repo.commit(d)}

            out = {
                "branches": [row(n, d, "heads") for n, d in repo.refs().items()],
                "converts": [],
                "tags": [row(n, d, "tags") for n, d in repo.tags().items()],
            }
            if "include_prs" in self.query:
                out["pullRequests"] = []
            return self._json(out)
        if rest[:1] == ["discussions"]:
            return self._json({"discussions": [], "count": 0, "start": 0, "numClosedDiscussions": 0})
        if self._gated(repo):
            return None
        verb = rest[0] if rest else "revision"
        rev = rest[1] if len(rest) > 1 else "main"
        hit = repo.resolve(rev)
        if hit is None:
            return self._error(404, "RevisionNotFound", f"Invalid rev id: {rev}")
        commit, d = hit
        if verb == "revision":
            return self._json(self._info(repo, commit, d))
        if verb == "tree":
            return self._tree(d, rest[2:], commit)
        if verb == "paths-info":
            if "json" in (self.headers.get("Content-Type") or ""):
                want = json.loads(self.body or b"{}").get("paths", [])
            else:
                want = parse_qs(self.body.decode()).get("paths", [])
            want = [want] if isinstance(want, str) else want
            rows = [self._row(d, d / w) for w in want if (d / w).exists() and self._inside(d, d / w)]
            return self._json(rows)
        if verb == "commits":
            return self._json(
                [{"id": commit, "title": f"Add {rev}", "message": "", "authors": [{"user": "tester"}], "date": EPOCH}]
            )
        return self._error(404, None, f"fake_hub does not serve {verb}")

    def _info(self, repo: Repo, commit: str, d: Path) -> dict:
        blobs = "blobs" in self.query
        sib = []
        for p in repo.files(d):
            s = {"rfilename": str(p.relative_to(d))}
            if blobs:
                s |= {"size": p.stat().st_size, "blobId": Hashes.git(p)}
                if is_lfs(p):
                    s["lfs"] = {"sha256": Hashes.sha256(p), "size": p.stat().st_size, "pointerSize": 134}
            sib.append(s)
        out = {
            "_id": commit[:24],
            "id": repo.id,
            "author": repo.id.split("/")[0],
            "sha": commit,
            "private": False,
            "gated": False,
            "disabled": False,
            "downloads": 0,
            "likes": 0,
            "tags": [],
            "siblings": sib,
            "lastModified": EPOCH,
            "createdAt": EPOCH,
            "usedStorage": 0,
        }
        if repo.kind == "models":
            cfg = d / "config.json"
            out |= {"modelId": repo.id, "library_name": "transformers", "pipeline_tag": "text-generation"}
            if cfg.is_file():
                try:
                    c = json.loads(cfg.read_text())
                    out["config"] = {"architectures": c.get("architectures"), "model_type": c.get("model_type")}
                except ValueError:
                    pass
        return out

    @staticmethod
    def _inside(d: Path, p: Path) -> bool:
        return p.resolve().is_relative_to(d.resolve())

    def _row(self, d: Path, p: Path) -> dict:
        rel = str(p.relative_to(d))
        if p.is_dir():
            return {"type": "directory", "oid": hashlib.sha1(rel.encode()).hexdigest(), "size": 0, "path": rel}
        row = {"type": "file", "oid": Hashes.git(p), "size": p.stat().st_size, "path": rel}
        if is_lfs(p):
            row["lfs"] = {"oid": Hashes.sha256(p), "size": p.stat().st_size, "pointerSize": 134}
        return row

    def _tree(self, d: Path, sub: list[str], commit: str):
        base = d.joinpath(*sub)
        if not base.exists() or not self._inside(d, base):
            return self._error(404, "EntryNotFound", f"{'/'.join(sub)} does not exist on {commit}")
        rec = self.query.get("recursive", ["false"])[0].lower() in ("true", "1")
        rows = [self._row(d, p) for p in sorted(base.rglob("*") if rec else base.iterdir())]
        limit = int(self.query.get("limit", ["1000"])[0])
        start = int(self.query.get("cursor", ["0"])[0] or 0)
        h = {}
        if start + limit < len(rows):
            q = f"?recursive={rec}&limit={limit}&cursor={start + limit}"
            h["Link"] = f'<{self.hub.url}{urlsplit(self.path).path}{q}>; rel="next"'
        return self._json(rows[start : start + limit], headers=h)

    def _file(self, repo: Repo, rev: str, sub: list[str]):
        if self._gated(repo):
            return None
        hit = repo.resolve(rev)
        if hit is None:
            return self._error(404, "RevisionNotFound", f"Invalid rev id: {rev}")
        commit, d = hit
        p = d.joinpath(*sub)
        if not p.is_file() or not self._inside(d, p):
            return self._send(
                404,
                b"Entry not found",
                "text/plain",
                {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found", "X-Repo-Commit": commit},
            )
        h = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if is_lfs(p):
            sha = Hashes.sha256(p)
            h |= {
                "X-Linked-Etag": f'"{sha}"',
                "X-Linked-Size": str(p.stat().st_size),
                "ETag": f'"{Hashes.git(p)}"',
                "Location": f"{self.hub.cdn_url}/_cdn/{sha}/{quote(str(p.relative_to(self.hub.root)))}",
            }
            return self._send(302, b"Found", "text/plain", h)
        return self._bytes(p, h | {"ETag": f'"{Hashes.git(p)}"'})

    def _cdn(self, sha: str, rel: str):
        p = self.hub.root / rel
        if not p.is_file() or not self._inside(self.hub.root, p) or Hashes.sha256(p) != sha:
            return self._send(403, b"Forbidden", "text/plain")
        return self._bytes(p, {"ETag": f'"{sha}"', "Accept-Ranges": "bytes"})

    def _bytes(self, p: Path, headers: dict):
        size = p.stat().st_size
        a, b, status = 0, size - 1, 200
        m = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range") or "")
        if m and size and (m[1] or m[2]):
            if m[1]:
                a, b = int(m[1]), min(int(m[2]) if m[2] else size - 1, size - 1)
            else:
                a = max(0, size - int(m[2]))
            if a > b or a >= size:
                return self._send(416, b"", headers={"Content-Range": f"bytes */{size}"})
            status, headers = 206, headers | {"Content-Range": f"bytes {a}-{b}/{size}"}
        n = b - a + 1 if size else 0
        rules = self.hub.rule(self.path, "truncate", "throttle") if self.command == "GET" else {}
        rate = rules.get("throttle")
        self.send_response(status)
        self.send_header("Content-Type", "application/octet-stream")
        for k, v in headers.items():
            self.send_header(k, v)
        self.send_header("Content-Length", str(n))
        self.end_headers()
        sent = 0
        if self.command == "GET":
            stop = min(n, rules.get("truncate", n))
            piece, started = 1 << 20 if rate is None else 1 << 16, monotonic()
            with p.open("rb") as f:
                f.seek(a)
                while sent < stop and (chunk := f.read(min(piece, stop - sent))):
                    self.wfile.write(chunk)
                    sent += len(chunk)
                    if rate is not None:
                        sleep(max(0.0, started + sent / rate - monotonic()))
            if sent < n:
                self.close_connection = True
        self.hub.note(method=self.command, path=self.path, status=status, bytes=sent, range=self.headers.get("Range"))
        return None
