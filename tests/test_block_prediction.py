"""Which blocks can be spared: planted harms and couplings through files, and the command's table and page."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from lit_layers import records
from lit_layers.cli.main import main
from lit_layers.clock import block_tables, prediction_table
from lit_layers.clock.block_prediction import COLUMNS, prediction_charts, sentences
from lit_layers.errors import InputError
from lit_layers.records import Measurement, Record

BLOCKS, STEPS = 6, (0, 1, 4, 16, 64, 256)


def write_run(root, seed: int = 0, *, gap: bool = False):
    """At step 0 harms of chance; later skipping harms most where coupling is lowest. Returns what was written."""
    rng, written = np.random.default_rng(seed), {}
    for step in STEPS:
        pairs = rng.uniform(0.1, 0.9, (BLOCKS + 1, BLOCKS + 1))
        cosines, steps, states = rng.uniform(0.5, 1, BLOCKS), rng.uniform(1, 2, BLOCKS), rng.uniform(5, 9, BLOCKS + 1)
        inner = pairs[1:, 1:]
        coupling = np.array(
            [np.mean([(inner[a, b] + inner[b, a]) / 2 for b in range(BLOCKS) if b != a]) for a in range(BLOCKS)]
        )
        skips = rng.uniform(0, 1, BLOCKS) if step == 0 else 2 - coupling
        switches = rng.uniform(0, 1, BLOCKS - 1)
        written[step] = {"coupling": coupling, "cosines": cosines, "steps": steps, "states": states, "skips": skips}
        written[step] |= {"pairs": inner, "switches": switches}
        found = {
            "interventions": [
                Record(metric="variant_loss", value=3.0, tags={"variant": "baseline"}),
                *(
                    Record(metric="variant_loss", value=3 + skips[b], layer=b + 1, tags={"variant": "skip_one"})
                    for b in range(BLOCKS)
                    if not (gap and step == 16 and b == 2)
                ),
                *(
                    Record(metric="variant_loss", value=3 + switches[b], layer=b + 1, tags={"variant": "switch"})
                    for b in range(BLOCKS - 1)
                ),
                *(
                    Record(metric="kl_to_full", value=99.0, layer=b + 1, tags={"variant": "skip_one"})
                    for b in range(BLOCKS)
                ),
            ],
            "coupling": [
                Record(metric="coupling_pair", value=pairs[a, b], layer=a, other_layer=b, tags={"k": 4})
                for a in range(1, BLOCKS + 1)
                for b in range(1, BLOCKS + 1)
                if a != b
            ],
            "similarity": [
                Record(metric="layer_cosine", value=value, layer=b, other_layer=b + 1, tags={"mode": mode})
                for mode, values in (("token", cosines), ("flattened", cosines[::-1]))
                for b, value in enumerate(values)
            ],
            "trajectory": [
                *(Record(metric="step_norm", value=steps[b], layer=b + 1) for b in range(BLOCKS)),
                *(
                    Record(metric="step_norm", value=0.0, layer=b + 1, tags={"statistic": "median"})
                    for b in range(BLOCKS)
                ),
                *(Record(metric="state_norm", value=states[b], layer=b) for b in range(BLOCKS + 1)),
                Record(metric="expodistance", value=1 / (1 + step)),
            ],
        }
        for analysis, parts in found.items():
            at = {
                "run": root.name,
                "step": step,
                "tokens": 100 * step,
                "seconds": 0.1,
                "provenance": {"config_hash": "c" * 16},
            }
            records.append(root / "measurements.jsonl", Measurement(analysis=analysis, records=parts, **at))
    (root / "run.json").write_text(json.dumps({"run": root.name}))
    return written


@pytest.fixture
def run(tmp_path):
    return tmp_path / "planted", write_run(tmp_path / "planted")


def row(table, **of):
    for name, value in of.items():
        table = table[table[name].isna()] if value is None else table[table[name] == value]
    (found,) = table.to_dict("records")
    return found


def test_seeds_that_were_measured_with_other_settings_are_not_pooled(tmp_path):
    for seed in range(2):
        write_run(tmp_path / f"s{seed}", seed)
    path = tmp_path / "s1" / "measurements.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(x.replace("c" * 16, "d" * 16) if '"coupling_pair"' in x else x for x in lines) + "\n")
    tables = [table for seed in range(2) for table in block_tables(tmp_path / f"s{seed}")]
    assert {*prediction_table(tables)["run"]} == {"s0", "s1"}  # each by itself
    with pytest.raises(InputError, match="blocks: s0 and s1 measured coupling with other settings, cccccccc and dddd"):
        prediction_table(tables, pooled=True)


def test_harms_and_predictors_are_those_of_the_records(run):
    root, written = run
    skip, switch = block_tables(root)
    assert (skip.harm, switch.harm, skip.steps) == ("skip_one", "switch", list(STEPS))
    coupled, turned, stepped = ("coupling, k = 4", "coupling"), ("influence", "similarity"), ("norm step", "trajectory")
    assert list(skip.predictors) == [coupled, turned, stepped]
    for number, step in enumerate(STEPS):
        truth = written[step]
        assert skip.harms[number] == pytest.approx(truth["skips"])  # the loss, never the divergence
        influence, norm_step = 1 - truth["cosines"], truth["steps"] / truth["states"][:-1]
        assert skip.predictors[coupled][number] == pytest.approx(truth["coupling"])
        assert skip.predictors[turned][number] == pytest.approx(influence)
        assert skip.predictors[stepped][number] == pytest.approx(norm_step)
        assert switch.harms[number] == pytest.approx(truth["switches"])
        both = [(truth["pairs"][b, b + 1] + truth["pairs"][b + 1, b]) / 2 for b in range(BLOCKS - 1)]
        assert switch.predictors[coupled][number] == pytest.approx(both)
        assert switch.predictors[turned][number] == pytest.approx((influence[1:] + influence[:-1]) / 2)


def test_of_several_couplings_the_one_of_most_directions_is_held_fixed(run):
    root, _ = run
    lines = [json.loads(line) for line in (root / "measurements.jsonl").read_text().splitlines()]
    for line in lines:
        if line["analysis"] == "coupling":
            few = line["records"]
            line["records"] = [r | {"tags": {"k": k}, "value": r["value"] ** k} for k in (12, 4, 32) for r in few]
    (root / "measurements.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    skip, _ = block_tables(root)
    assert [name for name, _ in skip.predictors] == [
        *(f"coupling, k = {k}" for k in (4, 12, 32)),
        "influence",
        "norm step",
    ]
    given = set(prediction_table([skip]).query("predictor == 'influence'")["given"])
    assert given == {"", "depth", "depth and coupling, k = 32 and norm step"}


def test_two_analyses_that_measure_the_same_stand_side_by_side(run):
    root, written = run
    lines = (root / "measurements.jsonl").read_text().splitlines()
    for line in map(json.loads, lines.copy()):
        if line["analysis"] != "trajectory":
            for record in line["records"]:
                record["value"] = 3 - record["value"] ** 2 if record["tags"].get("variant") != "baseline" else 1.0
            lines.append(json.dumps(line | {"analysis": f"{line['analysis']}/other"}))
    (root / "measurements.jsonl").write_text("\n".join(lines) + "\n")
    tables = block_tables(root)
    assert [(table.analysis, table.harm) for table in tables] == [
        (analysis, harm) for harm in ("skip_one", "switch") for analysis in ("interventions", "interventions/other")
    ]
    skip, other = tables[:2]
    names = [*itertools.product(["coupling, k = 4"], ["coupling", "coupling/other"])]
    names += [("influence", "similarity"), ("influence", "similarity/other"), ("norm step", "trajectory")]
    assert list(skip.predictors) == names
    for number, step in enumerate(STEPS):
        truth = written[step]
        assert skip.predictors[names[0]][number] == pytest.approx(truth["coupling"])
        assert skip.predictors[names[2]][number] == pytest.approx(1 - truth["cosines"])
        assert skip.predictors[names[3]][number] == pytest.approx(1 - (3 - truth["cosines"] ** 2))
        assert skip.harms[number] == pytest.approx(truth["skips"])
        assert other.harms[number] == pytest.approx(3 - (3 + truth["skips"]) ** 2 - 1)
    table = prediction_table(tables)
    assert list(table["predictor"].unique()) == [*map(", ".join, names[:4]), "norm step"]
    # What is held fixed is of another kind, and of each kind one.
    given = set(table.query("predictor == 'influence, similarity'")["given"])
    assert given == {"", "depth", "depth and coupling, k = 4, coupling/other and norm step"}
    charts = prediction_charts(table, tables, "planted")
    assert [chart.title.split(":")[0] for chart in charts] == [
        f"{change} ({analysis})"
        for change in ("Skipping a block", "Switching a block with the next")
        for analysis in ("interventions", "interventions/other")
    ]
    assert all(sorted(line.x) == list(STEPS) for chart in charts for line in chart.series)
    told = [sentence for sentence in sentences(table, "planted") if "(interventions/other)" in sentence]
    assert len(told) == 2 * len(names)


def test_a_block_that_no_model_has_is_refused(run):
    (root, _), far = run, Record(metric="variant_loss", value=3.0, layer=10**9, tags={"variant": "skip_one"})
    last = records.read(root / "measurements.jsonl")[-4]
    assert last.analysis == "interventions"
    records.append(root / "measurements.jsonl", replace(last, records=[*last.records, far]))
    with pytest.raises(InputError, match="expected skipping a block of at most 5,000 blocks, got block 1000000000"):
        block_tables(root)


def test_the_planted_relation_is_found_after_step_zero_and_not_at_it(run):
    root, written = run
    tables = block_tables(root)
    table = prediction_table(tables)
    assert tuple(table.columns) == COLUMNS
    trained = row(table, step=None, harm="skip_one", predictor="coupling, k = 4", given="")
    assert (trained["rho"], trained["num_checkpoints"]) == (pytest.approx(-1), len(STEPS) - 1)
    assert trained["p_value"] < 0.01
    untrained = row(table, step=0, harm="skip_one", predictor="coupling, k = 4", given="")
    assert untrained["rho"] == pytest.approx(stats.spearmanr(written[0]["coupling"], written[0]["skips"]).statistic)
    depth = row(table, step=None, harm="skip_one", predictor="coupling, k = 4", given="depth")
    assert depth["rho"] == pytest.approx(-1)
    first, second, *_ = sentences(table, "planted")
    assert first.startswith("Skipping a block harms less where coupling, k = 4 is higher (Spearman \N{MINUS SIGN}1")
    assert "has no sure relation to influence" in second
    chart, _ = prediction_charts(table, tables, "planted")
    assert [series.name for series in chart.series] == [
        "grey band: 95% of permuted blocks",
        "coupling, k = 4",
        "influence",
        "norm step",
    ]
    assert chart.series[1].y[1:] == pytest.approx([-1] * 5)


def test_a_checkpoint_with_a_gap_is_counted_and_seeds_are_pooled(run, tmp_path):
    write_run(tmp_path / "other", 1, gap=True)
    tables = [table for root in (run[0], tmp_path / "other") for table in block_tables(root)]
    table = prediction_table(tables, pooled=True)
    gap = row(table, run="other", step=None, harm="skip_one", predictor="coupling, k = 4", given="")
    assert (gap["num_checkpoints"], gap["num_undefined"]) == (5, 1)
    both = row(table, run="2 seeds", step=None, harm="skip_one", predictor="influence", given="")
    means = [
        row(table, run=name, step=None, harm="skip_one", predictor="influence", given="")["rho"]
        for name in ("planted", "other")
    ]
    assert both["rho"] == pytest.approx(np.mean(means))
    assert not len(table[(table["run"] == "other") & (table["step"] == 16) & (table["harm"] == "skip_one")])
    (skip, _) = block_tables(tmp_path / "other")
    partly = prediction_table([*tables, replace(skip, run="third")], pooled=True)
    pooled = partly[partly["run"].str.endswith("seeds")]
    assert {(each.run, each.harm) for each in pooled.itertuples()} == {("3 seeds", "skip_one"), ("2 seeds", "switch")}


def test_what_all_seeds_share_is_pooled_where_one_has_a_second_analysis_of_the_kind(run, tmp_path, caplog):
    """The second seed also has influence and skips of other analyses; the truth is of the records, by scipy."""
    root, written = tmp_path / "second", {"planted": run[1]}
    written["second"] = write_run(root, 1)
    lines = (root / "measurements.jsonl").read_text().splitlines()
    more = [json.loads(line) for line in lines if json.loads(line)["analysis"] in ("similarity", "interventions")]
    lines += [json.dumps(line | {"analysis": f"{line['analysis']}/other"}) for line in more]
    (root / "measurements.jsonl").write_text("\n".join(lines) + "\n")
    tables = [table for each in (run[0], root) for table in block_tables(each)]
    table = prediction_table(tables, pooled=True)
    assert [each.getMessage().rpartition(": ")[2] for each in caplog.records] == ["influence, similarity/other"]
    pooled = table[table["run"] == "2 seeds"]
    assert set(pooled["predictor"]) == {"coupling, k = 4", "influence, similarity", "norm step"}
    both = row(pooled, step=None, harm="skip_one", predictor="influence, similarity", given="")
    truth = [
        stats.spearmanr(1 - of["cosines"], of["skips"]).statistic
        for steps in written.values()
        for step, of in steps.items()
        if step > 0
    ]
    assert both["rho"] == pytest.approx(np.mean(truth))
    titles = {
        name: [chart.title.split(":")[0] for chart in prediction_charts(table, tables, name)]
        for name in ("2 seeds", "planted", "second")
    }
    own = ["Skipping a block (interventions)", "Switching a block with the next (interventions)"]
    assert titles["2 seeds"] == titles["planted"] == own
    assert set(titles["second"]) == {*own, *(title.replace(")", "/other)") for title in own)}
    assert sentences(table, "2 seeds")[0].startswith("Skipping a block (interventions) harms")


def test_the_command_writes_table_figure_and_section_and_a_run_without_harms_has_none(run, tmp_path):
    root, _ = run
    assert main(["emerge", str(root), "--out", str(tmp_path / "out")]) == 0
    table = pd.read_csv(tmp_path / "out" / "blocks.csv")
    assert tuple(table.columns) == COLUMNS
    assert (tmp_path / "out" / "blocks_planted.png").stat().st_size > 10_000
    page = (tmp_path / "out" / "emergence.html").read_text()
    assert "Which blocks can be spared?" in page
    assert "Skipping a block harms less where coupling, k = 4 is higher" in page
    bare = tmp_path / "bare"
    bare.mkdir()
    lines = [line for line in (root / "measurements.jsonl").read_text().splitlines() if '"trajectory"' in line]
    (bare / "measurements.jsonl").write_text("\n".join(lines).replace("planted", "bare") + "\n")
    assert block_tables(bare) == []
    assert main(["emerge", str(bare), "--out", str(tmp_path / "bare_out"), "--metrics", "expodistance"]) == 0
    assert "Which blocks" not in (tmp_path / "bare_out" / "emergence.html").read_text()
    assert not (tmp_path / "bare_out" / "blocks.csv").exists()
