"""A full or read-only disk under every command that writes: one sentence, and no file is lost.

The disk is a small tmpfs, which only root can mount. The tests at the end of the file need no disk.
"""

import contextlib
import errno
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pandas
import pytest
import yaml

from lit_layers import records
from lit_layers.analyses import Lens
from lit_layers.cli.command_line import COMMANDS
from lit_layers.cli.main import main
from lit_layers.errors import InputError, is_full
from lit_layers.files import durable
from lit_layers.files.durable import naming, replace_file, write_json
from lit_layers.measuring.offline import analyze_series
from lit_layers.series import StepFolders
from tests.cli.test_fit import RECIPE
from tests.cli.test_stopping import FOR_EVER, terminate
from tests.support.forked import run_forked
from tests.support.fuzzing import run_limited
from tests.support.labelled_texts import labelled, saved_gpt2, write_csv
from tests.support.random_text import RandomText
from tests.support.runs import make_run
from tests.support.series_hub import make_step, template
from tests.tasks.tiny_tasks import write_tiny_data

PAGE = 4096
POINTS = Path(__file__).parents[2] / "recipes" / "papers" / "coupling" / "fig1a_points.yaml"


# Each command writes to `disk` and reads files of `home`.
CASES = {
    "fit": "fit --config {home}/recipe.yaml --root {disk}/run",
    "analyze": "analyze {home}/series --config {home}/analyses.yaml --root {disk}/out",
    "intervene": "intervene {home}/model --corpus {home}/shards --root {disk}/out --seeds 0,1 --num_sequences 4 "
    "--num_tokens 16 --tokenizer {home}/shards/tokenizer",
    "mteb": "mteb {home}/model --tasks STSBenchmark,Banking77Classification --folder {home}/data --root {disk}/out",
    "prepare": "prepare --source {home}/text.jsonl --tokenizer bpe:300 --root {disk}/shards",
    "reproduce": "reproduce {home}/points.yaml --root {disk}/figures",
    "correlate": "correlate {home}/models.csv --metric coupling --score score --resamples 100 --root {disk}/out",
    "emerge": "emerge {home}/scores.csv --root {disk}/emergence",
    "select": "select {home}/model --task {home}/songs.csv --rounds 1 --root {disk}/out --export {disk}/b --overwrite",
    "audit": "audit {home}/series --json {disk}/audit.json",
    "report": "report {disk}/run --export {disk}/all.csv",
}


def argv(name: str, home: Path, disk: Path) -> list[str]:
    return CASES[name].format(home=home, disk=disk).split()


def resume_argv(name: str, home: Path, disk: Path) -> list[str]:
    return [*argv(name, home, disk), *(["--resume", "last"] if name == "fit" else [])]


def write_inputs(name: str, home: Path, disk: Path) -> None:
    """Create the folder `disk` and copy the files to it that the command reads there."""
    disk.mkdir(exist_ok=True)
    if name == "report":
        shutil.copytree(home / "run", disk / "run")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Iterator[Path]:
    """The files that the commands read, on another disk.

    The memory that an export takes is measured by tests/models/test_costs.
    """
    home = tmp_path_factory.mktemp("home")
    make_run(home / "run", steps=(0, 1, 2), layers=2)
    shutil.copytree(corpus, home / "shards")
    saved_gpt2(home / "model")
    write_tiny_data(home / "data")
    write_csv(home / "songs.csv", labelled(120))
    recipe = {**RECIPE, "corpus": str(corpus), "resume_every": 1}
    (home / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert run_limited(["fit", "--config", "recipe.yaml", "--root", "series"], home).code == 0
    short = json.loads(json.dumps(RECIPE["analyses"]).replace('"num_tokens": 16', '"num_tokens": 8'))
    measured = {"corpus": str(corpus), "tokenizer": str(corpus / "tokenizer"), "analyses": short}
    (home / "analyses.yaml").write_text(yaml.safe_dump(measured))
    (home / "text.jsonl").write_text("".join(f'{{"text": "Text number {n} of many."}}\n' for n in range(4000)))
    rows = [f"model{n},{n % 3},{0.1 * n},{0.2 * n + n % 2}" for n in range(8)]
    (home / "models.csv").write_text("\n".join(["model,family,coupling,score", *rows]) + "\n")
    scores = [{"step": n, "value": 0.1 * n**0.5, "metric": name} for name in ("a", "b") for n in range(7)]
    pandas.DataFrame(scores).to_csv(home / "scores.csv", index=False)
    shutil.copyfile(POINTS, home / "points.yaml")
    return home


def tmpfs_can_be_mounted(folder: Path) -> bool:
    try:
        Disk(folder, 2**16).close()
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


class Disk:
    """A small file system that can be enlarged or made read-only."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder = folder
        folder.mkdir()
        self._run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs")

    def fill(self) -> None:
        with open(self.folder / "filler", "wb", buffering=0) as filler, contextlib.suppress(OSError):
            while True:
                filler.write(bytes(PAGE))

    def remount(self, options: str) -> None:
        self._run("mount", "-o", f"remount,{options}")

    def close(self) -> None:
        self._run("umount")

    def _run(self, *words: str) -> None:
        subprocess.run([*words, str(self.folder)], check=True)


def tmpfs_bytes(folder: Path) -> int:
    """Return how many bytes the files occupy on a tmpfs."""
    return sum(-(-path.stat().st_size // PAGE) * PAGE for path in folder.rglob("*") if path.is_file())


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def names_without_digests(folder: Path) -> set[str]:
    """Names of files without the digests of values of prompts, which differ between trainings."""
    return {re.sub(r"-[0-9a-f]{16}(?=\.safetensors$)", "", name) for name in files(folder)}


def read_measurements(folder: Path) -> dict[str, list[records.Measurement]]:
    found = {path: records.read(path) for path in folder.rglob("measurements.jsonl")}
    return {str(path.relative_to(folder)): [replace(m, seconds=0.0) for m in lines] for path, lines in found.items()}


def successful_numbers(found: dict[str, list[records.Measurement]]) -> dict[str, list[tuple]]:
    """Records of measurements without an error, in an order that does not depend on when they were written."""
    lines = {name: [(m.step, m.analysis, m.records) for m in ms if m.error is None] for name, ms in found.items()}
    return {name: sorted(each, key=lambda line: (line[0] or 0, line[1])) for name, each in lines.items()}


@pytest.mark.nightly
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_disk_is_reported_in_one_sentence_and_no_file_is_lost(name: str, home: Path, tmp_path: Path) -> None:
    if not tmpfs_can_be_mounted(tmp_path / "tried"):
        pytest.skip("no tmpfs can be mounted here: needs Linux and root")
    undisturbed = tmp_path / "undisturbed"
    write_inputs(name, home, undisturbed)
    before = tmpfs_bytes(undisturbed)
    assert run_limited(argv(name, home, undisturbed), tmp_path).code == 0
    written = tmpfs_bytes(undisturbed) - before
    for share in (0.0, 0.4, *((0.1, 0.7) if "analyze" in name or name == "fit" else ()), None):  # None: read-only
        size = before + (written if share is None else int(share * written)) + PAGE * 3
        with contextlib.closing(Disk(tmp_path / f"disk{share}", size)) as disk:
            write_inputs(name, home, disk.folder)
            given = files(disk.folder)
            if share is None:
                disk.remount("ro")
            elif share == 0:
                disk.fill()
            outcome = run_limited(argv(name, home, disk.folder), tmp_path)
            reason = "read-only file system" if share is None else "no space left on device"
            about = f"{name} at {share}: {outcome.code}\n{outcome.output}"
            hits = [line for line in outcome.output.splitlines() if reason in line.lower() and str(disk.folder) in line]
            refusals = [line for line in outcome.output.splitlines() if line.startswith("lit-layers ")]
            assert "Traceback" not in outcome.output, about
            if outcome.code == 0:  # everything fitted, except a page of a training, which `report` can draw
                assert share, about
                assert not refusals, about
            else:
                assert hits, about
                assert outcome.code == 2 or (outcome.code, name) == (1, "mteb"), about  # one task can fail alone
                assert len(refusals) == (outcome.code == 2), about
            found = files(disk.folder)
            assert {path: found[path] for path in given} == given, about
            kept = read_measurements(disk.folder)  # every line is readable
            disk.remount("rw,size=400m")
            again = run_limited(resume_argv(name, home, disk.folder), tmp_path)
            assert again.code == 0, f"{about}\n{again.output}"
            now = read_measurements(disk.folder)
            assert all(now[path][: len(lines)] == lines for path, lines in kept.items()), about
            assert successful_numbers(now) == successful_numbers(read_measurements(undisturbed)), about
            assert names_without_digests(disk.folder) >= names_without_digests(undisturbed), about


@pytest.mark.nightly
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", ["select", "correlate", "emerge", "report", "prepare", "reproduce"])
def test_a_command_that_sigterm_ends_during_a_write_loses_no_file(name: str, home: Path, tmp_path: Path) -> None:
    """The signal comes while the command writes its first or third file, as on a slow disk."""
    undisturbed = tmp_path / "undisturbed"
    write_inputs(name, home, undisturbed)
    assert run_forked(lambda: main(argv(name, home, undisturbed))) == 0
    complete = files(undisturbed)
    for writes in (1, 3):
        folder, calls = tmp_path / str(writes), []
        write_inputs(name, home, folder)
        given = files(folder)

        def slow(path: Path, calls: list = calls, writes: int = writes) -> None:
            calls.append(path)
            if len(calls) == writes:
                terminate(0.1)
                time.sleep(FOR_EVER)

        def slow_command(slow: Callable = slow, folder: Path = folder) -> int:  # changes `durable` only in the fork
            durable.sync = slow
            return main(argv(name, home, folder))

        assert run_forked(slow_command) == (143 if writes <= {"prepare": 2}.get(name, 3) else 0)  # number of files
        left = files(folder)
        tables = [path for path in left if path.endswith((".csv", ".parquet"))]
        assert {path: left[path] for path in given} == given
        assert all(left[path] == complete[path] for path in tables if path in complete), "a table is whole or not there"
        assert name == "prepare" or not [path for path in left if ".draft" in path]  # it finds its drafts by name
        assert run_forked(lambda folder=folder: main(resume_argv(name, home, folder))) == 0
        assert files(folder).keys() >= complete.keys()


def test_an_error_of_a_write_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The original error names no file or a draft, and libraries written in Rust raise their own errors."""
    path = tmp_path / "numbers.json"
    monkeypatch.setattr("lit_layers.files.durable.sync", raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    for write in (write_json, replace_file):
        with pytest.raises(OSError, match="No space left") as raised:
            write(path, "1")
        assert raised.value.filename == str(path)
    with pytest.raises(OSError, match="No space left") as raised, naming(path):
        raise ValueError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, str(path))
    with pytest.raises(ValueError, match="^header too large$"), naming(path):
        raise ValueError("header too large")
    with pytest.raises(OSError, match="Input/output") as named, naming(path):
        raise OSError(errno.EIO, "Input/output error", "weights")
    assert named.value.filename == "weights", "what is read inside is told as it is"


def test_a_full_disk_is_recognized_by_the_cause_of_an_error() -> None:
    def input_error(error: OSError) -> InputError:
        sentence = InputError("cannot write")
        sentence.__cause__ = error
        return sentence

    assert is_full(input_error(OSError(errno.ENOSPC, "")))
    assert is_full(OSError(errno.EROFS, ""))
    assert not is_full(input_error(OSError(errno.ENOENT, "")))
    assert not is_full(None)


def test_a_full_disk_ends_a_series_at_its_first_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other errors of a checkpoint are recorded, and the next checkpoint is measured."""
    tried = []

    def full(*_: object) -> None:
        tried.append(True)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    model = template(tmp_path / "template")
    for step in (0, 1, 2):
        make_step(model, tmp_path / "series" / f"step-{step:09d}", step / 16)
    monkeypatch.setattr("lit_layers.records.write_line", full)
    with pytest.raises(InputError, match="cannot write .*: no space left on device"):
        analyze_series(StepFolders(tmp_path / "series"), [Lens(batches=RandomText(tokens=6))], root=tmp_path / "out")
    assert len(tried) == 1


def test_a_step_of_a_paper_that_cannot_write_reports_it_and_the_next_step_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    recipe = yaml.safe_load(POINTS.read_text())
    recipe["steps"] = [{"correlate": {"data": "published", "resamples": 100}}] * 2
    (tmp_path / "points.yaml").write_text(yaml.safe_dump(recipe))
    for number, why in ((errno.ENOSPC, "cannot write correlation.csv: no space left"), (errno.EACCES, "corr")):
        error = OSError(number, os.strerror(number), "correlation.csv")
        monkeypatch.setattr("lit_layers.cli.verbs.correlate.write_models", raising(error))
        assert main(["reproduce", str(tmp_path / "points.yaml"), "--root", str(tmp_path / "out")]) == 2
        errors = [
            line for line in capsys.readouterr().err.splitlines() if line.startswith("lit-layers correlate: error")
        ]
        assert len(errors) == 2
        assert errors[0].startswith(f"lit-layers correlate: error: {why}")


def raising(error: Exception) -> Callable[..., None]:
    def fails(*_: object) -> None:
        raise error

    return fails
