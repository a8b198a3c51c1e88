"""How alike states are, against brute force in numpy: steps, seeds, gaps, and files of somebody else."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.numpy import save_file
from scipy import stats
from scipy.linalg import subspace_angles

from lit_layers import measure, prompt_values, run_data
from lit_layers.analyses import PooledStates
from lit_layers.cli.main import main
from lit_layers.clock.state_similarity import (
    CKA,
    COLUMNS,
    MOST_STEPS,
    PROCRUSTES,
    PROMPT_SUBSPACE,
    SUBSPACE,
    KeptStates,
    kept_states,
    over_the_runs,
    sentences,
    settling_steps,
    similar_states,
    similarity_of_steps,
    step_maps,
)
from lit_layers.figures.chart import Panels, rows_of
from lit_layers.figures.labels import value
from lit_layers.prompt_values import ValueFiles
from lit_layers.records import Store
from lit_layers.report import write_report
from tests.support.random_text import RandomText
from tests.support.tiny_models import tiny
from tests.support.undrawn import leave_undrawn

PROMPTS, NUM_BATCHES = 12, 3
STEPS = (0, 1, 2, 4)


def model_at(step: int, seed: int):
    """A tiny model whose weights move along one direction as steps go on."""
    torch.manual_seed(seed)
    model = tiny("gpt2")
    noise = torch.Generator().manual_seed(100 + seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * step * torch.randn(parameter.shape, generator=noise)
    return model


def run_of(root: Path, *, seed: int = 0, steps: tuple[int, ...] = STEPS, megabytes: int = 8) -> Path:
    store = Store(root / "measurements.jsonl", values=ValueFiles(root, megabytes, checkpoints=len(steps)))
    for step in steps:
        analysis = PooledStates(batches=RandomText(num_batches=NUM_BATCHES))
        store.add(measure(model_at(step, seed), analysis, run=root.name, step=step, raises=True))
    return root


def shares_of_full_model(root: Path):
    (kept,) = kept_states(root, root.name, [*Store(root / "measurements.jsonl")])
    return kept


def pooled(step: int, seed: int) -> list[np.ndarray]:
    """The mean state of each prompt at each layer but the last, by the model's own hidden states."""
    vectors = []
    for batch in RandomText(num_batches=NUM_BATCHES):
        with torch.no_grad():
            states = model_at(step, seed).transformer(**batch, output_hidden_states=True).hidden_states
        mask = batch["attention_mask"][..., None].double()
        vectors.append([(each.double() * mask).sum(1) / mask.sum(1) for each in states[:-1]])
    return [torch.cat(of_layer).numpy() for of_layer in zip(*vectors, strict=True)]


def debiased_cka(x: np.ndarray, y: np.ndarray) -> float:
    """By the definition of HSIC_1: sums over different rows."""

    def hsic(k: np.ndarray, m: np.ndarray) -> float:
        n, one = len(k), np.ones(len(k))
        k, m = k - np.diag(np.diag(k)), m - np.diag(np.diag(m))
        middle = (one @ k @ one) * (one @ m @ one) / ((n - 1) * (n - 2))
        return np.trace(k @ m) + middle - 2 / (n - 2) * (one @ k @ m @ one)

    k, m = x @ x.T, y @ y.T
    return hsic(k, m) / np.sqrt(hsic(k, k) * hsic(m, m))


def truth(metric: str, x: np.ndarray, y: np.ndarray) -> float:
    if metric == CKA:
        return debiased_cka(x, y)
    x, y = x - x.mean(0), y - y.mean(0)
    if metric == PROCRUSTES:
        shared = np.linalg.svd(x.T @ y, compute_uv=False).sum()
        return 2 - 2 * shared / np.linalg.norm(x) / np.linalg.norm(y)
    bases = [np.linalg.svd(side if metric == SUBSPACE else side.T)[2][:8].T for side in (x, y)]
    return float((np.cos(subspace_angles(*bases)) ** 2).mean())


def test_steps_and_seeds_are_as_alike_as_their_own_hidden_states(tmp_path):
    table = similar_states([run_of(tmp_path / f"seed{seed}", seed=seed) for seed in (0, 1)])
    states = {(f"seed{seed}", step): pooled(step, seed) for seed in (0, 1) for step in STEPS}
    last = len(states["seed0", 0])  # which transformers gives behind the norm alone
    within = table["run"] == table["other_run"]
    assert len(table[within]) == 2 * 6 * (last + 1) * 3
    assert len(table[~within]) == 4 * (last + 1) * 3
    assert set(table.loc[~within, "metric"]) == {CKA, PROCRUSTES, PROMPT_SUBSPACE}
    over_prompts = table[table["metric"] == PROMPT_SUBSPACE]
    assert set(over_prompts["chance"]) == {8 / (PROMPTS - 1)}
    for row in table[table["layer"] < last].to_dict("records"):
        sides = states[row["run"], row["step"]], states[row["other_run"], row["other_step"]]
        expected = truth(row["metric"], *(side[row["layer"]] for side in sides))
        assert row["value"] == pytest.approx(expected, abs=1e-5), row  # states are kept in float32
        assert row["num_prompts"] == PROMPTS
    to_last = table[within & (table["run"] == "seed0") & (table["layer"] == 1) & (table["other_step"] == 4)]
    values = to_last[to_last["metric"] == CKA].sort_values("step")["value"].tolist()
    assert values == sorted(values)  # the weights come nearer to the last ones


def test_chance_is_that_of_other_prompts(tmp_path):
    table = similar_states([run_of(tmp_path / "run")])
    chance = table[table["layer"] == 2].groupby("metric")["chance"].first()
    order = torch.randperm(PROMPTS, generator=torch.Generator().manual_seed(0)).numpy()
    steps = [step.astype(np.float64) for step in shares_of_full_model(tmp_path / "run").layers[2]]
    assert chance[SUBSPACE] == 8 / 32  # in expectation, of independent directions
    for metric in (CKA, PROCRUSTES):
        expected = sorted(truth(metric, step, step[order]) for step in steps)[1]  # the lower of the middle two
        assert chance[metric] == pytest.approx(expected, abs=1e-6)


def test_a_prompt_without_states_is_left_out_and_a_broken_step_is_a_gap(tmp_path):
    kept = shares_of_full_model(run_of(tmp_path / "run"))
    states = kept.layers[1].copy()
    states[2, 5] = np.nan  # one prompt at one step
    states[0] = np.inf  # a step
    table = similarity_of_steps(replace(kept, layers={1: states}))
    assert set(table["num_prompts"]) == {PROMPTS - 1}
    assert {*zip(table["step"], table["other_step"], strict=True)} == {(1, 2), (1, 4), (2, 4)}
    prompts = np.delete(np.arange(PROMPTS), 5)
    for row in table.to_dict("records"):
        places = [kept.steps.index(step) for step in (row["step"], row["other_step"])]
        sides = (kept.layers[1][place][prompts].astype(np.float64) for place in places)
        assert row["value"] == pytest.approx(truth(row["metric"], *sides), abs=1e-6)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("torn", "is damaged"),
        ("other weights", "are not what was measured"),
        ("other weights, a prompt less", "are not what was measured"),
        ("turned", "are not what was measured"),
        ("a terabyte of nothing", "holds no states of prompts"),
        ("other shape", "holds no states of prompts"),
        ("other layers", "can be read"),
        ("huge header", "is damaged"),
        ("a device", ""),
    ],
)
def test_files_of_somebody_else_are_told_and_left_out(tmp_path, caplog, content, told):
    root = run_of(tmp_path / "run")
    measurements = [*Store(root / "measurements.jsonl")]
    path = prompt_values.path_of(root, measurements[1], prompt_values.STATES)
    whole = path.read_bytes()
    drawn = np.random.default_rng(0).normal(size=(PROMPTS, 32)).astype(np.float32)
    if content == "torn":
        path.write_bytes(whole[: len(whole) // 2])
    elif content == "other weights":
        save_file({f"layer-{layer}": drawn for layer in shares_of_full_model(root).layers}, path)
    elif content == "other weights, a prompt less":
        drawn[3] = np.nan
        save_file({f"layer-{layer}": drawn for layer in shares_of_full_model(root).layers}, path)
    elif content == "turned":
        save_file({f"layer-{layer}": drawn.T.copy() for layer in shares_of_full_model(root).layers}, path)
    elif content == "a terabyte of nothing":
        save_file({"layer-1": np.zeros((2**40, 0), dtype=np.float32)}, path)
    elif content == "other shape":
        save_file({"layer-1": np.zeros(3, dtype=np.float32)}, path)
    elif content == "other layers":
        save_file({"layer-77": drawn}, path)
    elif content == "huge header":
        path.write_bytes((2**60).to_bytes(8, "little") + whole[8:])
    else:
        path.unlink()
        path.symlink_to("/dev/zero")
    table = similar_states([root])
    assert {*table["step"], *table["other_step"]} == {0, 2, 4}
    assert caplog.text.count("states are not compared") == bool(told)
    assert told in caplog.text


def test_the_number_of_steps_is_bounded_and_without_room_none_are_kept(tmp_path, monkeypatch):
    kept = shares_of_full_model(run_of(tmp_path / "long", steps=tuple(range(MOST_STEPS + 6))))
    assert len(kept.steps) == MOST_STEPS
    assert (kept.steps[0], kept.steps[-1]) == (0, MOST_STEPS + 5)
    root = run_of(tmp_path / "none", steps=(0, 1), megabytes=0)
    monkeypatch.delattr(run_data, "read_run")  # millions of numbers, for nothing
    assert similar_states([root]).empty
    assert not [*(tmp_path / "none").rglob("*.safetensors")]


def test_the_step_from_which_a_layer_stays_near_its_end():
    values = {0: 0.2, 1: 0.95, 2: 0.5, 4: 0.92, 8: 0.97}
    rows = [("r", "r", "a", 1, step, 16, CKA, value, value, value, "", 0.0, 9) for step, value in values.items()]
    found = settling_steps(pd.DataFrame(rows, columns=[*COLUMNS]))
    assert found.to_dict("records") == [{"run": "r", "analysis": "a", "layer": 1, "step": 4, "last": 16}]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("mix", "dim", "tails"),
    [(0.8, 16, 0.0), (0.99, 16, 0.0), (0.0, 16, 0.0), (0.8, 48, 0.3)],
)
def test_intervals_hold_what_as_many_other_prompts_give_on_average(mix, dim, tails):
    """Of 60 draws of 32 prompts, a layer each; the truth is the mean over 300 others."""
    rng, prompts, draws = np.random.default_rng(3), 32, 60

    def drawn() -> np.ndarray:
        length = np.exp(tails * rng.normal(size=(prompts, 1))) * np.arange(1, dim + 1) ** -0.7
        one, noise = rng.normal(size=(2, prompts, dim)) * length
        return np.stack([one, mix**0.5 * one + (1 - mix) ** 0.5 * noise])

    layers = {draw: drawn() for draw in range(draws)}
    about = {"run": "run", "analysis": "pooled_states", "settings": "", "steps": (0, 1)}
    table = similarity_of_steps(KeptStates(layers=layers, **about))
    others = [drawn() for _ in range(300)]
    for metric, part in table.groupby("metric"):
        expected = np.mean([truth(metric, *each) for each in others])
        held = ((part["low"] <= expected) & (expected <= part["high"])).mean()
        assert len(part) == draws
        assert held >= 0.87, (metric, expected, held)  # 95% less three standard errors of 60 draws
        # and they are no wider than they need be, but for the CKA of independent states, whose error is of second order
        widths = (part["high"] - part["low"]) / (2 * 1.96 * part["value"].std())
        assert 0.8 < widths.median() < (2.2 if metric == CKA and not mix else 1.5), (metric, widths.median())


@pytest.mark.soak
def test_means_over_seeds_have_intervals_over_seeds(tmp_path):
    rng = np.random.default_rng(5)
    names, held, count = [f"seed{number}" for number in range(6)], 0, 200
    rows = []
    for layer in range(count):  # each a draw of six seeds, whose likeness is the product of a number that each has
        own = dict(zip(names, 0.7 + 0.1 * rng.normal(size=6), strict=True))
        pairs = [(a, b) for number, a in enumerate(names) for b in names[number:]]
        for a, b in pairs:
            steps = (0, 1) if a == b else (1, 1)
            value = own[a] if a == b else own[a] * own[b]
            rows.append((a, b, "a", layer, *steps, CKA, value, 0.0, 1.0, "prompts", 0.0, 9))
    table = over_the_runs(pd.DataFrame(rows, columns=[*COLUMNS]), 6, "6 seeds")
    assert set(table["over"]) == {"seeds"}
    assert len(table) == 2 * count
    within = table["run"] == table["other_run"]
    first = [row for row in rows if row[3] == 0 and row[0] == row[1]]
    values = [row[7] for row in first]
    ends = stats.t.interval(0.95, 5, np.mean(values), stats.sem(values))
    assert table[within].iloc[0][["value", "low", "high"]].tolist() == pytest.approx([np.mean(values), *ends])
    for part, expected in ((table[within], 0.7), (table[~within], 0.49)):
        held = ((part["low"] <= expected) & (expected <= part["high"])).mean()
        assert 0.91 <= held <= 0.985
    assert over_the_runs(table.head(0), 6, "6 seeds").empty


@pytest.mark.parametrize("seeds", [1, pytest.param(3, marks=pytest.mark.soak)])
def test_emerge_writes_the_table_and_both_pages_have_the_maps(seeds, tmp_path, monkeypatch):
    leave_undrawn(monkeypatch)
    roots = [run_of(tmp_path / f"seed{seed}", seed=seed, steps=(0, 1, 2, 4, 8, 16)) for seed in range(seeds)]
    words = ["--seeds", "--out"] if seeds > 1 else ["--out"]
    assert main(["emerge", *map(str, roots), *words, str(tmp_path / "out")]) == 0
    table = similar_states(roots, together=f"{seeds} seeds" if seeds > 1 else "")
    assert len(pd.read_csv(tmp_path / "out" / "states.csv")) == len(table) > 0
    assert len(table) - len(similar_states(roots)) == (table["over"] == "seeds").sum()
    assert bool((table["over"] == "seeds").sum()) == (seeds > 1)
    several = tmp_path / "out" / "states_cka_of_pooled_states_runs_at_equal_steps.pdf"
    assert several.is_file() == (seeds > 1)
    assert "How alike are checkpoints and runs?" in (tmp_path / "out" / "emergence.html").read_text()
    assert "How alike the checkpoints are" in write_report(roots[0]).read_text()


def test_maps_are_symmetric_and_whole_also_in_one_picture(tmp_path):
    table = similar_states([run_of(tmp_path / "run")])
    (_, _, maps), *_ = step_maps(table)
    charts = [chart for _, chart in maps]
    (values,) = charts[1].cells.values
    measured = table[(table["layer"] == 1) & (table["metric"] == CKA)].set_index(["step", "other_step"])["value"]
    for down, row in zip(STEPS, values, strict=True):
        expected = [1 if down == across else measured[min(down, across), max(down, across)] for across in STEPS]
        assert row == pytest.approx(expected, abs=1e-3)  # of three digits
    ends = table[(table["layer"] == 1) & (table["metric"] == CKA)].set_index(["step", "other_step"])[["low", "high"]]
    for row in rows_of(charts[1]):
        told = ends.loc[min(row["x"], row["y"]), max(row["x"], row["y"])] if row["x"] != row["y"] else None
        said = "" if told is None else f"\n95% {value(told['low'])} to {value(told['high'])}, over prompts"
        assert row["w"] == said
    assert "datum.w" in str(charts[1].whole(still=False))
    for part in Panels(title="", charts=charts).whole()["concat"]:
        assert len(part["data"]["values"]) == len(STEPS) ** 2
        assert part["layer"][0]["encoding"]["fill"]["legend"]["gradientLength"] == {"expr": str(part["height"])}


def test_the_sentence_names_the_steps_of_the_first_middle_and_last_layer():
    steps = {1: 2, 2: 4, 3: 8}  # from which each layer is near
    rows = [
        ("r", "r", "pooled_states", layer, step, 16, CKA, 0.95 if step >= near else 0.1, 0.0, 1.0, "", 0.0, 9)
        for layer, near in steps.items()
        for step in (1, 2, 4, 8)
    ]
    (line,) = sentences(pd.DataFrame(rows, columns=[*COLUMNS]))
    assert line == (
        "r: the CKA with step 16 stays above 0.9 at layer 1 from step 2, layer 2 from step 4, layer 3 from step 8 on"
    )
