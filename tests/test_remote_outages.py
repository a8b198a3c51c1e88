"""A store that goes away while a run is written there, and comes back or does not."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from lit_layers.files.remote_store import Store
from tests.support.away import Way
from tests.support.s3_server import s3_server

# Writes a line whenever it is told to; the time limits are a tenth and less.
WRITER = """
import logging, sys
from lit_layers.errors import RunLostError
from lit_layers.files import remote_runs, remote_store
logging.basicConfig(format="%(message)s")
remote_runs.LEASE, remote_runs.HEARTBEAT, remote_runs.LOOK, remote_runs.PATIENCE = 5.0, 0.25, 0.05, 3.0
try:
    with remote_runs.written(sys.argv[1]) as root:
        remote_store.ANSWER, remote_store.LISTING = 2.0, 2.0
        root.mkdir(exist_ok=True)
        print(root, flush=True)
        for line in sys.stdin:
            with open(root / "metrics.jsonl", "a") as file:
                file.write(line)
            remote_runs.wrote(root / "metrics.jsonl")
except RunLostError as error:
    sys.exit(str(error))
"""
# The short form: commands whose store is away at their end, in tests/cli/test_remote_roots.py.
pytestmark = [pytest.mark.soak, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture
def way(bucket) -> Way:
    return Way(int(os.environ["AWS_ENDPOINT_URL"].rpartition(":")[2]))


class Run:
    """A writer in a process of its own, which reaches the store by `way`."""

    def __init__(self, url: str, folder: object, way: Way) -> None:
        self.url, self.store = url, Store(url)
        environment = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{way.port}", "LIT_LAYERS_REMOTE": str(folder)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", WRITER, url],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout
        self.root = self.process.stdout.readline().strip()

    def write(self, *steps: int) -> None:
        assert self.process.stdin
        self.process.stdin.writelines(json.dumps({"step": step}) + "\n" for step in steps)
        self.process.stdin.flush()

    def wait_until_sent(self, step: int) -> None:
        while str(step) not in self.sent():
            assert self.process.poll() is None
            time.sleep(0.1)

    def wait_until_said(self, words: str) -> None:
        assert self.process.stderr
        while words not in (line := self.process.stderr.readline()):
            assert line

    def stop(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()

    def end(self) -> tuple[int, str]:
        """Its exit code, and what it said."""
        self.stop()
        with self.process:
            assert self.process.stderr
            said = self.process.stderr.read()
        return self.process.returncode, said

    def sent(self) -> str:
        parts = sorted(name for name in self.store.listing() if name.startswith("metrics.jsonl"))
        return "".join(self.store.read(name).decode() for name in parts)


@pytest.mark.parametrize("silent", [True, False])
def test_a_store_that_was_away_has_all_afterwards(bucket, tmp_path, way, silent):
    run = Run(f"{bucket}/back/{silent}", tmp_path, way)
    run.write(1)
    run.wait_until_sent(1)
    with way.away(silent=silent):
        run.write(2)
        run.wait_until_said("the run goes on in")
        time.sleep(1)
    run.write(3)
    run.wait_until_sent(3)
    with way.away(silent=silent):
        run.write(4)
        run.stop()
        run.wait_until_said("what is left is in")
    code, said = run.end()
    assert code == 0, said
    assert run.sent() == "".join(f'{{"step": {step}}}\n' for step in (1, 2, 3, 4))
    assert {*run.store.listing()} == {"metrics.jsonl", ".writer/000001.json"}
    assert json.loads(run.store.read(".writer/000001.json"))["is_over"]


@pytest.mark.parametrize("silent", [False, True])
def test_a_store_that_stays_away_ends_the_run_with_a_sentence_and_the_same_command_sends_the_rest(
    bucket, tmp_path, way, silent
):
    run = Run(f"{bucket}/away/{silent}", tmp_path, way)
    with way.away(silent=silent):
        run.write(1)
        code, said = run.end()
    assert code == 1, said
    last = said.splitlines()[-1]
    assert last.startswith(f"{run.url}: it ")
    assert last.endswith(f"; not all could be sent: it is in {run.root}, and the same command sends it")
    assert "Traceback" not in said
    assert run.sent() == ""
    assert Run(run.url, tmp_path, way).end()[0] == 0
    assert run.sent() == '{"step": 1}\n'
