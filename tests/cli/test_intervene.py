"""`lit-layers intervene`: its measurements, output and files, its state after a failure, and errors for wrong input."""

import contextlib
import hashlib
import io
import json
import statistics
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from torch.nn import functional as F

from lit_layers import records
from lit_layers.cli.main import main
from lit_layers.data import EvalText
from lit_layers.data.images import EvalImages
from lit_layers.data.tokenization import load_tokenizer
from lit_layers.models.build import save, untrained, vit
from lit_layers.models.running_order import running_order
from lit_layers.models.saved import load
from lit_layers.tasks.lm_eval_scorer import LmEvalScorer
from lit_layers.training.glue import LitGlue
from tests.support.benchmark_rows import scored_pairs, tiny_causal_model, write_tasks, write_tokenizer
from tests.support.glue_files import saved_bert_of_pairs, write_glue
from tests.support.labelled_texts import labelled

BOTH = ("arc_challenge", "winogrande")
FILES = {"arc_challenge": "arc_challenge_test.parquet", "winogrande": "winogrande_validation.parquet"}
# Orders of the 4 blocks, written by hand: M = 3 keeps only the first block, M = 1 changes the third.
ORDERS = {("skip", 3): [1], ("parallel", 3): [1, (2, 3, 4)], ("skip", 1): [1, 2, 4], ("baseline", None): [1, 2, 3, 4]}


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("intervene")
    save(tiny_causal_model(blocks=4, seed=3), root / "model")
    write_tokenizer(root / "model")
    torch.manual_seed(0)
    small = {"img_size": 8, "patch_size": 4, "embed_dim": 32, "depth": 4, "num_heads": 4, "num_classes": 10}
    save(vit("vit_tiny_patch16_224", **small).eval(), root / "vit")
    saved_bert_of_pairs(root / "bert")
    write_glue(root / "data")
    benchmarks = write_tasks(root / "data" / "benchmarks")
    for task in BOTH:  # the full model is always right, so that its score is above chance
        table = pq.read_table(benchmarks / FILES[task])
        right = best_choices(root, task, ORDERS["baseline", None])
        pq.write_table(table.set_column(table.column_names.index("label"), "label", [right]), benchmarks / FILES[task])
    (root / "corpus.jsonl").write_text("\n".join(json.dumps({"text": text}) for text, _ in labelled(1500)))
    write(root, "glue.yaml", {"tasks": ["cola", "mrpc"], "max_steps": 2, "batch_size": 4, "num_tokens": 30})
    return root


@pytest.fixture(autouse=True)
def wide(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")


def write(folder: Path, name: str, content: dict) -> Path:
    (folder / name).write_text(yaml.safe_dump(content))
    return folder / name


def run(*command: object) -> int:
    return main(["intervene", *map(str, command)])


def run_on_text(home: Path, root: Path, *more: object) -> int:
    shape = ["--num_sequences", 6, "--num_tokens", 24, "--seeds", "0,1", "--loops", 3]
    return run(home / "model", "--corpus", home / "corpus.jsonl", *shape, "--root", root, *more)


def run_on_tasks(home: Path, root: Path, *more: object, folder: str = "data") -> int:
    chosen = ["--tasks", ",".join(BOTH), "--variants", "skip,reverse", "--middles", 3]
    return run(home / "model", "--folder", home / folder, *chosen, "--root", root, *more)


def best_choices(home: Path, task: str, schedule: list) -> list[int]:
    """Return the choice of the model for each row: the continuation with the highest summed log-probability."""
    model, tokenizer = load(home / "model"), load_tokenizer(str(home / "model")).tokenizer
    found = []
    for row in pq.read_table(home / "data" / "benchmarks" / FILES[task]).to_pylist():
        values = []
        for context, continuation in scored_pairs(task, row):
            whole, before = (tokenizer.encode(text).ids for text in (context + continuation, context))
            with torch.no_grad(), running_order(model, schedule):
                logits = model(torch.tensor([whole])).logits[0].log_softmax(-1)
            values.append(sum(logits[index - 1, whole[index]].item() for index in range(len(before), len(whole))))
        found.append(values.index(max(values)))
    return found


def labels(home: Path, task: str) -> list[int]:
    return pq.read_table(home / "data" / "benchmarks" / FILES[task])["label"].to_pylist()


def read_records(root: Path) -> dict[str, list[records.Record]]:
    return {each.analysis: each.records for each in records.read(root / "measurements.jsonl")}


def result(found: list[records.Record], metric: str, **tags: object) -> records.Record:
    """Return the one record with these tags. If there are seeds, it is their mean."""
    fitting = [each for each in found if each.metric == metric and tags.items() <= each.tags.items()]
    (record,) = [each for each in fitting if "seed" not in each.tags]
    return record


def file_hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


# Text and images


@pytest.fixture(scope="module")
def text_run(home, tmp_path_factory) -> tuple[Path, str]:
    """The root of the losses on text, and the printed output."""
    root = tmp_path_factory.mktemp("of_text")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert run_on_text(home, root) == 0
    return root, printed.getvalue()


def test_losses_are_those_of_the_blocks_in_the_stated_order(home, text_run):
    root, output = text_run
    found = read_records(root)["interventions"]
    ids = EvalText(str(home / "corpus.jsonl"), str(home / "model"), num_sequences=6, num_tokens=24).windows()
    model = load(home / "model")
    for (variant, middle), order in ORDERS.items():
        with torch.no_grad(), running_order(model, order):
            logits = model(ids).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1).double(), ids[:, 1:].flatten()).item()
        tags = {"variant": variant} | ({} if middle is None else {"middle": middle})
        assert result(found, "variant_loss", **tags).value == pytest.approx(loss, rel=1e-5)
        right = (logits.argmax(-1) == ids[:, 1:]).double().mean().item()
        assert result(found, "variant_accuracy", **tags).value == pytest.approx(right)
        if variant == "baseline":
            assert f"Interventions: Loss (nats) {loss:.3f}, the full model" in output
    assert (root / "report.html").stat().st_size > 10_000
    for path in ("intervene/variants.csv", "report.html", "measurements.jsonl"):
        assert str(root / path) in output


def test_the_file_has_every_number_including_single_seeds(text_run):
    table = pd.read_csv(text_run[0] / "intervene" / "variants.csv")
    assert {*table["variant"]} >= {"middle_repeat", "reverse", "random", "looped_parallel"}
    found = read_records(text_run[0])["interventions"]
    assert len(table) == len(found)
    assert table["value"].tolist() == pytest.approx([record.value for record in found])
    seeds = table[(table["metric"] == "variant_loss") & (table["variant"] == "random") & (table["middle"] == 3)]
    assert seeds["seed"].dropna().tolist() == [0, 1]
    (mean,) = seeds[seeds["seed"].isna()]["value"]
    assert mean == pytest.approx(seeds[seeds["seed"].notna()]["value"].mean())
    assert set(table[table["variant"] == "skip_one"]["layer"]) == {1, 2, 3, 4}


def test_a_second_run_measures_nothing(home, text_run, monkeypatch, capsys):
    root, output = text_run
    before = (root / "measurements.jsonl").read_bytes()
    monkeypatch.setattr("lit_layers.analyses.readout_scores.Interventions.update", None)
    assert run_on_text(home, root) == 0
    assert (root / "measurements.jsonl").read_bytes() == before
    assert capsys.readouterr().out == output


@pytest.mark.soak
def test_orders_of_the_user_are_measured_and_named(home, tmp_path):
    own = ["--schedule", "1 2 4; 1 (2,3,4)", "--variants", "skip", "--middles", "1"]
    assert run_on_text(home, tmp_path, *own) == 0
    found = read_records(tmp_path)["interventions"]
    assert {record.tags["variant"] for record in found} == {"baseline", "skip", "custom"}
    skip = result(found, "variant_loss", variant="skip").value
    assert result(found, "variant_loss", variant="custom", schedule="1 2 4").value == pytest.approx(skip)
    table = pd.read_csv(tmp_path / "intervene" / "variants.csv")
    assert {*table["schedule"].dropna()} == {"1 2 4", "1 (2,3,4)"}


@pytest.mark.soak
def test_an_image_classifier_is_scored_by_labels_and_compared_with_new_weights(home, tmp_path, capsys):
    chosen = ["--images", "digits", "--num_images", 40, "--variants", "skip", "--middles", 3, "--root", tmp_path]
    assert run(home / "vit", *chosen) == run(home / "vit", *chosen, "--untrained", 5) == 0
    trained, fresh = records.read(tmp_path / "measurements.jsonl")
    assert (fresh.run, fresh.provenance["untrained"]) == (f"{home / 'vit'}@untrained-5", {"seed": 5})
    own = load(home / "vit")
    for found, model in ((trained.records, own), (fresh.records, untrained(load(home / "vit"), seed=5))):
        for variant, order in (("baseline", [1, 2, 3, 4]), ("skip", [1])):
            hits, losses = [], []
            for batch in EvalImages("digits", num_images=40):
                with torch.no_grad(), running_order(model, order):
                    logits = model(batch["pixel_values"])
                hits += (logits.argmax(-1) == batch["labels"]).tolist()
                losses += F.cross_entropy(logits, batch["labels"], reduction="none").tolist()
            assert result(found, "variant_accuracy", variant=variant).value == pytest.approx(sum(hits) / 40)
            assert result(found, "variant_loss", variant=variant).value == pytest.approx(sum(losses) / 40, rel=1e-5)
    assert "Interventions: Accuracy" in capsys.readouterr().out


# Tasks


def test_scores_are_those_of_the_choices_in_that_order_also_for_the_first_rows(home, tmp_path, capsys):
    assert run_on_tasks(home, tmp_path, "--limit", 2) == 0
    for task in BOTH:
        right = [one == other for one, other in zip(best_choices(home, task, [1]), labels(home, task), strict=True)]
        record = result(read_records(tmp_path)[f"intervene/{task}"], "task_score", variant="skip")
        assert (record.n, record.value) == (2, sum(right[:2]) / 2)
    assert run_on_tasks(home, tmp_path) == 0
    found, left = read_records(tmp_path), {"skip": [], "reverse": []}
    assert list(found) == [f"intervene/{task}" for task in BOTH]
    for task, guessed in zip(BOTH, ((1 / 4 + 1 / 3 + 1 / 5 + 1 / 4) / 4, 0.5), strict=True):
        right = labels(home, task)
        mine = found[f"intervene/{task}"]
        assert result(mine, "task_score", variant="baseline").value == 1
        for variant, order in (("skip", [1]), ("reverse", [1, 4, 3, 2])):
            taken = best_choices(home, task, order)
            score = sum(one == other for one, other in zip(taken, right, strict=True)) / len(right)
            assert result(mine, "task_score", variant=variant, middle=3, task=task).value == pytest.approx(score)
            left[variant].append((score - guessed) / (1 - guessed))
            assert result(mine, "normalized_score", variant=variant).value == pytest.approx(left[variant][-1])
    assert len({tuple(values) for values in left.values()}) == 2  # the variants must differ
    table = pd.read_csv(tmp_path / "intervene" / "variants.csv")
    medians = table[table["analysis"] == "intervene/median_over_tasks"].set_index("variant")["value"]
    for variant, values in left.items():
        assert medians[variant] == pytest.approx(statistics.median(values))
    assert "Intervene: arc challenge: " in capsys.readouterr().out


@pytest.mark.soak
def test_ctrl_c_exits_with_130_and_the_next_run_continues(home, tmp_path, monkeypatch, capsys):
    plain, calls = LmEvalScorer.score, []

    def pressed(scorer, network):
        calls.append(scorer)
        if len(calls) == 5:  # full model and two orders of the first task, full model of the second
            raise KeyboardInterrupt
        return plain(scorer, network)

    monkeypatch.setattr(LmEvalScorer, "score", pressed)
    assert run_on_tasks(home, tmp_path) == 130
    assert "run the same command again to go on" in capsys.readouterr().err
    assert list(read_records(tmp_path)) == ["intervene/arc_challenge"]
    assert run_on_tasks(home, tmp_path) == 0
    assert len(calls) == 5 + 2
    assert run_on_tasks(home, tmp_path) == 0
    assert len(calls) == 5 + 2
    assert run_on_tasks(home, tmp_path / "whole") == 0
    assert read_records(tmp_path) == read_records(tmp_path / "whole")


# Speed and training


@pytest.mark.soak
def test_speed_is_measured_for_every_variant_and_relative_to_the_full_model(home, tmp_path, capsys):
    chosen = ["--speed", "--num_tokens", 8, "--variants", "skip,parallel", "--middles", 3]
    assert run(home / "model", *chosen, "--root", tmp_path) == 0
    found = read_records(tmp_path)["intervene/speed"]
    for variant in ("baseline", "skip", "parallel"):
        for metric in ("latency", "relative_latency", "throughput", "peak_memory"):
            assert result(found, metric, variant=variant).value > 0, (variant, metric)
    assert "Intervene: speed: " in capsys.readouterr().out


@pytest.mark.soak
def test_a_model_is_trained_on_the_rows_of_a_task_and_scored_before_and_after(home, tmp_path, capsys):
    rows = pq.read_table(home / "data" / "benchmarks" / FILES["arc_challenge"])
    for split in ("train", "test"):
        pq.write_table(rows, tmp_path / f"arc_{split}.parquet")
    write(tmp_path, "tasks.yaml", {"benchmark": {"arc_challenge": "arc_{split}.parquet"}})
    recipe = write(tmp_path, "arc.yaml", {"task": "arc_challenge", "batch_size": 2, "num_tokens": 60})
    before = file_hashes(home / "model")
    command = [home / "model", "--finetune", recipe, "--folder", tmp_path, "--variants", "skip", "--middles", 3]
    assert run(*command, "--root", tmp_path / "out") == 0
    assert file_hashes(home / "model") == before
    found = read_records(tmp_path / "out")["intervene/finetune_arc_challenge"]
    for when in ("before", "after"):
        assert 0 <= result(found, "task_score", variant="skip", middle=3, when=when, task="arc_challenge").value <= 1
    assert (tmp_path / "out" / "intervene" / "finetuned_arc_challenge" / "skip_M_3" / "model" / "config.json").is_file()
    printed = capsys.readouterr().out
    assert "Intervene: finetune arc challenge: Task score (share)" in printed


@pytest.mark.soak
def test_an_encoder_is_trained_on_each_task_in_each_variant(home, tmp_path, capsys, monkeypatch):
    """The weights move to other memory when training begins, as they do on a GPU."""

    begin = LitGlue.on_fit_start

    def on_fit_start(module: LitGlue) -> None:
        for parameter in module.parameters():
            parameter.data = parameter.data.clone()
        begin(module)

    monkeypatch.setattr(LitGlue, "on_fit_start", on_fit_start)
    before = file_hashes(home / "bert")
    command = [home / "bert", "--glue", home / "glue.yaml", "--folder", home / "data", "--variants", "skip"]
    assert run(*command, "--root", tmp_path) == 0
    assert file_hashes(home / "bert") == before
    found = read_records(tmp_path)
    assert list(found) == ["intervene/glue/cola", "intervene/glue/mrpc"]
    for tags in ({"variant": "baseline"}, {"variant": "skip", "middle": 2}):
        mrpc = [result(found["intervene/glue/mrpc"], metric, **tags, training="full") for metric in ("accuracy", "f1")]
        score = result(found["intervene/glue/mrpc"], "task_score", **tags, training="full")
        assert score.value == pytest.approx(sum(record.value for record in mrpc) / 2)
        assert score.n == 10
    assert "Mean over tasks cola, mrpc." in (tmp_path / "report.html").read_text()
