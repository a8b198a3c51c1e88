"""A training logs the same rows of its own with and without measurements in the same logger run."""

import csv

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

import lit_layers
from lit_layers.analyses import Coupling, Lens, Trajectory
from lit_layers.integrations import EmergenceTrainerCallback
from lit_layers.training import EmergenceCallback
from tests.support.listed_batches import Listed
from tests.support.read_wandb import read_finished
from tests.support.tiny_models import tiny
from tests.support.undrawn import leave_undrawn

# W&B leaves its temporary media folders to the garbage collector.
pytestmark = [
    pytest.mark.soak,
    pytest.mark.filterwarnings("ignore:Implicitly cleaning up:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
]
ROWS, EVERY = 30, 4
CURVE = "lens/logit_lens_loss/layer_01"
QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}


def measured():
    return [Lens(batches=Listed({"input_ids": torch.arange(24).reshape(2, 12) % 30}))]


def losses_of(root) -> dict[int, float]:
    """Return the first layer's loss at each measured step, from `measurements.jsonl`."""
    table = lit_layers.records.frame(root / "measurements.jsonl")
    rows = table[(table["metric"] == "logit_lens_loss") & (table["layer"] == 1)]
    return dict(zip(rows["step"], rows["value"], strict=True))


def begun(folder, name):
    wandb = pytest.importorskip("wandb")
    quiet = wandb.Settings(console="off", silent=True)
    return wandb.init(mode="offline", dir=str(folder), id=name, project="p", settings=quiet, reinit="create_new")


def loop(name, folder, log, num_rows, *, is_watched, order="log, step", analyses=None, is_numbered=False) -> None:
    """Run a user's training loop, which logs through `log(run, step)`."""
    run, model = begun(folder, name), tiny("gpt2")
    watched = None
    if is_watched:
        options = {"steps": {"every": EVERY}, "root": folder / "root", "tokens_per_step": 100}
        watched = lit_layers.watch(model, analyses or measured(), loggers=[run], **options)
    for step in range(1, num_rows + 1):
        with torch.no_grad():
            model.lm_head.weight.mul_(1.001)
        for word in order.split(", "):
            if word == "log":
                log(run, step)
            elif watched is not None:
                watched.step()
    if watched is not None:
        watched.close()
    run.log({"test": 1.0}, **({"step": num_rows} if is_numbered else {}))
    run.finish()


def log_numbered(run, step):
    run.log({"loss": 1 / step}, step=step)


def log_plain(run, step):
    run.log({"loss": 1 / step})


def log_twice(run, step):
    run.log({"lr": step / 10}, commit=False)
    run.log({"loss": 1 / step})


def rows_of(run, names) -> list[tuple]:
    """Return the values of these names in each row, with W&B's step number of the row."""
    rows = [(row["_step"], {name: row[name] for name in names if name in row}) for row in run.history]
    return [row for row in rows if row[1].keys() - {"trainer/global_step", "train/global_step"}]


def is_guest(run, alone) -> bool:
    """Return whether each added name is in a section, and the user's metric definitions are unchanged."""
    added = {*run.names()} - {*alone.names()}
    kept = {name: run.metrics.get(name) for name in alone.metrics} == alone.metrics
    globs = [{name for name in each.metrics if "*" in name} for each in (run, alone)]
    return all("/" in name for name in added) and kept and globs[0] == globs[1]


def equal_rows(folder, ours=CURVE):
    """Check that the user's rows are equal with and without measurements, and return the run with them."""
    runs = read_finished(folder)
    alone, both = runs["alone"], runs["both"]
    same = [name for name in alone.names() if "runtime" not in name and "per_second" not in name]
    assert rows_of(both, same) == rows_of(alone, same)
    assert is_guest(both, alone)
    assert ours in both.names()
    return both


@pytest.mark.parametrize(
    ("log", "order"),
    [(log_numbered, "log, step"), (log_numbered, "step, log"), (log_plain, "log, step"), (log_twice, "log, step")],
)
def test_wandb_rows_of_a_loop_keep_values_and_step_numbers(log, order, tmp_path, monkeypatch):
    leave_undrawn(monkeypatch)
    for name in ("alone", "both"):
        loop(name, tmp_path, log, ROWS, is_watched=name == "both", order=order, is_numbered=log is log_numbered)
    both = equal_rows(tmp_path)
    assert len(both.curve("loss")) == ROWS
    assert dict(both.curve(CURVE)) == losses_of(tmp_path / "root")
    assert len(both.curve(CURVE)) == 1 + -(-ROWS // EVERY)


def test_all_analyses_of_a_step_share_one_row_of_the_user(tmp_path, monkeypatch):
    leave_undrawn(monkeypatch)
    two = [Trajectory(batches=measured()[0].batches), *measured()]
    loop("both", tmp_path, log_numbered, 9, is_watched=True, analyses=two)
    (both,) = read_finished(tmp_path).values()
    rows = [row for row in both.history if CURVE in row]
    assert [row["_step"] for row in rows] == [0, 4, 8, 9]
    assert all(any(name.startswith("trajectory/") for name in row) for row in rows)
    assert [row["lit_layers/tokens"] for row in rows] == [0, 400, 800, 900]
    assert [row["loss"] for row in rows[1:]] == [1 / 4, 1 / 8, 1 / 9]


def test_the_wandb_run_of_a_loop_has_pictures_a_table_and_the_options(tmp_path, monkeypatch):
    leave_undrawn(monkeypatch)
    coupling = Coupling(batches=measured()[0].batches, k=(2,), num_prompts=1)
    loop("both", tmp_path, log_plain, 25, is_watched=True, analyses=[*measured(), coupling])
    (run,) = read_finished(tmp_path).values()
    assert run.step_metric(CURVE) == "lit_layers/step"
    assert dict(run.curve("lit_layers/tokens"))[4] == 400
    assert len(run.media("image-file")["lens/logit_lens_loss/over_layers"]) == 2  # of four steps, and of all steps
    assert len(run.tables["lit_layers/emergence"]["data"]) == len(lit_layers.records.frame(tmp_path / "root"))
    assert run.config["lit_layers"]["analyses"]["coupling"]["init_args"]["k"] == [2]
    assert not [name for name in run.names() if "other_layer" in name or "index" in name or "min_gap" in name]


def test_a_finished_wandb_run_gets_nothing_and_ends_no_training(tmp_path, caplog):
    (run := begun(tmp_path, "own")).finish()
    with lit_layers.watch(tiny("gpt2"), measured(), steps=[0], root=tmp_path / "root", loggers=[run]) as watched:
        watched.step()
    assert "Run: step 0 is not logged" in caplog.text
    assert [*losses_of(tmp_path / "root")] == [0, 1]


def test_two_networks_measured_in_one_run_share_its_rows(tmp_path, monkeypatch):
    leave_undrawn(monkeypatch)
    run, models = begun(tmp_path, "both"), [tiny("gpt2"), tiny("gpt2", seed=1)]
    watches = []
    for name, model in zip(("student", "teacher"), models, strict=True):
        lens = [Lens(name=name, batches=measured()[0].batches)]
        options = {"steps": {"every": 2}, "root": tmp_path / name, "loggers": [run]}
        watches.append(lit_layers.watch(model, lens, **options))
    for step in range(1, 7):
        run.log({"loss": 1 / step}, step=step)
        for watched in watches:
            watched.step()
    for watched in watches:
        watched.close()
    run.log({"test": 1.0}, step=6)
    run.finish()
    (both,) = read_finished(tmp_path).values()
    assert [x for x, _ in both.curve("loss", x="_step")] == [*range(1, 7)]
    assert both.curve("test", x="_step") == [(6, 1.0)]
    for name in ("student", "teacher"):
        assert dict(both.curve(f"{name}/logit_lens_loss/layer_01")) == losses_of(tmp_path / name)


@pytest.mark.parametrize("log", [log_numbered, log_plain])
def test_fewer_user_rows_than_measured_steps_stay_as_they_are(log, tmp_path, monkeypatch, caplog):
    leave_undrawn(monkeypatch)

    def seldom(run, step):
        if step % 10 == 0:
            log(run, step)

    for name in ("alone", "both"):
        loop(name, tmp_path, seldom, 30, is_watched=name == "both", is_numbered=log is log_numbered)
    both = equal_rows(tmp_path) if log is log_numbered else read_finished(tmp_path)["both"]
    points, losses = dict(both.curve(CURVE)), losses_of(tmp_path / "root")
    assert [*losses] == [0, 4, 8, 12, 16, 20, 24, 28, 30]
    if log is log_numbered:
        assert points == {step: losses[step] for step in (0, 12, 20, 30)}, "the first after each row, and the last"
        assert "W&B: 5 steps are no points of its curves" in caplog.text
    else:
        assert points == losses
        assert [row["_step"] for row in both.history if "loss" in row] == [0, 1, 2]


class Module(L.LightningModule):
    """A module with automatic optimization, or with manual steps of all optimizers every `accumulate` batches."""

    def __init__(self, optimizers=1, accumulate=None):
        super().__init__()
        self.model, self.num_optimizers, self.accumulate = tiny("gpt2").train(), optimizers, accumulate
        self.automatic_optimization = accumulate is None

    def training_step(self, batch, index):
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("loss", loss)
        if not self.automatic_optimization:
            self.manual_backward(loss)
            for each in self.optimizers() if self.num_optimizers > 1 else [self.optimizers()]:
                if (index + 1) % self.accumulate == 0:
                    each.step()
                    each.zero_grad()
        return loss

    def configure_optimizers(self):
        parameters = [*self.model.parameters()]
        return [torch.optim.SGD(parameters[at :: self.num_optimizers], lr=0.1) for at in range(self.num_optimizers)]


def fit_lightning(root, logger, num_batches, *, is_watched, module=None, **options) -> L.Trainer:
    torch.manual_seed(0)
    watch = [EmergenceCallback(measured(), options.pop("steps", {"every": EVERY}), root)] if is_watched else []
    options = {"max_epochs": 1, "log_every_n_steps": 1, **options}
    trainer = L.Trainer(accelerator="cpu", logger=logger, callbacks=watch, **options, **QUIET)
    data = torch.arange(16 * num_batches).reshape(2 * num_batches, 8) % 30
    trainer.fit(module or Module(), DataLoader(data, batch_size=2))
    return trainer


def test_wandb_rows_of_lightning_keep_values_and_step_numbers(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    from lightning.pytorch.loggers import WandbLogger

    leave_undrawn(monkeypatch)
    for name in ("alone", "both"):
        logger = WandbLogger(name, tmp_path, id=name, offline=True, settings=wandb.Settings(console="off"))
        fit_lightning(tmp_path / "root", logger, ROWS, is_watched=name == "both")
        logger.experiment.finish()
    both = equal_rows(tmp_path)
    assert len(both.curve("loss")) == ROWS
    assert dict(both.curve(CURVE, x="trainer/global_step")) == losses_of(tmp_path / "root")


@pytest.mark.parametrize("every", [1, 7])
def test_curves_have_the_steps_of_losses_with_manual_optimization_and_accumulation(every, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    from lightning.pytorch.loggers import CSVLogger, WandbLogger

    leave_undrawn(monkeypatch)
    at_wandb = WandbLogger("both", tmp_path, offline=True, settings=wandb.Settings(console="off"))
    loggers = [at_wandb, CSVLogger(tmp_path / "csv")]
    module = Module(accumulate=4)
    fit_lightning(
        tmp_path / "root", loggers, 32, is_watched=True, module=module, log_every_n_steps=every, steps=[1, 2, 8]
    )
    at_wandb.experiment.finish()
    (both,) = read_finished(tmp_path).values()
    assert [x for x, _ in both.curve("loss")] == [x for x in range(32) if (x + 1) % every == 0]
    losses = losses_of(tmp_path / "root")
    assert sorted(losses) == [0, 1, 2, 8]
    expected = {4 * step: loss for step, loss in losses.items()}  # number of batches before the measured weights
    assert both.step_metric(CURVE) == both.step_metric("loss") == "trainer/global_step"
    assert dict(both.curve(CURVE)) == expected
    with open(next(tmp_path.glob("csv/**/metrics.csv"))) as file:
        rows = [row for row in csv.DictReader(file) if row[CURVE]]
    assert {int(row["step"]): float(row[CURVE]) for row in rows} == pytest.approx(expected)
    assert {int(row["step"]) // 4: int(float(row["lit_layers/step"])) for row in rows if row["lit_layers/step"]} == {
        1: 1, 2: 2, 8: 8,
    }  # fmt: skip


def fit_transformers(folder, num_steps, *, is_watched, **options) -> None:
    torch.manual_seed(0)
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.arange(64).reshape(8, 8) % 30]
    arguments = TrainingArguments(
        str(folder / "hf"), max_steps=num_steps, use_cpu=True, disable_tqdm=True, save_strategy="no",
        per_device_train_batch_size=2, **{"logging_steps": 1, **options},
    )  # fmt: skip
    watch = [EmergenceTrainerCallback(measured(), {"every": EVERY}, folder / "root")] if is_watched else []
    Trainer(tiny("gpt2"), arguments, train_dataset=rows, callbacks=watch).train()


@pytest.mark.parametrize(("num_rows", "logging_steps"), [(30, 1), (12, 6)])
def test_wandb_rows_of_transformers_keep_values_and_step_numbers(num_rows, logging_steps, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    leave_undrawn(monkeypatch)
    for name in ("alone", "both"):
        quiet = wandb.Settings(console="off", silent=True)
        run = wandb.init(mode="offline", dir=str(tmp_path), id=name, project="p", settings=quiet)
        options = {"report_to": ["wandb"], "logging_steps": logging_steps, "run_name": name}
        fit_transformers(tmp_path, num_rows, is_watched=name == "both", **options)
        run.finish()
    both = equal_rows(tmp_path) if logging_steps == 1 else read_finished(tmp_path)["both"]
    assert both.curve("train/loss") == read_finished(tmp_path)["alone"].curve("train/loss")
    assert len(both.curve("train/loss")) == num_rows // logging_steps
    assert both.step_metric(CURVE) == both.step_metric("train/loss") == "train/global_step"
    assert dict(both.curve(CURVE)) == losses_of(tmp_path / "root")


def test_tensorboard_rows_keep_values_and_steps(tmp_path, monkeypatch):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from lightning.pytorch.loggers import TensorBoardLogger

    leave_undrawn(monkeypatch)
    shown = {}
    for name in ("alone", "both"):
        folder = tmp_path / name
        fit_lightning(tmp_path / "root", TensorBoardLogger(folder), ROWS, is_watched=name == "both")
        (found,) = {file.parent for file in folder.glob("**/events*")}
        events = accumulator.EventAccumulator(str(found), size_guidance={"scalars": 0}).Reload()
        tags = [tag for tag in events.Tags()["scalars"] if "runtime" not in tag and "per_second" not in tag]
        shown[name] = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}
    alone, both = shown["alone"], shown["both"]
    assert {tag: both[tag] for tag in alone} == alone
    assert len(alone["loss"]) == ROWS
    assert all("/" in tag for tag in both.keys() - alone.keys())
    assert dict(both[CURVE]) == pytest.approx(losses_of(tmp_path / "root"), rel=1e-6)


def test_a_logger_that_writes_seldom_gets_the_curves_during_training(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    from lightning.pytorch.loggers import WandbLogger

    leave_undrawn(monkeypatch)
    logger = WandbLogger("both", tmp_path, id="both", offline=True, settings=wandb.Settings(console="off"))
    rows, log = [], logger.experiment.log
    monkeypatch.setattr(logger.experiment, "log", lambda row, **options: (rows.append(row), log(row, **options)))
    seen = {}

    class Looking(Module):
        def on_train_batch_end(self, *_):
            seen[self.global_step] = [row["trainer/global_step"] for row in rows if CURVE in row]

    options = {"log_every_n_steps": 8, "steps": [1, 2, 4]}
    fit_lightning(tmp_path / "root", logger, 8, is_watched=True, module=Looking(), **options)
    logger.experiment.finish()
    assert seen[4][:2] == [0, 1]
    assert [x for x, _ in read_finished(tmp_path)["both"].curve(CURVE)] == [0, 1, 2, 4, 8]
