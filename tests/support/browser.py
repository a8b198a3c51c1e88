"""Open a page in headless Chromium, run a script in it, and get the resulting DOM."""

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
    """Return the page's DOM after `script`, the body of an async function, has ended in the page.

    The page is served as it is on disk, except that it may send requests to its own server. A browser that sends no
    heartbeat for a minute is restarted, at most twice.

    Raises:
        AssertionError: If the page or the script has an error, the browser exits, it hangs three times, or the page
            is not finished after `timeout` seconds.
    """
    text = page.read_text()
    closed, end = "default-src 'none';", "</body>"
    assert text.count(closed) == 1
    before, _, after = text.replace(closed, f"{closed} connect-src 'self';").rpartition(end)
    text = before + _SCRIPT.replace("%s", script) + after
    for attempt in range(3):
        result, answer = _run_browser(text.encode(), profile.with_name(f"{profile.name}{attempt}"), timeout)
        if result != "hung":
            break
    assert result == "/done", answer
    return answer


def _run_browser(page: bytes, profile: Path, timeout: float) -> tuple[str, str]:
    """Return how the run ended ("/done", "/failed", "ended", "hung" or "late"), and the DOM or the error."""
    answers: queue.Queue[tuple[str, str]] = queue.Queue()
    server = _server(page, answers)
    address = f"http://127.0.0.1:{server.server_port}/"
    command = [str(CHROMIUM), *_OPTIONS.split(), f"--user-data-dir={profile}", address]
    journal = profile.parent / f"{profile.name}.log"
    with journal.open("wb") as log:
        # its own session, so that killing the group also ends its children
        browser = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        result, answer = _first_reply(answers, browser, timeout)
    finally:
        with contextlib.suppress(ProcessLookupError):  # the processes have already ended
            os.killpg(browser.pid, signal.SIGKILL)
        browser.wait()
        server.shutdown()
        server.server_close()
    return result, answer if result == "/done" else f"{answer}; browser: {journal.read_text(errors='replace')[-2000:]}"


def _first_reply(answers: "queue.Queue[tuple[str, str]]", browser: subprocess.Popen, timeout: float) -> tuple[str, str]:
    """Return the page's first message that is not a heartbeat."""
    begin = heard = time.monotonic()
    alive = "nothing"
    while time.monotonic() < begin + timeout:
        try:
            path, answer = answers.get(timeout=0.5)
        except queue.Empty:
            if browser.poll() is not None:
                return "ended", f"it ended with {browser.returncode}"
            if time.monotonic() > heard + 60:
                return "hung", f"no sign of life for 60 s after {alive!r}"
            continue
        if path != "/alive":
            return path, answer
        alive, heard = answer, time.monotonic()
    return "late", f"not finished within {timeout} s; last heard: {alive}"


def _server(page: bytes, answers: "queue.Queue[tuple[str, str]]") -> http.server.ThreadingHTTPServer:
    """Start a server in a thread: it serves the page at / and queues what the page posts."""

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
            """Log nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
