"""Commands on a run that lies on a store: an S3 server on this machine."""

import contextlib
import hashlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import s3fs
import yaml

from lit_layers import records
from lit_layers.cli import DIVERGED, TERMINATED
from lit_layers.cli.main import main
from lit_layers.cli.options import Recipe
from lit_layers.cli.remote_roots import in_local_copies
from lit_layers.cli.verbs.analyze import analyze
from lit_layers.cli.verbs.audit import audit
from lit_layers.cli.verbs.select import select
from lit_layers.errors import InputError, RunLostError
from lit_layers.files import remote_copy, remote_runs, run_lock
from lit_layers.files.remote_store import Claim, Store
from lit_layers.training.checkpoints import saved_steps
from tests.cli.test_fit import RECIPE
from tests.support.forked import run_forked
from tests.support.measured_series import of_texts
from tests.support.runs import make_run
from tests.support.s3_server import s3_server
from tests.support.series_hub import make_series, template
from tests.support.undrawn import leave_undrawn

pytestmark = [pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """A function that moves this process to another machine: what was fetched is not there."""

    def move(name: str) -> None:
        monkeypatch.setenv("LIT_LAYERS_REMOTE", str(tmp_path / name))

    for name, seconds in {"LEASE": 4.0, "HEARTBEAT": 0.3, "LOOK": 0.05}.items():
        monkeypatch.setattr(remote_runs, name, seconds)
    monkeypatch.setattr(remote_copy, "SETTLED", 0.05)
    move("machine")
    return move


LOGS = ("measurements.jsonl", "metrics.jsonl")


def left(root: Path) -> dict:
    """All that must not depend on where a run lies and how often it was killed."""
    return {
        "weights": {
            step: hashlib.sha256((root / f"step-{step:09d}" / "model.safetensors").read_bytes()).hexdigest()
            for step in saved_steps(root)
        },
        "losses": [(row["step"], row["train/loss"]) for row in records.rows(root / "metrics.jsonl")],
        "measured": [(m.step, m.analysis, m.error, m.records) for m in records.read(root / "measurements.jsonl")],
    }


@pytest.mark.soak
@pytest.mark.usefixtures("no_page")
def test_a_training_killed_and_gone_on_with_elsewhere_leaves_on_the_store_what_a_local_one_does(
    bucket, corpus, tmp_path, machine, capfd
):
    recipe, url = tmp_path / "recipe.yaml", f"{bucket}/trained/run"
    trainer = {**RECIPE["trainer"], "max_steps": 12}
    recipe.write_text(yaml.safe_dump({**RECIPE, "corpus": str(corpus), "trainer": trainer, "resume_every": 2}))
    fit = ["fit", "--config", str(recipe), "--resume", "last", "--root"]
    assert run_forked(lambda: main([*fit, str(tmp_path / "run")])) == 0
    store = Store(url)
    for name in ("first", "second"):
        machine(name)
        before = {*store.listing()}
        code = run_forked(
            lambda: main([*fit, url]),
            when=lambda before=before: any("meta.json" in each for each in {*store.listing()} - before),
        )
        assert code in (-signal.SIGKILL, 0)
    machine("last")
    assert run_forked(lambda: main([*fit, url])) == 0
    assert left(remote_runs.read(url, remote_copy.checkpoints)) == left(tmp_path / "run")

    machine("of a reader")
    assert main(["analyze", url]) == 0
    assert "0 measured, 14 were known" in capfd.readouterr().out
    assert main(["report", url, "--export", str(tmp_path / "numbers.csv")]) == 0
    assert "report.html" in store.listing()
    assert len(records.frame(url)) == len(records.frame(tmp_path / "run")) > 0
    said = " ".join(store.read(name).decode(errors="replace") for name in store.listing() if "safetensors" not in name)
    for secret in (os.environ["AWS_SECRET_ACCESS_KEY"], os.environ["AWS_ACCESS_KEY_ID"]):
        assert secret not in said + capfd.readouterr().err


def test_a_checkpoint_of_a_run_is_fetched_alone_with_the_numbers_and_the_story_of_its_run(bucket, tmp_path):
    """Without them `analyze` would not know its corpus, nor `select --by` what was measured of it; nothing is written
    where a model lies.
    """
    url = f"{bucket}/steps/run"
    run = make_run(tmp_path / "run", steps=(0, 1), analyses=("trajectory",))
    (run / "run.json").write_text("{}")
    for folder in ("step-000000000", "step-000000001", "resume/step-000000001"):
        (run / folder).mkdir(parents=True, exist_ok=True)
        (run / folder / "config.json").write_text("{}")
    for path in (each for each in run.rglob("*") if each.is_file()):
        Store(url).put(path, path.relative_to(run).as_posix())
    there, copy = Store(url).listing(), remote_copy.LocalCopy(url)
    for verb in (analyze, audit, select):
        recipe = Recipe(verb, [f"{url}/step-000000001", *(["--task", "x"] if verb is select else [])])
        with in_local_copies(recipe, {}):
            for options in (recipe.options, recipe.read()):
                named = options.series if verb is audit else options.model
                assert Path(named) == copy.folder / "step-000000001"
        assert {*copy.files()} == {*LOGS, "run.json", "step-000000001/config.json"}
    assert Store(url).listing() == there
    recipe = Recipe(analyze, ["--root", url, url])
    with in_local_copies(recipe, {}):
        assert str(recipe.options.root) == recipe.options.model == str(copy.folder)
    assert {*there} - {*copy.files()} == {"resume/step-000000001/config.json"}


def test_a_model_on_a_store_is_known_by_its_address_on_every_machine(bucket, tmp_path, machine, capsys):
    """Local copies lie elsewhere on each, and were taken for another model's."""
    url = f"{bucket}/model/run"
    run = make_series(template(tmp_path / "model", vocab_size=300), tmp_path / "run", (0, 4), name="step-{:09d}")
    for path in (each for each in run.glob("step-*/*") if each.is_file()):
        Store(url).put(path, path.relative_to(run).as_posix())
    command = ["analyze", url, "--config", str(of_texts(tmp_path)), "--root", str(tmp_path / "out")]
    assert main([*command, "--steps", "[0]"]) == 0
    machine("another")
    assert main([*command, "--steps", "[4]"]) == 0
    assert "1 measured, 0 were known" in capsys.readouterr().out
    measured = records.read(tmp_path / "out" / LOGS[0])
    assert [m.provenance["checkpoint"] for m in measured] == [f"{url}/step-{step:09d}" for step in (0, 4)]
    one = [*command[:1], f"{url}/step-000000004", *command[2:-1], str(tmp_path / "new"), "--untrained", "3"]
    assert main(one) == 0
    (new,) = records.read(tmp_path / "new" / LOGS[0])
    assert new.run == f"{url}/step-000000004@untrained-3"


def test_a_damaged_line_is_refused_with_the_address_and_the_local_copy(bucket, tmp_path, capsys):
    url, lines = f"{bucket}/damaged/run", tmp_path / "measurements.jsonl"
    lines.write_text('{"run": 1}\n{}\n')
    Store(url).put(lines, lines.name)
    assert main(["report", url]) == 2
    said = capsys.readouterr().err
    assert f"error: {url}/measurements.jsonl, line 1: " in said
    assert f"; {url} is worked on in {remote_copy.LocalCopy(url).folder}\n" in said


def test_what_reads_a_run_writes_its_page_there_and_nothing_else(bucket, tmp_path, capsys, monkeypatch):
    leave_undrawn(monkeypatch)
    url, store = f"{bucket}/read/run", Store(f"{bucket}/read/run")
    run = make_run(tmp_path / "run", steps=(0, 1, 2), analyses=("trajectory",))
    for path in (each for each in run.rglob("*") if each.is_file()):
        store.put(path, path.relative_to(run).as_posix())
    there = store.listing()
    assert main(["report", url]) == 0
    assert capsys.readouterr().out == f"{url}/report.html\n", "and not the local copy's paths"
    assert {*store.listing()} - {*there} == {"report.html"}
    assert {name: store.listing()[name] for name in there} == there
    assert "secret" not in capsys.readouterr().err


REFUSED = [
    (["report", "s3://no-such-bucket/run"], "s3://no-such-bucket/run: no such bucket or object"),
    (["analyze", "MODEL", "--root", "s3://no-such-bucket/run"], "s3://no-such-bucket/run: no such bucket or object"),
    (["report", "BUCKET/nothing"], "nothing is there"),
    (["report", "nowhere://x/y"], "nowhere is no protocol that fsspec knows"),
    (["report", "gs://x/y"], "its package is missing: pip install gcsfs"),
    (["report", "smb://x/y"], 'its package is missing: SMB requires "smbprotocol"'),
    (["report", "https://x/y"], "https is no store that can be written"),
    (["report", "file:///x/y"], "file is no store that can be written: name a folder"),
    (["analyze", "MODEL", "--root", "memory://x/y"], "memory is no store that can be written"),
    (["report", "s3://key:word@x/y"], "keys belong in the environment"),
    (["report", "BUCKET/run/.."], "expected a bucket and a folder, without . and .."),
    (["watch", "BUCKET/run"], "watch needs a local folder"),
    (["report", "RUN", "--out", "BUCKET/page.html"], "out: expected a local path, got BUCKET/page.html"),
    (["analyze", "MODEL", "--config", "RECIPE"], "root: expected a local path, got s3://bucket/run"),
    (["analyze", "MODEL", "--root", "BUCKET/run", "--shard", "0/2"], "shard: one process writes a run on a store"),
    (["fit", "quickstart/gpt2", "--root", "BUCKET/run", "--measure", "async"], "measure: async writes into a local"),
    (["fit", "quickstart/gpt2", "--root", "BUCKET/run", "--if-exists", "overwrite"], "if_exists: no run on a store"),
]


@pytest.mark.parametrize(("words", "sentence"), REFUSED)
def test_what_cannot_be_is_said_in_a_sentence(words, sentence, bucket, tmp_path, capsys):
    (tmp_path / "recipe.yaml").write_text("root: s3://bucket/run\n")
    names = {"BUCKET": bucket, "RUN": str(tmp_path), "RECIPE": str(tmp_path / "recipe.yaml")}
    for name, value in names.items():
        words, sentence = [word.replace(name, value) for word in words], sentence.replace(name, value)
    assert main(words) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert "word" not in said
    assert said.count("\n") == 1


def test_a_task_of_slurm_that_hands_out_by_ray_is_one_process(bucket, tmp_path, monkeypatch):
    """As `srun ray symmetric-run` starts the command: on the first of its nodes alone."""
    for name, value in {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}.items():
        monkeypatch.setenv(name, value)
    words = ["--root", f"{bucket}/slurm/run"]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("engine: ray\n")
    for engine in (["--engine", "ray"], ["--config", str(recipe)], [f"--config={recipe}"], ["-c", str(recipe)]):
        with in_local_copies(command := Recipe(analyze, [*words, *engine]), os.environ):
            assert Path(command.options.root).is_relative_to(tmp_path)
    for engine in ([], ["--config", str(recipe), "--engine", "process"]):
        command = in_local_copies(Recipe(analyze, [*words, *engine]), os.environ)
        with pytest.raises(InputError, match="4 were started"), command:
            pass


def test_a_recipe_that_a_shell_hands_over_is_read_once_and_whole(bucket, tmp_path):
    reader, writer = os.pipe()
    os.write(writer, b"engine: ray\ncorpus: ${root}/texts\n")
    os.close(writer)
    recipe = Recipe(analyze, ["--root", f"{bucket}/piped/run", "--config", f"/dev/fd/{reader}"])
    with in_local_copies(recipe, {}):
        assert recipe.options.engine == "ray"
        assert recipe.options.corpus == f"{recipe.options.root}/texts"
        assert Path(recipe.options.root).is_relative_to(tmp_path)
    os.close(reader)


def test_a_place_on_a_store_is_the_value_that_the_commands_parser_takes_it_for(bucket, tmp_path):
    """A word behind a flag is no value of that flag, and one behind an option is; what a recipe names stays."""
    url = f"{bucket}/places/run"
    Store(url).write("run.json", b"{}")
    recipe = Recipe(analyze, ["--plan", url])
    with in_local_copies(recipe, {}):
        assert Path(recipe.options.model).is_relative_to(tmp_path)
    (tmp_path / "recipe.yaml").write_text(f"model: {url}\n")
    for words in (["--corpus", url], ["--config", str(tmp_path / "recipe.yaml")]):
        recipe = Recipe(analyze, words)
        with in_local_copies(recipe, {}):
            assert url in (recipe.options.model, recipe.options.corpus)


def test_what_is_refused_without_the_store_is_refused_before_anything_is_fetched(bucket, monkeypatch, capsys):
    monkeypatch.setattr(Store, "listing", lambda self: pytest.fail("it asked the store"))
    assert main(["analyze", "--root", f"{bucket}/unasked/run", "--kept_mb", "many"]) == 2
    assert "kept_mb" in capsys.readouterr().err


def test_what_is_printed_can_be_kept_by_others_who_replace_write(bucket, capsys):
    """As `wandb.sdk.lib.console_capture` does when it is imported."""
    kept = []
    recipe = Recipe(analyze, ["--root", f"{bucket}/said/run"])
    with in_local_copies(recipe, {}):
        folder, write = str(recipe.options.root), sys.stdout.write
        sys.stdout.write = lambda text: (kept.append(text), write(text))[1]
        sys.stdout.write(folder)
    assert kept == [folder]
    assert capsys.readouterr().out == f"{bucket}/said/run"


def test_objects_that_are_named_beyond_the_folder_are_no_files(bucket, tmp_path):
    store, outside = Store(f"{bucket}/hostile/run"), tmp_path / "outside"
    names = [str(outside), "../outside", "values/../../outside", "values//outside", "a/./b", "values/a\\b", "a\x1bb"]
    for name in ("run.json", "values/step-1/x.parquet", *names):
        with contextlib.suppress(InputError):  # a server may refuse some
            store.write(name, b"{}")
    assert {*store.listing()} == {"run.json", "values/step-1/x.parquet"}
    with remote_runs.written(store.url) as root:
        assert {path.name for path in root.rglob("*") if path.is_file()} == {"run.json", "x.parquet"}
    assert not outside.exists()
    assert store._files.cat_file(f"{store.url}/{outside}") == b"{}"  # it was there


def test_what_is_larger_than_the_disk_is_not_copied_and_no_log_is_held_in_memory(bucket, tmp_path, capsys, monkeypatch):
    make_run(tmp_path / "run", steps=(0, 1), layers=2)
    url, log = f"{bucket}/large/run", (tmp_path / "run" / "measurements.jsonl").read_bytes()
    store, middle, end = Store(url), log.index(b"\n") + 1, log.rindex(b"\n", 0, -1) + 1
    store.write("measurements.jsonl", log[:middle])
    for start, stop in ((0, middle), (middle, end), (end, len(log)), (len(log) + 9, None)):
        store.write(
            f"measurements.jsonl.parts/{start:012d}.jsonl", log[start // 2 : stop] if start == 0 else log[start:stop]
        )

    def read(self, name: str, size: int = 0) -> bytes:
        return whole(self, name, size) if name.startswith(".writer/") else pytest.fail(f"{name} is held in memory")

    whole = Store.read
    monkeypatch.setattr(Store, "read", read)
    assert (remote_runs.read(url) / "measurements.jsonl").read_bytes() == log
    disk = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: disk._replace(free=remote_copy.ROOM + len(log) - 1))
    monkeypatch.setenv("LIT_LAYERS_REMOTE", str(tmp_path / "other"))
    assert main(["report", url]) == 2
    size = f"{len(log) / 1e9:,.1f} GB"
    assert f"{url}: {size} of it are to be copied, and {tmp_path}/other has room for {size}: name a larger" in (
        capsys.readouterr().err
    )


def test_claims_are_foreign(bucket, monkeypatch):
    store = Store(f"{bucket}/claims/run")
    store.write(".writer/000007.json", json.dumps({"number": 1, "token": "x", "holder": "a\x1b[31mb\n"}).encode())
    assert store.newest_claim() == Claim(7, "x", holder="a[31mb")
    store.write(".writer/000008.json", b"[" * 100_000)
    assert store.newest_claim() == Claim(8, "")
    store.write(".writer/999999.json", b"{}")
    assert store.claim(1_000_000, "mine") == store.newest_claim()
    with monkeypatch.context() as patched:
        store.write(".writer/2000000.json", bytes(2**17))
        patched.setattr(store, "read", lambda *_: pytest.fail("however large, it is read"))
        assert store.newest_claim() == Claim(2_000_000, "")
    store.write(".writer/3000000.json", b"{}")

    def refuse(name: str) -> bytes:
        raise FileNotFoundError(name)

    monkeypatch.setattr(store, "read", refuse)
    with pytest.raises(InputError, match="listed and cannot be read"):
        store.newest_claim()


def test_without_permission_nothing_is_begun(bucket, capsys, monkeypatch):
    async def refuse(*_: object, **__: object) -> None:
        raise PermissionError("Access Denied for secret-of-the-tests")

    monkeypatch.setattr(s3fs.S3FileSystem, "_pipe_file", refuse)
    s3fs.S3FileSystem.clear_instance_cache()  # which holds on to the method
    assert main(["analyze", "MODEL", "--root", f"{bucket}/denied/run"]) == 2
    s3fs.S3FileSystem.clear_instance_cache()
    assert capsys.readouterr().err == f"lit-layers analyze: error: {bucket}/denied/run: no permission\n"


@pytest.mark.parametrize(
    ("ended", "code"),
    [(TERMINATED, TERMINATED), *(pytest.param(*of, marks=pytest.mark.soak) for of in ((DIVERGED, DIVERGED), (0, 1)))],
)
def test_a_command_whose_store_is_away_at_its_end_has_its_own_exit_code_and_without_one_1(
    ended, code, bucket, monkeypatch, capfd
):
    """A scheduler begins a preempted run again, which sends the rest, and gives up one that failed."""

    def run(recipe: Recipe) -> int:
        make_run(Path(recipe.options.root), steps=(0,), analyses=("coupling",))
        for name in ("put", "write"):
            monkeypatch.setattr(Store, name, away)
        return ended

    def away(self, *_: object, **__: object) -> None:
        raise InputError(f"{self.url}: it cannot be reached")

    monkeypatch.setattr("lit_layers.cli.options.run", run)
    monkeypatch.setattr(remote_runs, "PATIENCE", 0.1)
    url = f"{bucket}/away/{ended}"
    assert main(["fit", "quickstart/gpt2", "--root", url]) == code
    assert f"lit-layers fit: error: {url}: it cannot be reached; not all could be sent: it is in " in (
        capfd.readouterr().err
    )


def test_one_process_writes_a_run_and_one_that_lost_it_stops(bucket, machine):
    url = f"{bucket}/one/run"
    with remote_runs.written(url):
        machine("other")
        with pytest.raises(InputError, match="is being written by"), remote_runs.written(url):
            pass

    def write_on() -> None:
        with remote_runs.written(url) as root, run_lock.writing(root):
            assert Store(url).claim(99, "another")
            while not remote_runs._writers[0].lost:
                time.sleep(0.01)
            make_run(root)

    with pytest.raises(RunLostError, match="writes there now"):
        write_on()
    assert not [name for name in Store(url).listing() if "measurements" in name]


def test_what_a_user_deletes_in_the_local_copy_stays_on_the_store(bucket, tmp_path):
    url = f"{bucket}/kept/run"
    with remote_runs.written(url) as root:
        make_run(root)
    names = {*Store(url).listing()}
    assert {"measurements.jsonl", "metrics.jsonl", "run.json"} <= names
    (root / "run.json").unlink()
    with remote_runs.written(url) as root:
        assert json.loads((root / "run.json").read_text())["run"] == "quickstart"
    shutil.rmtree(root)
    with remote_runs.written(url) as root:
        assert (root / "measurements.jsonl").is_file()
    assert {*Store(url).listing()} ^ names == {".writer/000001.json", ".writer/000003.json"}
