"""The loggers of a user's training get curves, and a failing logger does not end the training."""

import pytest
import torch

import lit_layers
from lit_layers import analyses as every
from lit_layers.errors import InputError
from tests.support.listed_batches import Listed
from tests.support.tiny_models import tiny

STEPS = range(7)


def measured():
    texts = Listed({"input_ids": torch.arange(24).reshape(2, 12) + 3})
    return [every.Lens(batches=texts), every.Coupling(batches=texts, k=(2,), num_prompts=1)]


def trained(root, loggers, **options) -> None:
    """Run a loop that changes the model a little at each of six steps."""
    model = tiny("gpt2")
    with lit_layers.watch(
        model, measured(), steps=[*STEPS], root=root, loggers=loggers, tokens_per_step=100, **options
    ) as watched:
        for _ in STEPS[1:]:
            with torch.no_grad():
                model.lm_head.weight.mul_(1.05)
            watched.step()


class Note:
    def __init__(self):
        self.curves: dict[str, dict[int, float]] = {}

    @property
    def names(self) -> set[str]:
        return {*self.curves}

    def log_metrics(self, metrics, step=None):
        for name, value in metrics.items():
            self.curves.setdefault(name, {})[step] = value


def test_other_loggers_get_the_tokens_and_the_plotted_or_all_curves(tmp_path):
    plotted, whole = Note(), Note()
    trained(tmp_path / "one", [plotted])
    trained(tmp_path / "two", [whole], scalars="all")
    assert plotted.curves["lit_layers/tokens"] == {step: 100 * step for step in STEPS}
    table = lit_layers.records.frame(tmp_path / "one").query("metric == 'logit_lens_loss' and layer == 1")
    losses = dict(zip(table["step"], table["value"], strict=True))
    assert plotted.curves["lens/logit_lens_loss/layer_01"] == losses
    assert all("/" in name for name in whole.names)
    assert plotted.names < whole.names
    assert any("singular_value" in name for name in whole.names - plotted.names)
    left_out = ("singular_value", "statistic=median", "distance=0", "random_coupling")
    assert not [name for name in plotted.names for words in left_out if words in name]
    assert not any("other_layer" in name for name in whole.names)
    with pytest.raises(InputError, match="scalars: expected one of plotted, all, got 'few'"):
        trained(tmp_path / "three", [plotted], scalars="few")


def test_a_failing_logger_ends_no_training(tmp_path, caplog):
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
    assert len(lit_layers.records.read(tmp_path / "run" / "measurements.jsonl")) == 2 * len(STEPS)
    assert "Broken: step 0 is not logged: disk full" in caplog.text
    assert "WandbLogger: step 0 is not logged: no route" in caplog.text
    assert len(asked) == 1, "it is not asked again"
