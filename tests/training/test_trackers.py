"""The run of a user's own training: curves, heat maps, table, tokens and options of the measurements are in it."""

import csv
import json
import re
import sqlite3
import threading
import time

import lightning as L
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

import lit_layers
from lit_layers import analyses as every
from lit_layers.errors import InputError
from lit_layers.integrations.huggingface import EmergenceTrainerCallback
from lit_layers.report import trackers
from lit_layers.training import EmergenceCallback
from tests.support.listed_batches import Listed
from tests.support.read_wandb import read_finished
from tests.support.tiny_models import tiny
from tests.support.undrawn import leave_undrawn

# W&B leaves temporary folders of its media to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:Implicitly cleaning up:ResourceWarning")
STEPS = range(7)
LOSS = ("logit_lens_loss", "1")


def measured():
    texts = Listed({"input_ids": torch.arange(24).reshape(2, 12) + 3})
    return [every.Lens(batches=texts), every.Coupling(batches=texts, k=(2,), num_prompts=1)]


def trained(root, loggers, **options) -> None:
    """A loop that changes the model a little at each of six steps."""
    model = tiny("gpt2")
    with lit_layers.watch(
        model, measured(), steps=[*STEPS], root=root, loggers=loggers, tokens_per_step=100, **options
    ) as watched:
        for _ in STEPS[1:]:
            with torch.no_grad():
                model.lm_head.weight.mul_(1.05)
            watched.step()


def numbers_of(root):
    return lit_layers.records.frame(root / "measurements.jsonl")


def losses_of(root) -> dict[int, float]:
    """What is shown of the first layer, from the run's own file."""
    table = numbers_of(root)
    rows = table[(table["metric"] == "logit_lens_loss") & (table["layer"] == 1)]
    return dict(zip(rows["step"], rows["value"], strict=True))


def nothing_that_nobody_plots(names) -> bool:
    return not [name for name in names if "other_layer" in name or "index" in name or "min_gap" in name]


@pytest.mark.slow
def test_a_run_of_wandb_gets_all_that_the_mirror_shows(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    leave_undrawn(monkeypatch)
    own = wandb.init(mode="offline", dir=str(tmp_path), settings=wandb.Settings(console="off", silent=True))
    own.log({"loss": 3.0})
    trained(tmp_path / "run", [own])
    own.log({"loss": 2.0})
    own.finish()
    (run,) = read_finished(tmp_path).values()
    assert [value for _, value in run.curve("loss")] == [3.0, 2.0]
    assert dict(run.curve("lens/logit_lens_loss/layer_01")) == losses_of(tmp_path / "run")
    assert run.step_metric("lens/logit_lens_loss/layer_01") == "lit_layers/step"
    assert dict(run.curve("lit_layers/tokens"))[3] == 300
    assert any(name.endswith("/layer_mean") for name in run.names())
    assert len(run.media("image-file")["coupling/coupling_pair/k=2/matrix"]) == len(STEPS)
    assert len(run.media("image-file")["lens/logit_lens_loss/over_layers"]) == 1
    assert len(run.tables["lit_layers/emergence"]["data"]) == len(numbers_of(tmp_path / "run"))
    assert "lit_layers/emergence_times" in run.tables
    config = run.config["lit_layers"]["analyses"]
    assert config["coupling"]["init_args"]["k"] == [2]
    assert nothing_that_nobody_plots(run.names())


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = tiny("gpt2").train()

    def training_step(self, batch, _):
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained_in_lightning(root, logger) -> None:
    watch = EmergenceCallback(measured(), [*STEPS], root, tokens_per_step=100)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = L.Trainer(max_steps=6, accelerator="cpu", logger=logger, callbacks=[watch], log_every_n_steps=1, **quiet)
    trainer.fit(Module(), DataLoader(torch.arange(96).reshape(12, 8) % 30, batch_size=2))


@pytest.mark.slow
@pytest.mark.parametrize("way", [pytest.param("lightning", marks=pytest.mark.soak), "writer"])
def test_tensorboard_shows_curves_maps_with_a_slider_and_tables_as_texts(way, tmp_path, monkeypatch):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from lightning.pytorch.loggers import TensorBoardLogger
    from torch.utils.tensorboard import SummaryWriter

    leave_undrawn(monkeypatch)
    root = tmp_path / "run"
    if way == "lightning":
        trained_in_lightning(root, logger := TensorBoardLogger(tmp_path / "tb"))
        folder = logger.log_dir
    else:
        with SummaryWriter(folder := str(tmp_path / "tb")) as writer:
            trained(root, [writer])
    events = accumulator.EventAccumulator(folder, size_guidance={"images": 0, "scalars": 0, "tensors": 0}).Reload()
    shown = {event.step: event.value for event in events.Scalars("lens/logit_lens_loss/layer_01")}
    assert shown == pytest.approx(losses_of(root), rel=1e-6)  # which it keeps in float32
    assert {event.step: event.value for event in events.Scalars("lit_layers/tokens")} == {
        step: 100 * step for step in STEPS
    }
    names = events.Tags()["scalars"]
    assert any(name.endswith("/layer_mean") for name in names)
    assert nothing_that_nobody_plots(names)
    assert ("loss" in names) == (way == "lightning")
    assert [event.step for event in events.Images("coupling/coupling_pair/k=2/matrix")] == [*STEPS]
    assert [event.step for event in events.Images("lens/logit_lens_loss/over_layers")] == [6]

    def text(name: str) -> str:
        (event,) = events.Tensors(f"lit_layers/{name}/text_summary")
        return event.tensor_proto.string_val[0].decode()

    assert json.loads(text("about"))["analyses"]["coupling"]["init_args"]["k"] == [2]
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text("emergence").splitlines()]
    of_last = numbers_of(root)
    assert len(rows) == len(of_last[of_last["step"] == 6])
    assert {row[head.index("step")] for row in rows} == {"6"}
    (loss,) = [row for row in rows if row[3:5] == ["logit_lens_loss", "1"]]
    assert float(loss[5]) == pytest.approx(losses_of(root)[6], rel=1e-4)
    assert float(loss[head.index("low")]) <= float(loss[5]) <= float(loss[head.index("high")])
    assert text("emergence_times").startswith("| analysis | metric |")


@pytest.mark.slow
@pytest.mark.parametrize("way", [pytest.param("lightning", marks=pytest.mark.soak), "run"])
def test_mlflow_has_curves_pictures_parameters_and_tables_as_artefacts(way, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    from lightning.pytorch.loggers import MLFlowLogger

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    leave_undrawn(monkeypatch)
    root, uri = tmp_path / "run", (tmp_path / "mlruns").as_uri()
    if way == "lightning":
        trained_in_lightning(root, logger := MLFlowLogger("mine", tracking_uri=uri))
        run_id = logger.run_id
    else:
        mlflow.set_tracking_uri(uri)
        with mlflow.start_run() as active:
            trained(root, [active])
        run_id = active.info.run_id
    (folder,) = (tmp_path / "mlruns").glob(f"*/{run_id}")

    def curve(name: str) -> dict[int, float]:
        lines = (folder / "metrics" / name).read_text().splitlines()
        return {int(step): float(value) for _, value, step in map(str.split, lines)}

    assert curve("lens/logit_lens_loss/layer_01") == losses_of(root)
    assert curve("lit_layers/tokens") == {step: 100 * step for step in STEPS}
    names = [str(path.relative_to(folder / "metrics")) for path in (folder / "metrics").rglob("*") if path.is_file()]
    assert any(name.endswith("/layer_mean") for name in names)
    assert "coupling/linearized_rollout/whole" in names, "which is a folder, too: coupling/linearized_rollout/layer_01"
    assert "coupling/coupling/k_2" in names
    assert nothing_that_nobody_plots(names)
    drawn = [path.name for path in (folder / "artifacts" / "images").iterdir() if path.suffix == ".png"]
    assert sum(re.match("coupling.coupling_pair.k_2.matrix.step", name) is not None for name in drawn) == len(STEPS)
    assert sum(re.match("lens.logit_lens_loss.over_layers.step.6.", name) is not None for name in drawn) == 1
    assert '"k": [2]' in (folder / "params" / "lit_layers" / "coupling").read_text()
    about = json.loads((folder / "artifacts" / "lit_layers" / "about.json").read_text())
    assert about["analyses"]["coupling"]["init_args"]["k"] == [2]
    with open(folder / "artifacts" / "lit_layers" / "emergence.csv", newline="") as file:
        rows = [*csv.DictReader(file)]
    assert len(rows) == len(numbers_of(root))
    of_one = {int(row["step"]): float(row["value"]) for row in rows if (row["metric"], row["layer"]) == LOSS}
    assert of_one == losses_of(root)
    assert (folder / "artifacts" / "lit_layers" / "emergence_times.csv").exists()


@pytest.mark.slow
def test_trackio_has_them_in_its_own_database(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # which it reads as it is imported
    trackio = pytest.importorskip("trackio")
    folder = trackio.utils.TRACKIO_DIR
    leave_undrawn(monkeypatch)
    run = trackio.init(project="emergence", name="mine", embed=False, auto_log_cpu=False, auto_log_gpu=False)
    root = tmp_path / "run"
    trained(root, [run])
    run.log({"loss": 3.0})
    run.log({"loss": 2.0})
    trackio.finish()
    with sqlite3.connect(folder / "emergence.db") as database:
        stored = database.execute("select metrics, step from metrics order by step, id").fetchall()
        rows = [json.loads(row) for row, _ in stored]
        ((config,),) = database.execute("select config from configs").fetchall()
    database.close()
    name = "lens/logit_lens_loss/layer_01"
    assert {row["train/global_step"]: row[name] for row in rows if name in row} == losses_of(root)
    tokens = "lit_layers/tokens"
    assert {row["train/global_step"]: row[tokens] for row in rows if tokens in row}[3] == 300
    assert [(json.loads(row)["loss"], step) for row, step in stored if "loss" in json.loads(row)] == [(3, 0), (2, 1)]
    assert nothing_that_nobody_plots({name for row in rows for name in row})
    matrix = "coupling/coupling_pair/k=2/matrix"
    pictures = [row[matrix]["file_path"] for row in rows if matrix in row]
    assert len(pictures) == len(STEPS)
    with Image.open(folder / "media" / pictures[0]) as picture:
        assert picture.size == (1, 1)
    (table,) = [row["lit_layers/emergence"]["_value"] for row in rows if "lit_layers/emergence" in row]
    assert len(table) == len(numbers_of(root))
    assert json.loads(config)["lit_layers"]["analyses"]["coupling"]["init_args"]["k"] == [2]


@pytest.mark.soak  # what runs get is tested above with some that a user began
def test_a_trainer_of_transformers_shares_the_runs_that_it_reports_to(tmp_path, monkeypatch):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tb"))
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    leave_undrawn(monkeypatch)
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.arange(64).reshape(8, 8) % 30]
    arguments = TrainingArguments(
        str(tmp_path / "hf"), max_steps=6, report_to=["tensorboard", "mlflow"], use_cpu=True, disable_tqdm=True,
        save_strategy="no", logging_steps=2, per_device_train_batch_size=2,
    )  # fmt: skip
    watch = EmergenceTrainerCallback(measured(), [*STEPS], tmp_path / "run", tokens_per_step=100)
    Trainer(tiny("gpt2"), arguments, train_dataset=rows, callbacks=[watch]).train()
    events = accumulator.EventAccumulator(str(tmp_path / "tb"), size_guidance={"scalars": 0}).Reload()
    assert {"train/loss", "lens/logit_lens_loss/layer_01"} <= {*events.Tags()["scalars"]}
    assert "lit_layers/emergence/text_summary" in events.Tags()["tensors"]
    (run,) = [path.parent for path in (tmp_path / "mlruns").glob("*/*/metrics")]
    assert (run / "metrics" / "loss").exists()
    assert (run / "metrics" / "lens" / "logit_lens_loss" / "layer_01").exists()
    assert (run / "artifacts" / "lit_layers" / "emergence.csv").exists()


class Note:
    def __init__(self):
        self.names: set[str] = set()

    def log_metrics(self, metrics, step=None):
        self.names |= metrics.keys()


def test_other_loggers_get_the_tokens_and_what_is_plotted_or_all_of_it(tmp_path):
    plotted, whole = Note(), Note()
    trained(tmp_path / "one", [plotted])
    trained(tmp_path / "two", [whole], scalars="all")
    assert "lit_layers/tokens" in plotted.names
    assert all("/" in name for name in whole.names)
    assert plotted.names < whole.names
    assert any("singular_value" in name for name in whole.names - plotted.names)
    assert not any("other_layer" in name for name in whole.names)
    with pytest.raises(InputError, match="scalars: expected one of plotted, all, got 'few'"):
        trained(tmp_path / "three", [plotted], scalars="few")


class Strange(trackers.Tracker):
    """A tracker that is as the test wants it."""

    name = "Strange"

    def __init__(self, act=lambda: None):
        self.act, self.rows, self.ends = act, [], []

    def begin(self, about):
        self.act()

    def row(self, step, values, pictures):
        self.act()
        self.rows.append(step)

    def end(self, step, tables, pictures):
        self.act()
        self.ends.append((step, {name: len(rows) for name, (_, rows) in tables.items()}))


@pytest.fixture
def strange(monkeypatch):
    leave_undrawn(monkeypatch)
    tracker = Strange()
    monkeypatch.setattr("lit_layers.training.watching.tracker_of", lambda _: tracker)
    return tracker


def all_is_measured(root) -> bool:
    return len(lit_layers.records.read(root / "measurements.jsonl")) == 2 * len(STEPS)


@pytest.mark.soak
def test_a_tracker_that_raises_ends_no_training(strange, tmp_path, caplog):
    strange.act = lambda: 1 / 0
    trained(tmp_path / "run", [object()])
    assert all_is_measured(tmp_path / "run")
    for what in ("its config", "step 0", "step 6", "the table of measurements"):
        assert f"Strange: {what} is not logged: division by zero" in caplog.text


def test_a_tracker_that_hangs_is_waited_for_once_at_the_end_and_given_up(strange, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(trackers, "PATIENCE", 0.3)
    never = threading.Event()
    strange.act = never.wait
    trained(tmp_path / "run", [object()])
    assert all_is_measured(tmp_path / "run")
    assert caplog.text.count("Strange: gets nothing more (no answer within 0 s)") == 1
    never.set()


def test_a_tracker_that_does_not_keep_up_is_given_up(strange, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(trackers, "_WAITING", 3)
    never = threading.Event()
    strange.act = never.wait
    trained(tmp_path / "run", [object()])
    assert all_is_measured(tmp_path / "run")
    assert caplog.text.count("Strange: gets nothing more (it does not keep up)") == 1
    never.set()


def test_a_tracker_gets_every_measurement_in_order_and_one_end(strange, tmp_path):
    strange.act = lambda: time.sleep(0.01)
    trained(tmp_path / "run", [object()])
    assert strange.rows == [*STEPS]
    ((step, tables),) = strange.ends
    assert step == 6
    assert tables["emergence"] == len(numbers_of(tmp_path / "run"))


def test_a_training_that_fails_leaves_the_tracker_without_an_end_and_no_thread(strange, tmp_path):
    def failing() -> None:
        with lit_layers.watch(tiny("gpt2"), measured(), steps=[0], root=tmp_path / "run", loggers=[object()]):
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        failing()
    deadline = time.monotonic() + 300
    while any(thread.name == "lit_layers to Strange" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert strange.ends == []


def test_a_logger_that_raises_or_whose_server_does_not_answer_ends_no_training(tmp_path, caplog):
    asked = []

    class Broken:
        def log_metrics(self, metrics, step=None):
            raise OSError("disk full")

    class WandbLogger(Note):
        @property
        def experiment(self):
            asked.append(1)
            raise ConnectionError("no route")

    trained(tmp_path / "run", [Broken(), WandbLogger()])
    assert all_is_measured(tmp_path / "run")
    assert "Broken: step 0 is not logged: disk full" in caplog.text
    assert "WandbLogger: step 0 is not logged: no route" in caplog.text
    assert len(asked) == 1, "it is not asked again"


@pytest.mark.soak
def test_a_run_of_wandb_that_is_finished_gets_nothing_and_ends_no_training(tmp_path, caplog):
    wandb = pytest.importorskip("wandb")
    own = wandb.init(mode="offline", dir=str(tmp_path), settings=wandb.Settings(console="off", silent=True))
    own.finish()
    trained(tmp_path / "run", [own])
    assert "W&B: step 0 is not logged" in caplog.text
    assert all_is_measured(tmp_path / "run")
