"""Images on two ranks equal a run of one rank up to rounding, with full (DDP) and with sharded weights (FSDP2)."""

from pathlib import Path

import pytest
import yaml

from lit_layers import records
from lit_layers.cli.main import main
from tests.cli.test_first_rank_writes import files_written_by_the_second_rank
from tests.cli.test_fit_images import RECIPE
from tests.support.forked import run_forked

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_page")]
FSDP = str(Path(__file__).parents[2] / "recipes" / "trainer" / "fsdp.yaml")


@pytest.fixture
def recipe(tmp_path) -> Path:
    model = RECIPE["model"]["init_args"]
    init_args = {**model, "drop_path_rate": 0.0, "mixup": 0.0}  # no randomness that each rank would draw for itself
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({**RECIPE, "model": {**RECIPE["model"], "init_args": init_args}}))
    return path


@pytest.mark.soak
@pytest.mark.parametrize("strategy", [["--trainer.strategy", "ddp"], ["--config", FSDP]], ids=["ddp", "fsdp"])
def test_two_ranks_train_and_measure_like_one_and_only_the_first_writes(strategy, recipe, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    assert run_forked(lambda: main(["fit", "--config", str(recipe), "--root", str(one)])) == 0
    command = ["fit", "--config", str(recipe), *strategy, "--root", str(two), "--trainer.accelerator", "cpu"]
    assert files_written_by_the_second_rank([*command, "--trainer.devices", "2"], tmp_path / "log") == ([0, 0], [])
    rows = [records.rows(root / "metrics.jsonl") for root in (one, two)]
    names = {name for name in rows[1][-1] if "per_second" not in name}
    assert names >= {"train/loss", "train/grad_norm", "validation/accuracy", "validation/loss"}
    for name in names:
        found, expected = ([row[name] for row in run if name in row] for run in rows)
        assert found == pytest.approx(expected, abs=2e-4), name
    measured = [{(m.step, m.analysis): m for m in records.read(root / "measurements.jsonl")} for root in (one, two)]
    assert measured[0].keys() == measured[1].keys()
    for key, measurement in measured[1].items():
        assert measurement.error is None
        values = [
            [record.value for record in each[key].records if record.metric != "expodistance"] for each in measured
        ]
        assert values[1] == pytest.approx(values[0], rel=2e-2, abs=1e-3)
