"""The workspace that is made from a run names the curves and pictures that its mirror logs."""

from pathlib import Path

import pytest

from lit_layers.cli.main import main
from lit_layers.errors import InputError
from lit_layers.report.wandb_mirror import save_workspace, workspace_of
from tests.support.runs import make_run
from tests.support.undrawn import leave_undrawn
from tests.test_wandb_mirror import mirror_all

pytest.importorskip("wandb")
# W&B leaves temporary folders of its media to the garbage collector.
pytestmark = [pytest.mark.filterwarnings("ignore:Implicitly cleaning up:ResourceWarning")]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "quickstart", steps=(0, 1, 2, 4), layers=3)


def test_every_curve_and_picture_of_the_charts_is_one_that_the_mirror_logs(root, monkeypatch):
    leave_undrawn(monkeypatch)
    logged = mirror_all(root)
    names, pictures = {*logged.names()}, {*logged.media("image-file")}
    spec = workspace_of(root, "me", "p")._to_model().model_dump(by_alias=True, mode="json")["spec"]
    sections = spec["section"]["panelBankConfig"]["sections"]
    panels = [(panel["viewType"], panel["config"]) for section in sections for panel in section["panels"]]
    lines = [config for kind, config in panels if kind == "Run History Line Plot"]
    drawn = {curve for config in lines for curve in config["metrics"]}
    assert drawn <= names, drawn - names
    assert {"coupling/coupling/k=4", "trajectory/line_shape_score/layer_02", "train/loss"} <= drawn
    assert all(config["xAxis"] == "trainer/global_step" and config["xLogScale"] for config in lines)
    media = {key for _, config in panels for key in config.get("mediaKeys", [])}
    assert media == pictures, media ^ pictures
    assert sum(key.endswith("/over_layers") for key in media) > 2
    (layered,) = [config["metrics"] for config in lines if config["chartTitle"] == "Logit-lens loss (nats)"]
    assert layered == [f"lens/logit_lens_loss/layer_{n:02d}" for n in range(4)], "a chart has all layers of a metric"


def test_a_place_that_is_none_is_refused_and_a_run_without_steps_has_no_charts(root, tmp_path, capsys):
    for place in ("project", "a/b/c", "/p", "e/"):
        with pytest.raises(InputError, match="expected ENTITY/PROJECT at W&B"):
            save_workspace(root, place)
    assert main(["report", str(root), "--workspace", "a/b/c", "--root", str(tmp_path)]) == 2
    assert "workspace: expected ENTITY/PROJECT" in capsys.readouterr().err
    (tmp_path / "measurements.jsonl").write_text("")
    with pytest.raises(InputError, match="nothing was measured at a step there"):
        workspace_of(tmp_path, "e", "p")
