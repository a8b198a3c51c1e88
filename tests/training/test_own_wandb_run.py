"""The W&B run of a user's own training: curves, heat maps, table, tokens and config of the measurements are in it."""

import pytest
import torch

import lit_layers
from lit_layers import analyses as every
from lit_layers.errors import InputError
from lit_layers.report import own_wandb_run
from tests.support.listed_batches import Listed
from tests.support.tiny_models import tiny
from tests.support.undrawn import leave_undrawn
from tests.test_wandb_mirror import read_runs

wandb = pytest.importorskip("wandb")
# W&B leaves temporary folders of its media to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:Implicitly cleaning up:ResourceWarning")
STEPS = range(7)


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


@pytest.mark.slow
def test_a_run_of_ones_own_gets_all_that_the_mirror_shows(tmp_path, monkeypatch):
    leave_undrawn(monkeypatch)
    own = wandb.init(mode="offline", dir=str(tmp_path), settings=wandb.Settings(console="off", silent=True))
    own.log({"loss": 3.0})
    trained(tmp_path / "run", [own])
    own.log({"loss": 2.0})
    own.finish()
    (run,) = read_runs(tmp_path).values()
    assert [value for _, value in run.curve("loss")] == [3.0, 2.0]
    records = lit_layers.records.frame(tmp_path / "run" / "measurements.jsonl")
    losses = records[(records["metric"] == "logit_lens_loss") & (records["layer"] == 1)]
    assert run.curve("lens/logit_lens_loss/layer_01") == [*zip(losses["step"], losses["value"], strict=True)]
    assert run.step_metric("lens/logit_lens_loss/layer_01") == "trainer/global_step"
    assert dict(run.curve("tokens"))[3] == 300
    assert any(name.endswith("/layer_mean") for name in run.names())
    assert len(run.media("image-file")["coupling/coupling_pair/k=2/matrix"]) == len(STEPS)
    assert len(run.media("image-file")["lens/logit_lens_loss/over_layers"]) == 1
    assert len(run.tables["emergence"]["data"]) == len(records)
    assert "emergence_times" in run.tables
    config = run.config["lit_layers"]["analyses"]
    assert config["coupling"]["init_args"]["k"] == [2]
    # Nothing that a person does not plot: no pairs of layers, no singular values, no diagnostics.
    assert not [n for n in run.names() if "other_layer" in n or "index=" in n or "min_gap" in n]


def test_other_loggers_get_the_tokens_and_what_is_plotted_or_all_of_it(tmp_path):
    class Note:
        def __init__(self):
            self.names: set[str] = set()

        def log_metrics(self, metrics, step=None):
            self.names |= metrics.keys()

    plotted, whole = Note(), Note()
    trained(tmp_path / "one", [plotted])
    trained(tmp_path / "two", [whole], scalars="all")
    assert "tokens" in plotted.names
    assert plotted.names < whole.names
    assert any("singular_value" in name for name in whole.names - plotted.names)
    assert not any("other_layer" in name for name in whole.names)
    with pytest.raises(InputError, match="scalars: expected one of plotted, all, got 'few'"):
        trained(tmp_path / "three", [plotted], scalars="few")


def test_what_fails_at_wandb_ends_no_training(tmp_path, monkeypatch, caplog):
    own = wandb.init(mode="disabled")
    monkeypatch.setattr(type(own), "log", lambda *_, **__: 1 / 0)
    trained(tmp_path / "run", [own])
    own.finish()
    assert "W&B: " in caplog.text
    assert "is not logged at step 0" in caplog.text
    assert len(lit_layers.records.read(tmp_path / "run" / "measurements.jsonl")) == 2 * len(STEPS)


@pytest.mark.slow
def test_a_trainer_of_transformers_that_reports_to_wandb_has_its_run_for_a_logger(monkeypatch):
    assert own_wandb_run.current_runs() == []
    monkeypatch.setattr(wandb, "run", run := object())
    assert own_wandb_run.current_runs() == [run]
    assert own_wandb_run.run_behind(run) is None  # which is no run of W&B


def test_a_run_that_is_finished_gets_nothing_and_ends_no_training(tmp_path, caplog):
    own = wandb.init(mode="offline", dir=str(tmp_path), settings=wandb.Settings(console="off", silent=True))
    own.finish()
    trained(tmp_path / "run", [own])
    assert "the run gets no measurements" in caplog.text
    assert len(lit_layers.records.read(tmp_path / "run" / "measurements.jsonl")) == 2 * len(STEPS)
