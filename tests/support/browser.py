"""A page in headless Chromium: a script runs in it, and the page sends back what has become of it."""

import contextlib
import http.server
import os
import queue
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

_OPTIONS = (
    "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --disable-quic --no-first-run --no-proxy-server "
    "--disable-background-networking --disable-component-update --disable-sync --window-size=500,2000 "
    "--disable-renderer-backgrounding --disable-background-timer-throttling --disable-backgrounding-occluded-windows"
)
_SCRIPT = """<script>{
  const send = (path, text) => fetch(path, { method: "POST", body: text });
  const fail = (error) => send("/failed", String((error && error.stack) || error));
  window.addEventListener("error", (event) => fail(event.error || event.message));
  window.addEventListener("unhandledrejection", (event) => fail(event.reason));
  let count = 0;
  setInterval(() => send("/alive", `${++count}: ` + [...document.querySelectorAll(".plot")]
    .map((plot) => plot.dataset.state || "waiting").join(" ")), 5000);
  (async () => { %s })().then(() => send("/done", document.documentElement.outerHTML), fail);
}</script></body>"""


def dom_after(page: Path, script: str, profile: Path, *, timeout: float = 240) -> str:
    """The page's DOM once `script`, the body of an async function, has ended in it: as soon as that is, in real time.

    The page is as it is on disk, but that it may talk to where it came from. A browser that hangs, from which not a
    sign of life comes for a minute, is started anew, twice at most.

    Raises:
        AssertionError: an error in the page or the script, a browser that ended or hung three times, or a page that
            has not finished within `timeout` seconds.
    """
    text = page.read_text()
    closed, end = "default-src 'none';", "</body>"
    assert text.count(closed) == 1
    before, _, after = text.replace(closed, f"{closed} connect-src 'self';").rpartition(end)
    text = before + _SCRIPT.replace("%s", script) + after
    for attempt in range(3):
        what, answer = _run_browser(text.encode(), profile.with_name(f"{profile.name}{attempt}"), timeout)
        if what != "hung":
            break
    assert what == "/done", answer
    return answer


def _run_browser(page: bytes, profile: Path, timeout: float) -> tuple[str, str]:
    """How a browser ends with the page, and what the page says then."""
    answers: queue.Queue[tuple[str, str]] = queue.Queue()
    server = _server(page, answers)
    address = f"http://127.0.0.1:{server.server_port}/"
    command = [str(CHROMIUM), *_OPTIONS.split(), f"--user-data-dir={profile}", address]
    journal = profile.parent / f"{profile.name}.log"
    with journal.open("wb") as log:
        # a session of its own: its children end with it
        browser = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        what, answer = _first_reply(answers, browser, timeout)
    finally:
        with contextlib.suppress(ProcessLookupError):  # all gone already
            os.killpg(browser.pid, signal.SIGKILL)
        browser.wait()
        server.shutdown()
        server.server_close()
    return what, answer if what == "/done" else f"{answer}; the browser: {journal.read_text(errors='replace')[-2000:]}"


def _first_reply(answers: "queue.Queue[tuple[str, str]]", browser: subprocess.Popen, timeout: float) -> tuple[str, str]:
    """The page's answer, its signs of life left out."""
    begin = heard = time.monotonic()
    alive = "nothing"
    while time.monotonic() < begin + timeout:
        try:
            what, answer = answers.get(timeout=0.5)
        except queue.Empty:
            if browser.poll() is not None:
                return "ended", f"it ended with {browser.returncode}"
            if time.monotonic() > heard + 60:
                return "hung", f"no sign of life for 60 s after {alive!r}"
            continue
        if what != "/alive":
            return what, answer
        alive, heard = answer, time.monotonic()
    return "late", f"not finished within {timeout} s; last heard: {alive}"


def _server(page: bytes, answers: "queue.Queue[tuple[str, str]]") -> http.server.ThreadingHTTPServer:
    """Serves the page at / and takes what it posts, in a thread of its own."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path == "/"
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(page if found else b"")

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(204)
            self.end_headers()
            answers.put((self.path, content.decode()))

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
