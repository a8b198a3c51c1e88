"""`lit-layers fit --resume`: a run that was killed at any moment, any number of times, ends as if uninterrupted."""

import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

from lit_layers import records
from lit_layers.analyses import Coupling
from lit_layers.cli.main import main
from lit_layers.errors import InputError
from lit_layers.measuring import one_model
from lit_layers.training import LitCausalLM, resuming, run_folder
from lit_layers.training.resuming import FACTS, STATE, resume_point
from lit_layers.training.run_folder import RunFolder, saved_steps, step_folder
from tests.cli.test_fit import RECIPE
from tests.support.forked import run_forked
from tests.support.read_wandb import read_finished
from tests.support.undrawn import leave_undrawn

pytestmark = pytest.mark.usefixtures("no_page")
LAST = 13


@pytest.fixture(scope="module", autouse=True)
def no_pictures() -> Iterator[None]:
    """Do not draw pictures for W&B: these tests compare numbers, and each fork would start its own renderer."""
    with pytest.MonkeyPatch.context() as patch:
        leave_undrawn(patch)
        yield


@pytest.fixture(scope="module")
def recipe(tmp_path_factory, corpus) -> Path:
    rates = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
    model = RECIPE["model"]["init_args"]
    options = {
        **RECIPE,
        "corpus": str(corpus),
        "steps": {"every": 5},
        "resume_every": 3,
        "trainer": {**RECIPE["trainer"], "max_steps": LAST, "accumulate_grad_batches": 2, "val_check_interval": 6},
        "model": {**RECIPE["model"], "init_args": {**model, "config": {**model["config"], **rates}}},
        "wandb": {"class_path": "lit_layers.report.WandbMirror", "init_args": {"mode": "offline"}},
    }
    path = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    path.write_text(yaml.safe_dump(options))
    return path


def fit(recipe: Path, root: Path, *arguments: str, **options) -> int:
    return run_forked(lambda: main(["fit", "--config", str(recipe), "--root", str(root), *arguments]), **options)


TIMED = ("train/tokens_per_second",)


def results_of(root: Path) -> dict:
    """Return every result that must not depend on interruptions. Speeds and durations are left out."""
    weights = {step: (step_folder(root, step) / "model.safetensors").read_bytes() for step in saved_steps(root)}
    counting = records.latest(records.read(root / "measurements.jsonl"))
    measured = sorted(counting, key=lambda m: (m.step or 0, m.analysis))
    run = json.loads((root / "run.json").read_text())
    last = resume_point(root, "last")
    assert last is not None
    return {
        "weights": {step: hashlib.sha256(content).hexdigest() for step, content in weights.items()},
        "optimizer": torch.load(last.state, weights_only=True)["optimizer_states"],
        "losses": [{n: v for n, v in row.items() if n not in TIMED} for row in records.rows(root / "metrics.jsonl")],
        "measured": [
            (m.step, m.tokens, m.analysis, m.error, m.records, m.provenance["weights_hash"]) for m in measured
        ],
        "curves": curves(root, run["id"]),
        "last step": run["last_step"],
    }


def curves(root: Path, run_id: str) -> dict[str, list[tuple]]:
    """Return every numeric W&B curve, read after W&B's own process has ended."""
    run, found = read_finished(root)[run_id], {}
    for name in run.names():
        points = run.curve(name, x="trainer/global_step")
        if (
            name not in (*TIMED, "tokens", "trainer/global_step")
            and points
            and all(isinstance(value, int | float) for _, value in points)
        ):
            found[name] = sorted(set(points))  # a row that was being sent at a kill is sent a second time
    return found


def assert_equal(found: dict, expected: dict) -> None:
    for key in expected.keys() - {"optimizer"}:
        assert found[key] == expected[key], key
    torch.testing.assert_close(found["optimizer"], expected["optimizer"], rtol=0, atol=0)


@pytest.fixture(scope="module")
def uninterrupted(recipe, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("runs") / "whole"
    assert fit(recipe, root) == 0
    return root


@pytest.mark.nightly
def test_runs_killed_at_random_moments_end_as_if_uninterrupted(recipe, uninterrupted, tmp_path):
    expected, draw = results_of(uninterrupted), random.Random(0)
    assert len(expected["losses"]) == LAST
    assert len(expected["curves"]) >= 15
    assert sum("validation/loss" in row for row in expected["losses"]) == 2 * LAST // 6 + 1  # and at its end
    seconds, kills, attempts = 4.0, 0, itertools.count()
    while kills < 20:
        root = tmp_path / f"killed_{next(attempts)}"
        for _ in range(5):
            started = time.monotonic()
            ended = fit(recipe, root, "--resume", "last", kill_after=draw.uniform(0.05, 1.0) * seconds)
            kills += ended == -signal.SIGKILL
            if ended == 0:
                # Other processes change how long a run takes, so moments are drawn within the last duration.
                seconds = 0.9 * (time.monotonic() - started)
                break
            assert ended == -signal.SIGKILL
            seconds *= 1.1
        else:
            assert fit(recipe, root, "--resume", "last") == 0
        assert_equal(results_of(root), expected)


def signal_at(owner, name: str, number: int, *, after: bool = False, signal_number: int = signal.SIGKILL):
    """Replace a function of a module or class so that its process signals itself at call `number`, or at the first."""
    real, calls = getattr(owner, name), itertools.count(1)

    def arm(first: bool) -> None:
        def call_and_signal(*arguments, **options):
            last = next(calls) == (1 if first else number)
            if last and not after:
                os.kill(os.getpid(), signal_number)
            result = real(*arguments, **options)
            if last and after:
                os.kill(os.getpid(), signal_number)
            return result

        setattr(owner, name, call_and_signal)

    return arm


def torn_line(file, line) -> None:
    """Write half a line of measurements, then kill the process."""
    whole = json.dumps({key: str(value) for key, value in line.items()})
    file.write(whole[: len(whole) // 2].encode())
    os.kill(os.getpid(), signal.SIGKILL)


MOMENTS = {
    "before the run is described": signal_at(RunFolder, "_describe", 1),
    "between the description of a run and its options": signal_at(run_folder, "write_json", 1, after=True),
    "inside the save of a step": signal_at(run_folder, "save", 3, after=True),  # before the rename
    "before a step's folder is renamed": signal_at(run_folder, "sync", 9),
    "inside the save of a resume checkpoint": signal_at(resuming, "_save", 3),
    "between a resume checkpoint and the removal of the oldest": signal_at(resuming, "write_folder", 4, after=True),
    "inside an analysis": signal_at(Coupling, "update", 3),
    "between two analyses of a step": signal_at(one_model.Outcome, "measurement", 4),
    "inside a line of measurements": lambda first: setattr(records, "write_line", torn_line),
    "inside a validation": signal_at(LitCausalLM, "validation_step", 3),
    "before a row of scalars is closed": signal_at(records.ScalarLog, "close", 5),
}

PREEMPTION = signal_at(LitCausalLM, "training_step", 15, signal_number=signal.SIGTERM)  # step 8, two batches each


@pytest.mark.soak
def test_one_run_killed_at_several_critical_moments_ends_as_if_uninterrupted(recipe, uninterrupted, tmp_path):
    root = tmp_path / "run"
    for moment, arm in list(MOMENTS.items())[::4]:

        def killed(arm=arm) -> int:
            arm(True)
            return main(["fit", "--config", str(recipe), "--root", str(root), "--resume", "last"])

        assert run_forked(killed) == -signal.SIGKILL, moment
    assert fit(recipe, root, "--resume", "last") == 0
    assert_equal(results_of(root), results_of(uninterrupted))


@pytest.mark.nightly
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_killed_twice_at_a_critical_moment_ends_as_if_uninterrupted(moment, recipe, uninterrupted, tmp_path):
    root = tmp_path / "run"

    def killed() -> int:
        MOMENTS[moment](False)
        return main(["fit", "--config", str(recipe), "--root", str(root), "--resume", "last"])

    assert run_forked(killed) == -signal.SIGKILL
    assert run_forked(killed) in (-signal.SIGKILL, 0)  # a second kill, at whatever step that moment is now
    assert fit(recipe, root, "--resume", "last") == 0
    assert_equal(results_of(root), results_of(uninterrupted))
    hidden = {path.name for path in root.iterdir() if path.name.startswith(".")}
    assert (root / "config.yaml").is_file()
    assert hidden == {path.name for path in uninterrupted.iterdir() if path.name.startswith(".")}


@pytest.mark.soak  # in the quick tier tests/training/test_images.py resumes
@pytest.mark.slow
def test_resuming_at_an_earlier_step_repeats_the_same_steps_and_drops_later_ones(recipe, uninterrupted, tmp_path):
    root = tmp_path / "run"
    shutil.copytree(uninterrupted, root)
    back = LAST - LAST % 3
    shutil.copytree(step_folder(root / "resume", back), step_folder(root / "resume", LAST + 5))
    assert fit(recipe, root, "--resume", str(back)) == 0
    assert saved_steps(root / "resume") == [back, LAST]
    found, expected = results_of(root), results_of(uninterrupted)
    for key in ("weights", "losses", "measured"):
        assert found[key] == expected[key], key


@pytest.mark.soak
@pytest.mark.slow
def test_a_corrupt_checkpoint_is_reported_and_the_previous_one_is_used(recipe, uninterrupted, tmp_path, caplog, capfd):
    root = tmp_path / "torn"
    shutil.copytree(uninterrupted, root)
    steps = saved_steps(root / "resume")
    assert steps == [LAST - LAST % 3, LAST]
    state = step_folder(root / "resume", LAST) / STATE
    state.write_bytes(state.read_bytes()[:-100])
    point = resume_point(root, "last")
    assert point is not None
    assert point.step == steps[0]
    assert f"{state} is corrupt" in caplog.text
    assert main(["fit", "--config", str(recipe), "--root", str(root), "--resume", str(LAST)]) == 2
    assert f"{state} is corrupt" in capfd.readouterr().err
    (step_folder(root / "resume", steps[0]) / STATE).write_bytes(b"")
    last = step_folder(root, LAST)
    begin = f"is whole; go on in another root with --model.init_from {last}$"
    with pytest.raises(InputError, match=f"none of the checkpoints in .* {begin}"):
        resume_point(root, "last")
    state = step_folder(root / "resume", steps[0]) / STATE
    torch.save({"harmful": Path}, state)  # a class with a correct hash
    facts = {"step": steps[0], "sha256": hashlib.sha256(state.read_bytes()).hexdigest()}
    (state.parent / FACTS).write_text(json.dumps(facts))
    assert main(["fit", "--config", str(recipe), "--root", str(root), "--resume", "last"]) == 2
    output = capfd.readouterr().err
    assert f"fit: error: {state} is no state of a training, or holds more than tensors" in output
    assert "weights_only" not in output
