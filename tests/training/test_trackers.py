"""The run of a user's own training: curves, heat maps, table, tokens and options of the measurements are in it."""

import pytest
import torch

import lit_layers
from lit_layers import analyses as every
from lit_layers.errors import InputError
from tests.support.listed_batches import Listed
from tests.support.read_wandb import read_finished
from tests.support.tiny_models import tiny
from tests.support.undrawn import leave_undrawn

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


def numbers_of(root):
    return lit_layers.records.frame(root / "measurements.jsonl")


def losses_of(root) -> dict[int, float]:
    """What is shown of the first layer, from the run's own file."""
    table = numbers_of(root)
    rows = table[(table["metric"] == "logit_lens_loss") & (table["layer"] == 1)]
    return dict(zip(rows["step"], rows["value"], strict=True))


def nothing_that_nobody_plots(names) -> bool:
    return not [name for name in names if "other_layer" in name or "index" in name or "min_gap" in name]


@pytest.mark.soak
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
    assert len(run.media("image-file")["lens/logit_lens_loss/over_layers"]) == 2  # of four steps, and of all
    assert len(run.tables["lit_layers/emergence"]["data"]) == len(numbers_of(tmp_path / "run"))
    config = run.config["lit_layers"]["analyses"]
    assert config["coupling"]["init_args"]["k"] == [2]
    assert nothing_that_nobody_plots(run.names())


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
    left_out = ("singular_value", "statistic=median", "distance=0", "random_coupling")
    assert not [name for name in plotted.names for words in left_out if words in name]
    assert not any("other_layer" in name for name in whole.names)
    with pytest.raises(InputError, match="scalars: expected one of plotted, all, got 'few'"):
        trained(tmp_path / "three", [plotted], scalars="few")


def all_is_measured(root) -> bool:
    return len(lit_layers.records.read(root / "measurements.jsonl")) == 2 * len(STEPS)


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
    assert "Run: step 0 is not logged" in caplog.text
    assert all_is_measured(tmp_path / "run")
