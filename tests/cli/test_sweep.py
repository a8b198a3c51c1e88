"""`lit-layers sweep`: every cell of a grid to its end once, whatever is killed or fails, and one table of them."""

import json
import shutil
import signal
import sys
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest
import yaml

from lit_layers.cli.main import main
from lit_layers.correlate import read_runs
from lit_layers.sweep import CellFolder, cells, read_grid
from lit_layers.sweep.cells import take
from tests.cli.test_fit import RECIPE
from tests.support.forked import run_command, run_forked, run_ranks

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork and kill -9")
QUICK = Path(__file__).parents[1] / "support" / "quick_run.py"
METRIC = {"name": "validation/accuracy", "goal": "maximize"}


class Sweep:
    """A grid of quick runs, and what they noted."""

    def __init__(self, folder: Path, parameters: dict, **changes) -> None:
        self.file, self.root, self.diary = folder / "grid.yaml", folder / "runs", folder / "diary"
        self.write(parameters, **changes)

    def write(self, parameters: dict, **changes) -> None:
        command = ["${env}", "${interpreter}", str(QUICK), str(self.diary), "${args}"]
        content = {"method": "grid", "command": command, "metric": METRIC, "parameters": parameters, **changes}
        self.file.write_text(yaml.safe_dump(content, sort_keys=False))

    def run(self, *arguments: str) -> int:
        return main(["sweep", str(self.file), "--root", str(self.root), "--any_command", *arguments])

    def noted(self, what: str) -> list[str]:
        lines = self.diary.read_text().splitlines() if self.diary.exists() else []
        return [line.split(" ", 1)[1] for line in lines if line.split(" ", 1)[0] == what]

    @property
    def names(self) -> list[str]:
        return [cell.name for cell in read_grid(self.file).cells()]

    def finished(self) -> list[str]:
        grid = read_grid(self.file)
        return [cell.name for cell in grid.cells() if CellFolder(self.root, cell, grid.command).is_finished]

    @property
    def table(self) -> pd.DataFrame:
        return pd.read_csv(self.root / "sweep.csv")


@pytest.mark.slow
def test_every_cell_runs_once_and_one_table_has_them_all(tmp_path, capsys):
    sweep = Sweep(tmp_path, {"model.lr": {"values": [0.1, 0.3]}, "corpus": {"values": ["a", "b"]}})
    assert sweep.run("--workers", "2") == 0
    shown = capsys.readouterr().out
    assert "finished lr=0.3,corpus=b" in shown
    assert "sweep.csv" in shown
    assert Counter(sweep.noted("trained")) == Counter(sweep.names)
    table = sweep.table
    assert list(table.columns) == ["run", "lr", "corpus", "validation/accuracy", "best", "step", "seconds", "error"]
    assert table["run"].tolist() == sweep.names
    assert table["validation/accuracy"].tolist() == [0.5] * 4
    assert table["best"].tolist() == pytest.approx([1 / 1.2, 1 / 1.2, 1, 1])
    assert table["step"].tolist() == [20] * 4  # of the last value, not the last row
    assert (table["seconds"] > 0).all()
    assert table["error"].isna().all()
    assert sweep.run() == 0  # nothing is left to do
    assert len(sweep.noted("began")) == 4


@pytest.mark.slow
def test_a_goal_to_minimize_takes_the_lowest_as_the_best(tmp_path):
    metric = {"name": "validation/accuracy"}  # W&B minimizes where nothing is said
    sweep = Sweep(tmp_path, {"model.lr": {"values": [0.3]}}, metric=metric)
    assert sweep.run() == 0
    assert sweep.table["best"].tolist() == [0.5]


@pytest.mark.slow
def test_a_failing_cell_is_a_row_with_its_error_and_is_tried_again(tmp_path, capsys):
    sweep = Sweep(tmp_path, {"model.lr": {"values": [0.1, -1, 0.2]}})
    assert sweep.run() == 1
    sentence = "model.lr: expected a positive learning rate, got -1.0"
    said = capsys.readouterr()
    assert f"failed lr=-1: {sentence}" in said.out
    assert "1 of 3 cells failed" in said.err
    assert sweep.table["error"].tolist()[1] == sentence
    assert sweep.table["error"].notna().tolist() == [False, True, False]
    assert sweep.table["validation/accuracy"].isna().tolist() == [False, True, False]
    assert sweep.noted("trained") == ["lr=0.1", "lr=0.2"]
    (tmp_path / "repaired").touch()
    assert sweep.run() == 0
    assert sweep.noted("trained") == ["lr=0.1", "lr=0.2", "lr=-1"]


@pytest.mark.slow
def test_where_all_that_failed_diverged_the_code_is_that_of_a_run_that_does(tmp_path, capsys):
    sentence = "diverged: the loss of step 7 is nan; begin anew with a lower model.lr"
    diverges = f"print('lit-layers fit: error: {sentence}', file=sys.stderr); sys.exit(3)"
    for is_both, code, said in (
        (True, 3, "2 of 2 cells failed, 2 of them diverged;"),
        (False, 1, "1 of them diverged;"),
    ):
        script = f"import sys\nif {is_both} or '--x=1' in sys.argv: {diverges}\nsys.exit('lost')"
        (tmp_path / str(code)).mkdir()
        sweep = Sweep(
            tmp_path / str(code), {"x": {"values": [1, 2]}}, command=["${interpreter}", "-c", script, "${args}"]
        )
        assert sweep.run() == code
        assert said in capsys.readouterr().err
        assert sweep.table["error"].tolist() == [sentence, sentence if is_both else "exit code 1: lost"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("import os; print('so far', flush=True); os.kill(os.getpid(), 9)", "ended by SIGKILL: so far"),
        ("import sys; print('on the way'); sys.exit('out of memory')", "exit code 1: out of memory"),
        ("1 / 0", "exit code 1: ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", "exit code 3: no output"),
        ("pass", "no validation/accuracy in {root}/all/metrics.jsonl; there is: nothing"),
    ],
)
def test_an_error_is_the_last_that_a_run_said(script, error, tmp_path):
    command = ["${interpreter}", "-c", script, "${args}"]
    sweep = Sweep(tmp_path, {"x": {"value": 1}}, command=command)
    assert sweep.run() == 1
    assert sweep.table["error"].tolist() == [error.format(root=sweep.root)]


@pytest.mark.slow
def test_a_command_that_is_not_there_is_a_failure_too(tmp_path):
    sweep = Sweep(tmp_path, {"x": {"value": 1}}, command=["/nowhere/program", "${args}"])
    assert sweep.run() == 1
    assert sweep.table["error"].tolist() == ["exit code 127: cannot start /nowhere/program: No such file or directory"]


@pytest.mark.soak
@pytest.mark.parametrize("finished_first", [0, 2])
def test_a_killed_sweep_loses_no_finished_cell_and_runs_none_twice(finished_first, tmp_path):
    values = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    sweep = Sweep(tmp_path, {"model.lr": {"values": values}, "seconds": {"value": 1.2}})
    # While both workers have a run at its beginning: these go on.
    when = lambda: finished_first <= len(sweep.finished()) == len(sweep.noted("began")) - 2  # noqa: E731
    assert run_forked(lambda: sweep.run("--workers", "2"), when=when) == -signal.SIGKILL
    finished, began = sweep.finished(), sweep.noted("began")
    assert finished_first <= len(finished) == len(began) - 2
    assert sweep.run("--workers", "2") == 0  # waits for the runs that outlived the first call
    assert Counter(sweep.noted("trained")) == Counter(sweep.names)
    assert [name for name in finished if sweep.noted("began").count(name) > 1] == []
    assert sweep.table["error"].isna().all()


@pytest.mark.slow
def test_a_killed_run_is_a_failure_and_goes_on_at_the_next_call(tmp_path):
    script = f"import os; os.path.exists({str(tmp_path / 'repaired')!r}) or os.kill(os.getpid(), 9)"
    command = ["${interpreter}", "-c", script, "${args}"]
    sweep = Sweep(tmp_path, {"model.lr": {"values": [0.1]}}, command=command, metric=None)
    assert sweep.run() == 1
    assert list(sweep.table.columns) == ["run", "lr", "step", "seconds", "error"]
    assert sweep.table["error"].tolist() == ["ended by SIGKILL: no output"]
    (tmp_path / "repaired").touch()
    assert sweep.run() == 0
    assert json.loads((sweep.root / "lr=0.1.json").read_text())["attempts"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_sweep_lets_the_running_cells_save_and_starts_no_more(number, code, tmp_path):
    values = [0.1, 0.2, 0.3]
    sweep = Sweep(tmp_path, {"model.lr": {"values": values}, "seconds": {"value": 3600}})
    when = lambda: len(sweep.noted("began")) == 2  # noqa: E731
    assert run_forked(lambda: sweep.run("--workers", "2"), when=when, signal_number=number) == code
    assert sorted(sweep.noted("saved")) == ["lr=0.1", "lr=0.2"]
    assert sweep.noted("began") == sweep.noted("began")[:2]
    errors = ["not finished yet", "not finished yet", "not started yet"]
    assert sweep.table["error"].tolist() == errors


@pytest.mark.slow
def test_a_second_ctrl_c_ends_runs_that_do_not_stop(tmp_path):
    began, asked = tmp_path / "began", tmp_path / "asked"
    # told to stop by the first, the run goes on, and the second comes
    script = "import os, pathlib, signal, time\ndef deaf(*_):\n"
    script += f" pathlib.Path({str(asked)!r}).touch(); time.sleep(0.5); os.kill(os.getppid(), signal.SIGINT)\n"
    script += f"signal.signal(signal.SIGTERM, deaf); pathlib.Path({str(began)!r}).touch()\nwhile True: time.sleep(60)"
    command = ["${interpreter}", "-c", script, "${args}"]
    sweep = Sweep(tmp_path, {"x": {"value": 1}}, command=command, metric=None)
    line = ["sweep", sweep.file, "--any_command", "--root", sweep.root]
    ended = run_command(line, when=began.exists, signal_number=signal.SIGINT)
    assert ended.returncode == 130
    assert asked.exists()
    assert "run the same command again to go on" in ended.stderr
    assert json.loads((sweep.root / "all.json").read_text())["code"] == -signal.SIGKILL
    assert sweep.table["error"].tolist() == ["not finished yet"]


@pytest.mark.slow
def test_shards_share_the_cells_and_the_last_writes_the_whole_table(tmp_path, monkeypatch):
    monkeypatch.setattr(cells, "_LOOK_AGAIN", -1)  # no such wait where a cell is free
    sweep = Sweep(tmp_path, {"model.lr": {"values": [0.1, 0.2, 0.3, 0.4, 0.5]}})
    assert sweep.run("--shard", "1/2") == 0
    assert sweep.noted("trained") == ["lr=0.2", "lr=0.4"]
    assert sweep.table["error"].tolist()[0] == "not started yet"
    assert sweep.run("--shard", "0/2") == 0
    assert sweep.noted("trained") == ["lr=0.2", "lr=0.4", "lr=0.1", "lr=0.3", "lr=0.5"]
    assert sweep.table["error"].isna().all()


@pytest.mark.slow
def test_two_sweeps_of_one_folder_share_its_cells_and_try_a_failing_one_once(tmp_path):
    sweep = Sweep(tmp_path, {"model.lr": {"values": [0.1, 0.2, -1, 0.3, 0.4]}, "seconds": {"value": 0.4}})
    assert run_ranks(lambda: sweep.run("--workers", "1")) == [1, 1]
    assert Counter(sweep.noted("trained")) == Counter(name for name in sweep.names if name != "lr=-1")
    assert json.loads((sweep.root / "lr=-1.json").read_text())["attempts"] == 1
    assert sweep.table["error"].notna().sum() == 1


@pytest.mark.slow
def test_a_cell_is_no_rank_of_the_sweeps_own_job_and_has_a_gpu_to_itself(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    monkeypatch.setenv("WANDB_RUN_ID", "abc")
    sweep = Sweep(tmp_path, {"model.lr": {"values": [0.1, 0.2]}, "seconds": {"value": 0.5}})
    assert sweep.run("--workers", "2") == 0
    said = [(sweep.root / f"{name}.log").read_text() for name in sweep.names]
    assert said == ["gpus 4 id None\n", "gpus 6 id None\n"]


def finished_sweep(folder: Path) -> Sweep:
    """Without running anything."""
    sweep = Sweep(folder, {"model.lr": {"values": [0.1, 0.2]}, "seconds": {"value": 0}})
    sweep.root.mkdir()
    grid = read_grid(sweep.file)
    for cell in grid.cells():
        folder = CellFolder(sweep.root, cell, grid.command)
        folder.log.touch()
        folder.started()
        folder.ended(0, 1.0, asked=False, output_from=0)
        folder.folder.mkdir()
        (folder.folder / "metrics.jsonl").write_text('{"step":3,"validation/accuracy":"nan"}\n')
    return sweep


def test_a_finished_sweep_is_told_at_once_and_a_score_that_is_none_stays_none(tmp_path):
    sweep = finished_sweep(tmp_path)
    assert sweep.run() == 0
    assert sweep.table[["validation/accuracy", "best", "error"]].isna().all(axis=None)
    assert sweep.table["step"].tolist() == [3, 3]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"parameters": {"model.lr": {"values": [0.1, 0.2]}, "seconds": {"value": 1}}}, "seconds = 0, got 1; choose"),
        ({"command": ["other", "${args}"]}, "got 'other ${args}'; choose another root, or delete that folder"),
    ],
)
def test_a_changed_sweep_is_not_mixed_with_what_is_there(change, sentence, tmp_path, capsys):
    sweep = finished_sweep(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in sweep.root.rglob("*")}
    sweep.write(**{"parameters": {"model.lr": {"values": [0.1, 0.2]}, "seconds": {"value": 0}}, **change})
    assert sweep.run() == 2
    said = capsys.readouterr().err
    assert f"{sweep.root / 'lr=0.1'} was made with" in said
    assert sentence in said
    assert {path: path.stat().st_mtime_ns for path in sweep.root.rglob("*")} == before


def test_an_edited_recipe_is_another_sweep(tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("seed_everything: 0")
    sweep = Sweep(tmp_path, {"model.lr": {"values": [0.1]}})
    command = ["${env}", "${interpreter}", str(QUICK), str(sweep.diary), f"--config={recipe}", "${args}"]
    sweep.write({"model.lr": {"values": [0.1]}}, command=command)
    assert sweep.run() == 0
    assert sweep.run() == 0
    recipe.write_text("seed_everything: 1")
    assert sweep.run() == 2
    assert f"recipes: {sweep.root / 'lr=0.1'} was made with {recipe} = " in capsys.readouterr().err


def test_more_values_add_cells_and_leave_the_others(tmp_path):
    sweep = finished_sweep(tmp_path)
    sweep.write({"model.lr": {"values": [0.3, 0.1, 0.2]}, "seconds": {"value": 0}})
    assert len(sweep.finished()) == 2
    assert sweep.run("--shard", "1/3") == 0


def test_a_failed_cell_without_a_run_folder_takes_a_corrected_command(tmp_path):
    sweep = finished_sweep(tmp_path)
    grid = read_grid(sweep.file)
    cell = CellFolder(sweep.root, grid.cells()[0], grid.command)
    cell.ended(2, 1.0, asked=False, output_from=0)
    shutil.rmtree(cell.folder)
    CellFolder(sweep.root, grid.cells()[0], ["other", "${args}"]).refuse_another()


def test_a_cell_that_is_taken_is_taken_once(tmp_path):
    held = take(tmp_path / "lock")
    assert held is not None
    assert take(tmp_path / "lock") is None
    held.close()
    again = take(tmp_path / "lock")
    assert again is not None
    again.close()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--workers", "0"], "workers: expected at least 1, got 0"),
        (["--workers", "many"], "workers: expected a whole number, got many"),
        (["--shard", "2/2"], "shard: expected i/n with i from 0 to n - 1, got 2/2"),
        (["--shard", "half"], "shard: expected auto or i/n, such as 0/4, got 'half'"),
        (["--shards", "0/2"], "unknown option --shards; did you mean --shard?"),
        (["--root", "/proc/nowhere"], "root: cannot make /proc/nowhere: no such file"),
        (["--root", __file__], "not a directory"),
    ],
)
def test_wrong_options_are_answered_with_one_sentence(arguments, sentence, tmp_path, capsys):
    sweep = Sweep(tmp_path, {"model.lr": {"values": [0.1]}})
    assert sweep.run(*arguments) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert said[0].startswith("lit-layers sweep: error: ")
    assert sentence in said[0]
    assert not sweep.diary.exists()


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"model.drop_path_rat": {"values": [0.1]}}, "drop_path_rat=0.1: unknown option --model.drop_path_rat"),
        (
            {"model.drop_path_rate": {"values": [0.1, "wide"]}},
            "=wide: model.drop_path_rate: expected a number",
        ),
        ({"model.drop_path_rate": {"values": [0.1, 7]}}, "=7: model.drop_path_rate: expected a share of at least 0"),
    ],
)
def test_options_of_fit_are_read_before_the_first_cell_runs(parameters, sentence, tmp_path, capsys):
    command = ["${env}", "lit-layers", "fit", "--config", "quickstart/vit", "${args}"]
    sweep = Sweep(tmp_path, parameters, command=command)
    assert main(["sweep", str(sweep.file), "--root", str(sweep.root)]) == 2
    assert sentence in capsys.readouterr().err
    assert not list(sweep.root.iterdir())


def test_options_of_another_program_that_has_a_fit_are_its_own(tmp_path):
    program = tmp_path / "other"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/told\n')
    program.chmod(0o755)
    sweep = Sweep(tmp_path, {"epochs": {"value": 3}}, command=[str(program), "fit", "${args}"], metric=None)
    sweep.run()
    assert (tmp_path / "told").read_text().startswith("fit --epochs=3")


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("lr=0.1.json", "{", "lr=0.1.json: not valid JSON"),
        ("lr=0.1.json", '{"lr": 0.1}', "lr=0.1.json: state: this field is missing; choose another root"),
        ("lr=0.1/config.yaml", "", "is there and of no sweep; choose another root"),
    ],
)
def test_what_is_there_and_not_ours_is_left_alone(name, content, sentence, tmp_path, capsys):
    sweep = Sweep(tmp_path, {"model.lr": {"values": [0.1]}})
    (sweep.root / name).parent.mkdir(parents=True)
    (sweep.root / name).write_text(content)
    assert sweep.run() == 2
    assert sentence in capsys.readouterr().err
    assert not sweep.diary.exists()


def test_a_file_that_is_not_there_is_named(tmp_path, capsys):
    assert main(["sweep", str(tmp_path / "none.yaml"), "--root", str(tmp_path / "runs")]) == 2
    assert f"cannot read {tmp_path / 'none.yaml'}: no such file or directory" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.soak
def test_real_cells_are_run_folders_that_correlate_reads(tmp_path, corpus):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({**RECIPE, "corpus": str(corpus), "root": "unused"}))
    grid = tmp_path / "grid.yaml"
    command = ["${env}", "lit-layers", "fit", "--config", str(recipe), "${args}"]
    # The second cell has options that can be read, and is refused when its data meet its model.
    parameters = {"model.lr": {"values": [0.01]}, "data.num_tokens": {"values": [16, 32]}}
    metric = {"name": "validation/loss", "goal": "minimize"}
    content = {"method": "grid", "command": command, "parameters": parameters, "metric": metric}
    grid.write_text(yaml.safe_dump(content))
    root = tmp_path / "runs"
    assert main(["sweep", str(grid), "--root", str(root)]) == 1
    table = pd.read_csv(root / "sweep.csv")
    cell = "num_tokens=16,lr=0.01"
    assert table["run"].tolist() == [cell, "num_tokens=32,lr=0.01"]
    assert table["error"].tolist()[1].startswith("data.num_tokens: expected at most 16, the model's context, got 32")
    rows = [json.loads(line) for line in (root / cell / "metrics.jsonl").read_text().splitlines()]
    losses = [row["validation/loss"] for row in rows if "validation/loss" in row]
    assert table["validation/loss"].tolist()[0] == pytest.approx(losses[-1])
    assert table["best"].tolist()[0] == pytest.approx(min(losses))
    assert json.loads((root / cell / "run.json").read_text())["run"] == cell
    for copy in ("lr=0.02", "lr=0.03"):  # three models are the fewest to correlate
        shutil.copytree(root / cell, root / copy)
        measured = root / copy / "measurements.jsonl"
        measured.write_text(measured.read_text().replace(f'"run":"{cell}"', f'"run":"{copy}"'))
        table.loc[len(table)] = [copy, *table.iloc[0].tolist()[1:]]
    table.to_csv(root / "sweep.csv", index=False)
    found = read_runs([root], metric="trajectory/line_shape_score", score=f"{root / 'sweep.csv'}:validation/loss")
    assert sorted(found.frame["model"]) == ["lr=0.02", "lr=0.03", cell]
    assert found.frame["validation/loss"].tolist() == pytest.approx([losses[-1]] * 3)
