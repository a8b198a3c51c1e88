import glob
import json
import logging
import os
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from lit_layers import records
from lit_layers.cli.main import main
from lit_layers.errors import InputError
from lit_layers.figures.theme import EDGE
from lit_layers.files import run_lock
from lit_layers.records import Record, ScalarLog
from lit_layers.report import WandbMirror, wandb_mirror
from lit_layers.report.logged_numbers import end_of_run
from lit_layers.report.wandb_mirror import LAG, NOTES, save_workspace, workspace_of
from tests.support.forked import run_forked
from tests.support.read_wandb import Run, read_finished
from tests.support.runs import make_run, measurement
from tests.support.undrawn import leave_undrawn

wandb = pytest.importorskip("wandb")
AXIS = "trainer/global_step"
RUN_ID = "a1b2c3d4"
# W&B leaves temporary folders of media to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:Implicitly cleaning up:ResourceWarning")


@pytest.fixture(autouse=True)
def undrawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "drawn" not in request.node.name:
        leave_undrawn(monkeypatch)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", steps=(0, 1, 2, 4), layers=2)


def folders(root: Path) -> list[Path]:
    found = (root / "wandb").glob("*run-*-*")
    return sorted(found, key=lambda folder: folder.name.removeprefix("offline-"))


def read_back(root: Path) -> Run:
    return read_finished(root)[RUN_ID]


def opened(root: Path, mirror: WandbMirror | None = None) -> WandbMirror:
    mirror = mirror or WandbMirror(mode="offline")
    mirror.open(root, run_id=RUN_ID, config={"lr": 1e-3})
    return mirror


def mirror_all(root: Path, mirror: WandbMirror | None = None) -> Run:
    opened(root, mirror).finish()
    return read_back(root)


def log_losses(root: Path, losses: dict[int, float]) -> None:
    log = ScalarLog(root / "metrics.jsonl")
    for step, loss in losses.items():
        log.log(step, {"train/loss": loss})
    log.close()


@pytest.mark.slow
def test_opening_sends_every_point_of_the_files_once_over_steps(root: Path) -> None:
    run = mirror_all(root, WandbMirror(project="here", mode="offline", scalars="all"))
    assert (run.state, run.project, run.name, run.config) == ("finished", "here", "run", {"lr": 1e-3})
    expected = {}
    for m in records.read(root / "measurements.jsonl"):
        for record in m.records:
            if record.other_layer is None:
                expected.setdefault(records.key(m.analysis, record), []).append((m.step, record.value))
    for name, curve in expected.items():
        assert run.curve(name) == curve, name
        assert run.step_metric(name) == AXIS
    rows = records.rows(root / "metrics.jsonl")
    assert run.curve("train/loss") == [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row]
    assert dict(run.curve("tokens")) == {row["step"]: row["tokens"] for row in rows}
    assert all("tokens" in row for row in run.history if AXIS in row)
    assert [row["_step"] for row in run.history] == list(range(len(run.history)))


@pytest.mark.slow
def test_layers_have_a_picture_rows_in_the_long_table_and_curves_of_each_analysis_first_metric(root) -> None:
    run = mirror_all(root)
    pictures, names = run.media("image-file"), {*run.names()}
    assert {"lens/logit_lens_loss/over_layers", "trajectory/state_norm/over_layers"} <= pictures.keys()
    assert {len(files) for files in pictures.values()} == {1}  # pictures sent during training are not drawn again
    assert not any("other_layer" in key for key in names)
    layered = {name.split("/layer_")[0] for name in names if "/layer_" in name}
    assert len(layered) == len({name.split("/")[0] for name in layered})
    assert "trajectory/line_shape_score" in layered
    assert "trajectory/expodistance" in names
    table, frame = run.tables["emergence"], records.frame(root / "measurements.jsonl")
    assert table["columns"] == [*frame]  # as an exported one
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert [row["value"] for row in rows] == pytest.approx(frame["value"].tolist())
    assert next(row["k"] for row in rows if row["metric"] == "coupling") == 4
    assert [*(root / "wandb").glob("artifacts/**/*")], "tables are staged inside the run's folder"


def test_a_tag_may_be_a_number_in_one_row_of_the_table_and_a_word_in_another(root) -> None:
    for step, tag in ((1, 4), (2, "all")):
        found = [Record(metric="m", value=1.0, tags={"k": tag})]
        records.append(root / "measurements.jsonl", replace(measurement("run", step, "lens"), records=found))
    table = end_of_run(root)["emergence"]
    assert {4, "all"} <= {*table.get_column("k")}


@pytest.mark.soak
@pytest.mark.slow
def test_pictures_are_sent_during_training_after_4_and_8_measured_steps(tmp_path: Path) -> None:
    mirror = opened(tmp_path)
    for step in range(9):
        found = measurement("r", step, "lens", layers=2)
        records.append(tmp_path / "measurements.jsonl", found)
        mirror.log_step(step, None, {}, [found])
    mirror.finish()
    run = read_back(tmp_path)
    assert [step for step, _ in run.curve("lens/logit_lens_loss/over_layers")] == [3, 7, None]
    assert [step for step, _ in run.curve("lens/logit_lens_loss/layer_01")] == [*range(9)]


@pytest.mark.slow
def test_opening_again_sends_only_new_lines_also_at_earlier_steps(root: Path) -> None:
    before = len(mirror_all(root).history)
    late = measurement("quickstart", 2, "trajectory", layers=2, seed=5)
    records.append(root / "measurements.jsonl", replace(late, analysis="later"))
    log_losses(root, {5: 3.0})
    run = mirror_all(root)
    assert run.curve("later/expodistance") == [(2, pytest.approx(1.8 - 0.17609, abs=0.01))]
    assert run.curve("train/loss")[-1] == (5, 3.0)
    assert len(run.history) == before + 3  # the late row, the new row, the table again
    whole = ("emergence", "tokens", AXIS, "/over_layers")  # the table and the pictures over all steps are sent again
    for key in (key for key in run.names() if not key.endswith(whole)):
        steps = [step for step, _ in run.curve(key)]
        assert len({*steps}) == len(steps), f"{key} came again"
    assert len(mirror_all(root).history) == before + 3


@pytest.mark.parametrize("number", ["1", "10"])
def test_a_run_started_twice_in_one_second_is_read_completely(root: Path, number: str) -> None:
    """W&B adds a number to later folders of the same second; one whose process was killed has no file yet."""
    expected = len(mirror_all(root).history)
    (folder,) = folders(root)
    earlier = [folder.with_name(folder.name + ending) for ending in ("", "-1", "-2")[: int(number)]]
    folder = folder.rename(folder.with_name(f"{folder.name}-{number}"))
    for empty in earlier:
        empty.mkdir()
    mirror = opened(root)
    mirror.finish()
    (command,) = re.findall("wandb sync (.*)", mirror.closing_line)
    assert str(folder) in glob.glob(command)
    assert len(read_back(root).history) == expected, "nothing was sent again"


@pytest.mark.soak
@pytest.mark.slow
def test_a_step_logged_in_parts_twice_or_late_is_sent_once(tmp_path: Path) -> None:
    mirror = opened(tmp_path)
    mirror.log_step(3, 30, {"train/loss": 1.0}, [])
    mirror.log_step(3, 30, {}, [measurement("r", 3, "lens", layers=2)])
    for step, loss in ((4, float("inf")), (4, 2.0), (2, 3.0)):
        mirror.log_step(step, 10 * step, {"train/loss": loss}, [])
    mirror.finish()
    mirror.log_step(9, 90, {"train/loss": 9.0}, [])
    run = read_back(tmp_path)
    assert run.curve("train/loss") == [(3, 1.0), (4, float("inf")), (2, 3.0)]
    assert [step for step, _ in run.curve("lens/logit_lens_loss/layer_02")] == [3]


@pytest.mark.slow
def test_rows_are_sent_in_step_order_even_without_scalars(tmp_path: Path) -> None:
    for step in (15, 0, 30):
        records.append(tmp_path / "measurements.jsonl", measurement("r", step, "lens", layers=2))
    log_losses(tmp_path, dict.fromkeys((10, 15, 20), 1.0))
    run = mirror_all(tmp_path)
    assert [row.get(AXIS) for row in run.history] == [0, 10, 15, 15, 20, 30, None]
    assert run.history[0]["tokens"] == 0


class FakeRun:
    """A run on a server that already has `starting_step` rows."""

    id, url, entity = RUN_ID, "https://wandb.example/run", None

    def __init__(self, starting_step: int, folder: Path) -> None:
        self.starting_step, self.sent, self.dir = starting_step, [], str(folder / "files")
        self.settings = SimpleNamespace(mode="online")

    def define_metric(self, *_: object, **__: object) -> None: ...

    def finish(self, **_: object) -> None: ...

    def log(self, row: dict, step: int, commit: bool) -> None:
        assert commit
        self.sent.append((row.get(AXIS), row.get("train/loss")))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "server_rows"),
    [
        ("offline", 0),  # no local record: everything goes to the server
        ("offline", 3),  # the server has three rows, but no local file says so, because the machine crashed
        pytest.param("online", 3, marks=pytest.mark.soak),
    ],
)
def test_online_only_missing_rows_are_sent(tmp_path, monkeypatch, kind, server_rows):
    log_losses(tmp_path, {step: 1 / step for step in range(1, 6)})
    mirror_all(tmp_path)  # offline and never synced
    if kind == "online":
        (folder,) = (tmp_path / "wandb").glob("offline-run-*")
        folder.rename(folder.with_name(folder.name.removeprefix("offline-")))  # as an online run leaves it
    run = FakeRun(server_rows, tmp_path)
    monkeypatch.setattr(wandb, "init", lambda **_: run)
    mirror = opened(tmp_path, WandbMirror(mode="online"))
    mirror.log_step(6, None, {"train/loss": 1 / 6}, [])
    mirror.finish()
    assert run.sent == [(step, 1 / step) for step in range(server_rows + 1, 7)]
    said = mirror.closing_line.splitlines()
    assert (said[0].endswith(run.url), said[1].endswith(" --workspace ENTITY/lit_layers")) == (True, True)


def test_rows_shortly_before_a_kill_are_sent_again_under_new_numbers(tmp_path: Path) -> None:
    """The server may lack the last rows, and W&B's step never decreases. tests/cli/test_resume.py has whole runs."""
    log_losses(tmp_path, {step: float(step) for step in range(5)})
    lines = [{"row": n, "step": n, "names": ["train/loss"], "at": 100.0 + n * LAG / 2} for n in range(5)]
    (tmp_path / "wandb").mkdir()
    notes = "".join(json.dumps(line) + "\n" for line in lines) + '{"row": 5, "st'  # torn
    (tmp_path / "wandb" / NOTES).write_text(notes)
    run = mirror_all(tmp_path)
    assert run.curve("train/loss") == [(3, 3.0), (4, 4.0)]
    assert [row["_step"] for row in run.history] == [5, 6]
    assert len(mirror_all(tmp_path).history) == 2


def test_a_second_process_does_not_touch_a_run_that_is_training(root: Path, capsys) -> None:
    with run_lock.writing(root):
        assert main(["report", str(root), "--wandb"]) == 2
    assert "is being written by process" in capsys.readouterr().err
    assert not (root / "wandb").exists()


@pytest.mark.soak
@pytest.mark.slow
def test_without_a_key_auto_is_offline_and_says_so_in_one_line(tmp_path: Path, monkeypatch, caplog) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    with caplog.at_level(logging.INFO, logger="lit_layers"):
        mirror = opened(tmp_path / "run", WandbMirror())
    mirror.log_step(1, None, {"train/loss": 1.0}, [])
    mirror.finish()
    assert said_by_us(caplog) == ["W&B: no API key, so the run is mirrored offline"]
    assert "wandb sync" in mirror.closing_line
    assert read_back(tmp_path / "run").curve("train/loss") == [(1, 1.0)]


def said_by_us(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name.startswith("lit_layers")]


@pytest.mark.soak
@pytest.mark.slow
def test_an_unreachable_server_switches_to_offline_with_the_same_id_within_seconds(tmp_path: Path) -> None:
    said = tmp_path / "said"

    def unreachable() -> int:
        os.environ.update(WANDB_API_KEY="0" * 40, WANDB_BASE_URL="http://127.0.0.1:9")
        del os.environ["WANDB_MODE"]
        with said.open("w", buffering=1) as file:
            os.dup2(file.fileno(), 2)
            sys.stderr = file
            logging.getLogger("lit_layers").addHandler(logging.StreamHandler(file))
            wandb_mirror._INIT = 2.0
            mirror, since = WandbMirror(mode="auto"), time.monotonic()
            mirror.open(tmp_path / "run", run_id=RUN_ID, config={})
            waited = time.monotonic() - since
            mirror.log_step(1, 8, {"train/loss": 1.0}, [])
            mirror.finish()
        return 0 if waited < 60 else 7  # W&B by itself waits for 90 seconds

    assert run_forked(unreachable) == 0
    assert "cannot be reached" in said.read_text()
    assert "Traceback" not in said.read_text()
    assert read_back(tmp_path / "run").curve("train/loss") == [(1, 1.0)]


def test_online_without_a_server_is_refused_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        raise wandb.errors.CommError("no route to host\nwhile retrying")

    monkeypatch.setattr(wandb, "init", fail)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    with pytest.raises(InputError, match=r"wandb\.mode online: W&B cannot be reached \(no route to host\); try auto"):
        WandbMirror(mode="online").open(tmp_path, run_id=RUN_ID, config={})


def test_without_wandb_one_line_says_so_and_the_mirror_does_nothing(root, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "wandb", None)
    mirror = opened(root, WandbMirror())
    mirror.log_step(1, 8, {"train/loss": 1.0}, [])
    mirror.finish()
    assert len(caplog.records) == 1
    assert "pip install 'lit_layers[wandb]'" in mirror.closing_line
    assert not (root / "wandb").exists()


def test_a_disabled_mirror_does_nothing_and_says_nothing(root: Path, caplog, monkeypatch) -> None:
    for mode in ("disabled", "auto"):  # where the environment decides
        mirror = opened(root, WandbMirror(mode=mode))
        mirror.log_step(1, 8, {"train/loss": 1.0}, [])
        mirror.finish()
        assert not (root / "wandb").exists(), mode
        assert (caplog.records, mirror.closing_line) == ([], "")
        monkeypatch.setenv("WANDB_MODE", "disabled")


@pytest.mark.soak
@pytest.mark.slow
def test_a_dead_service_stops_the_mirror_with_one_line_and_the_next_mirror_catches_up(tmp_path, caplog, monkeypatch):
    def lost(*_: object, **__: object) -> None:
        raise ConnectionResetError("Connection lost")

    mirror = opened(tmp_path)
    with monkeypatch.context() as broken:
        broken.setattr(mirror._run, "log", lost)
        for step in (1, 2):
            log_losses(tmp_path, {step: 1 / step})
            mirror.log_step(step, None, {"train/loss": 1 / step}, [])
        mirror.finish()
    (said,) = said_by_us(caplog)
    assert said.startswith("W&B: stopped (Connection lost); the run goes on, `lit-layers report ")
    wandb.teardown()
    assert mirror_all(tmp_path).curve("train/loss") == [(1, 1.0), (2, 0.5)]


def test_every_curve_null_and_picture_of_the_charts_is_one_that_the_mirror_logs(root):
    first = next(m for m in records.read(root / "measurements.jsonl") if m.analysis == "coupling")
    null = replace(first, provenance={**first.provenance, "null": {"kind": "all"}})
    records.Store(records.null_folder(root, "all") / "measurements.jsonl").add(null)
    (root / "run.json").write_text(json.dumps({"id": RUN_ID}))
    logged = mirror_all(root)
    names, pictures = {*logged.names()}, {*logged.media("image-file")}
    spec = workspace_of(root, "me", "p")._to_model().model_dump(by_alias=True, mode="json")["spec"]
    sections = spec["section"]["panelBankConfig"]["sections"]
    panels = [(panel["viewType"], panel["config"]) for section in sections for panel in section["panels"]]
    lines = [config for kind, config in panels if kind == "Run History Line Plot"]
    drawn = {curve for config in lines for curve in config["metrics"]}
    assert drawn <= names, drawn - names
    value = next(r.value for r in first.records if (r.metric, r.tags) == ("coupling", {"k": 4}))
    assert logged.curve("coupling/coupling/k=4/null_all") == [(0, value), (4, value)]
    assert {
        "coupling/coupling/k=4",
        "coupling/coupling/k=4/null_all",
        "trajectory/line_shape_score/layer_02",
        "train/loss",
    } <= drawn
    colors = {name: look["color"] for config in lines for name, look in (config["overrideColors"] or {}).items()}
    assert set(colors.values()) == {EDGE}
    assert {name.partition(":")[2] for name in colors} == {name for name in drawn if "/null_" in name}
    assert {name.partition(":")[0] for name in colors} == {RUN_ID}, "only the nulls of this run are grey"
    assert all(config["xAxis"] == "trainer/global_step" and config["xLogScale"] for config in lines)
    media = {key for _, config in panels for key in config.get("mediaKeys", [])}
    assert media == pictures, media ^ pictures
    assert sum(key.endswith("/over_layers") for key in media) > 2
    (layered,) = [config["metrics"] for config in lines if config["chartTitle"] == "Logit-lens loss (nats)"]
    assert layered == [f"lens/logit_lens_loss/layer_{n:02d}" for n in range(3)], "a chart has all layers of a metric"


def test_an_invalid_workspace_is_refused_and_a_run_without_steps_has_no_charts(root, tmp_path, capsys):
    for place in ("project", "a/b/c", "/p", "e/"):
        with pytest.raises(InputError, match="expected ENTITY/PROJECT at W&B"):
            save_workspace(root, place)
    assert main(["report", str(root), "--workspace", "a/b/c", "--root", str(tmp_path)]) == 2
    assert "workspace: expected ENTITY/PROJECT" in capsys.readouterr().err
    (tmp_path / "measurements.jsonl").write_text("")
    with pytest.raises(InputError, match="nothing was measured at a step there"):
        workspace_of(tmp_path, "e", "p")
