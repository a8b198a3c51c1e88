"""Writes down what the product does on tiny models, so that two states of the code are compared by `diff -r`.

    python -m tests.support.product_snapshot OUT [--only fit,series,...]

OUT gets, of each scenario: the measurement lines (without times and paths), the tables it wrote, what it printed and
its exit code, the data of each figure of each page, W&B's names with their axes; and of every verb its options, and
what it says of wrong input. The same machine gives the same bytes.
"""

import argparse
import contextlib
import html
import io
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", WANDB_MODE="offline", COLUMNS="160", NO_COLOR="1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
import yaml

from lit_layers import records
from lit_layers.cli.command_line import COMMANDS
from lit_layers.cli.main import main
from lit_layers.data import prepare
from lit_layers.models.build import causal_lm, save
from tests.support import every_analysis, layer_results, layer_scores, runs, variant_results
from tests.support.benchmark_rows import tiny_speaker, write_tasks, write_tokenizer
from tests.support.charts import PageFigure, figures_in
from tests.support.glue_files import saved_bert_of_pairs, write_glue
from tests.support.labelled_texts import labelled, saved_gpt2, write_banking77, write_csv
from tests.support.read_wandb import read_finished
from tests.support.saved_models import saved_vit
from tests.support.series_hub import make_series, served, template

REPO = Path(__file__).parents[2]
WORDS = ("argparse", "ast", "bdb", "calendar", "cmd", "codecs", "csv", "difflib", "dis", "doctest", "enum", "shlex")
# What differs from run to run, and where it stands.
UNTOLD = {"seconds", "commit", "git_commit", "version", "versions", "host", "started", "ended", "analysis_seconds"}
UNTOLD |= {"checkpoint_seconds", "peak_memory", "command", "timestamp", "pid", "environment", "updated"}
UNTOLD |= {"id", "at", "seconds_to_layer"}
TIMES = re.compile(
    r"(?<=\w  )[ \d.]+ +[\d.]+%$|[\d.,]+ GB of memory are free|[\d.,]+ (images|tokens)/s|_seconds[ |]+[\d.]+"
    r"|(?<![\w.])[\d,]+(\.\d+)?\s?(ms|s|min|h|minutes|seconds)(?!\w)( \| [\d.]+%)?|\b(seconds) [ |]*[\d.]+"
    r"|\d+:\d\d(:\d\d)?(?!\d)(\+00:00)?|\d{4}-\d\d-\d\dT?"
)


class Scenarios:
    """Runs commands in one scratch folder, and keeps what came of them under `out`."""

    def __init__(self, work: Path, out: Path) -> None:
        self.work, self.out = work, out
        self.said: list[str] = []

    def plain(self, text: str) -> str:
        """A text without this machine's folders, times and colours."""
        text = re.sub(r"\x1b\[[0-9;]*m", "", text)
        for folder, name in ((self.work, "<work>"), (REPO, "<repo>"), (Path(sys.prefix), "<venv>")):
            text = text.replace(str(folder), name)
        for file in self.work.glob("*/run.json"):
            text = text.replace(json.loads(file.read_text())["id"], "<id>")
        text = re.sub(r"http://(127.0.0.1|localhost):\d+", "<hub>", text)
        return re.sub(r"offline-run-\d+_\d+-[\w<>]+", "<offline run>", text)

    def run(self, *arguments: object) -> int:
        """One command; what it prints goes to the scenario's text, times and progress bars aside."""
        words = [str(each) for each in arguments]
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = main(words)
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
        lines = [line.rsplit("\r", 1)[-1] for line in (out.getvalue() + "--\n" + err.getvalue()).split("\n")]
        told = [TIMES.sub("<time>", self.plain(line)).rstrip() for line in lines if not _is_progress(line)]
        self.said += [f"$ lit-layers {self.plain(' '.join(words))}", *told, f"exit code {code}", ""]
        return code

    def keep(self, name: str, *roots: Path) -> None:
        """Writes what the commands since the last call printed, and what they left in these folders."""
        target = self.out / name
        target.mkdir(parents=True, exist_ok=True)
        (target / "said.txt").write_text("\n".join(self.said))
        self.said = []
        for root in roots:
            for file in sorted(path for path in root.rglob("*") if path.is_file()):
                place = target / f"{root.name}__{'__'.join(file.relative_to(root).parts)}"
                self._keep_file(file, place)
            for run_id, run in sorted(read_finished(root).items()):
                names = {key: run.step_metric(key) for key in run.names()}
                text = json.dumps({"project": run.project, "names": names, "tables": run.tables}, indent=1)
                (target / f"{root.name}__wandb_{len(run_id)}.json").write_text(self.plain(text))

    def _keep_file(self, file: Path, place: Path) -> None:
        if not {"wandb", ".audit", "resume"}.isdisjoint(file.parts) or file.name.endswith(".lock"):
            return
        if file.suffix == ".jsonl" or (file.suffix == ".json" and "tokenizer" not in file.name):
            lines = file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
            values = [_without_times(json.loads(line)) for line in lines]
            place.write_text(self.plain("\n".join(json.dumps(value, sort_keys=True) for value in values)))
        elif file.suffix in (".csv", ".md", ".txt", ".yaml"):
            place.write_text(TIMES.sub("<time>", self.plain(file.read_text())))
        elif file.suffix == ".html":
            data, words = _figures_and_words(file.read_text())
            place.with_suffix(".figures.json").write_text(self.plain(json.dumps(data, indent=1, sort_keys=True)))
            place.with_suffix(".words.txt").write_text(TIMES.sub("<time>", self.plain(words)))
        elif file.suffix in (".png", ".svg", ".pdf", ".safetensors"):
            place.with_suffix(f"{file.suffix}.exists").write_text("")


def _is_progress(line: str) -> bool:
    return "it/s" in line or "%|" in line or "━" in line or "tokens/s" in line or "Warning" in line


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: each for key, each in value.items() if key not in UNTOLD and not key.endswith("_per_second")}
        return {key: _without_times(each) for key, each in kept.items() if key != "train/seconds"}
    return [_without_times(each) for each in value] if isinstance(value, list) else value


def _figures_and_words(page: str) -> tuple[Any, str]:
    """What the figures of a page draw, in order, and its text."""
    text = re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.S)
    words = html.unescape(re.sub(r"\s*\n\s*", "\n", re.sub(r"[ \t]*(<[^>]+>\s*)+", " | ", text)))
    return [_drawn(figure) for figure in figures_in(page)], words


def _drawn(figure: PageFigure) -> dict[str, Any]:
    """Its numbers and words, without its style; what is per second differs from run to run."""
    if figure.problem:
        return {"problem": figure.problem}
    axes = [figure.spec["encoding"][side]["axis"] for side in "xy"]
    titles = [axis and axis["title"] for axis in axes]
    lines = {} if "second" in str(titles) else figure.lines
    own = {"axes": titles, "frames": figure.frames, "legend": figure.legend, "dashed": sorted(figure.dashed)}
    return {**own, "lines": lines, "cells": figure.z, "columns": figure.columns}


# --------------------------------------------------------------------------------------------------- scenarios

_TEXT = {
    "class_path": "lit_layers.data.EvalText",
    "init_args": {"corpus": "${corpus}", "tokenizer": "${tokenizer}", "num_sequences": 4, "num_tokens": 16},
}
_ROWS = {
    part: {
        "class_path": "lit_layers.data.EvalText",
        "init_args": _TEXT["init_args"] | {"num_sequences": number, "documents": share},
    }
    for part, number, share in (("train", 40, [0.0, 0.7]), ("test", 20, [0.7, 1.0]))
}
_ANALYSES = [
    {"class_path": f"lit_layers.analyses.{name}", "init_args": {"batches": _TEXT} | more}
    for name, more in {"Trajectory": {}, "Representation": {}, "Lens": {}, "Coupling": {"k": [2, 4]}}.items()
]
_PROBE = {
    "class_path": "lit_layers.analyses.NextTokenProbe",
    "init_args": {**_ROWS, "num_classes": 8, "min_context": 4},
}


def _corpus(work: Path) -> Path:
    """Token shards of a text that the product has no part in."""
    import importlib

    (work / "text").mkdir()
    for name in WORDS:
        (work / "text" / f"{name}.txt").write_text(Path(importlib.import_module(name).__file__ or "").read_text())
    prepare(str(work / "text"), "bpe:300", work / "shards", validation=0.3, progress=False)
    return work / "shards"


def _recipe(path: Path, content: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(content))
    return path


def fit(s: Scenarios) -> None:
    """A watched run of text, gone on with, and measured again with other settings."""
    root = s.work / "text_run"
    trainer = {"accelerator": "cpu", "devices": 1, "log_every_n_steps": 1, "val_check_interval": 2, "max_steps": 4}
    network = {"n_layer": 3, "n_embd": 16, "n_head": 2, "n_positions": 16}
    data = {"num_tokens": 16, "global_batch_size": 4, "num_validation_sequences": 4}
    recipe = _recipe(
        s.work / "fit.yaml",
        {
            "corpus": str(s.work / "shards"),
            "tokenizer": "bpe:300",
            "root": str(root),
            "steps": {"every": 2},
            "trainer": trainer,
            "model": {
                "class_path": "lit_layers.training.LitCausalLM",
                "init_args": {"config": network, "lr": 0.01, "warmup_steps": 1, "decay_steps": 6},
            },
            "data": {
                "class_path": "lit_layers.training.LitTextData",
                "init_args": {"corpus": "${corpus}", "tokenizer": "${tokenizer}", **data},
            },
            "analyses": [*_ANALYSES, _PROBE],
            "wandb": {"mode": "offline"},
        },
    )
    s.run("fit", "--config", recipe)
    s.run("fit", "--config", recipe, "--resume", "last", "--trainer.max_steps", 6)
    s.run("analyze", root, "--steps", "0,2", "--device", "cpu")
    other = [{**_ANALYSES[3], "init_args": {"batches": _TEXT, "k": [3]}}]
    s.run("analyze", root, "--config", _recipe(s.work / "other.yaml", {"analyses": other}), "--steps", "2")
    s.run("report", root, "--export", root / "all.csv", "--pictures", root / "pictures", "--wandb")
    s.run("audit", root)
    s.keep("fit", root)


def images(s: Scenarios) -> None:
    root = s.work / "image_run"
    batches = {"class_path": "lit_layers.data.EvalImages", "init_args": {"source": "${corpus}", "num_images": 20}}
    names = ("Trajectory", "Lens", "Representation")
    network = {"embed_dim": 16, "depth": 2, "num_heads": 2}
    recipe = _recipe(
        s.work / "images.yaml",
        {
            "corpus": "digits",
            "root": str(root),
            "steps": {"every": 2},
            "trainer": {"max_steps": 3, "accelerator": "cpu", "devices": 1, "log_every_n_steps": 1},
            "model": {
                "class_path": "lit_layers.training.LitImageClassifier",
                "init_args": {"config": network, "patch_size": 4, "warmup_steps": 1, "mixup": 0.8},
            },
            "data": {
                "class_path": "lit_layers.training.LitImageData",
                "init_args": {"source": "${corpus}", "global_batch_size": 4, "num_validation_images": 20},
            },
            "analyses": [{"class_path": f"lit_layers.analyses.{n}", "init_args": {"batches": batches}} for n in names],
        },
    )
    s.run("fit", "--config", recipe)
    s.keep("images", root)


def series(s: Scenarios) -> None:
    """A series of the Hub whose step 8 has the weights of step 4: audited, measured without and with it."""
    model = template(s.work / "neox", vocab_size=300)
    for file in (s.work / "shards" / "tokenizer").iterdir():
        shutil.copy(file, model)
    make_series(model, s.work / "hub" / "lab" / "tiny", (0, 1, 2, 4, 8, 16), values={8: 4 / 64})
    recipe = _recipe(s.work / "series.yaml", {"analyses": _ANALYSES[:2]})
    root, common = s.work / "series_run", ["--config", recipe, "--corpus", s.work / "shards", "--device", "cpu"]
    with pytest.MonkeyPatch.context() as patch, served(s.work / "hub", s.work / "home" / "hub", patch):
        s.run("audit", "lab/tiny")
        s.run("analyze", "lab/tiny", "--steps", "all", "--root", root, *common)
        s.run("analyze", "lab/tiny", "--steps", "all", "--root", root, *common, "--allow_suspect")
        s.run("analyze", "lab/tiny", "--steps", "0,16", "--shard", "0/2", "--root", s.work / "shard_run", *common)
        s.run("audit", "lab/tiny", "--json", root / "audit.json")
    s.run("report", root)
    s.run("report", root, "--allow_suspect", "--root", root / "suspect.html")
    s.keep("series", root, s.work / "shard_run")


def offloaded(s: Scenarios) -> None:
    model = s.work / "offloaded_model"
    torch.manual_seed(0)
    network = causal_lm("gpt2", n_layer=4, n_embd=32, n_head=2, n_positions=128, vocab_size=300)
    save(network, model, s.work / "shards" / "tokenizer")
    recipe = _recipe(s.work / "offloaded.yaml", {"analyses": [*_ANALYSES[:2], _ANALYSES[3]]})
    common = ["--config", recipe, "--corpus", s.work / "shards", "--device", "cpu"]
    s.run("analyze", model, "--offload", s.work / "scratch", "--root", s.work / "offloaded", *common)
    s.run("analyze", model, "--root", s.work / "whole", *common)
    s.keep("offloaded", s.work / "offloaded", s.work / "whole")


def intervene(s: Scenarios) -> None:
    home = s.work / "intervene"
    torch.manual_seed(0)
    save(tiny_speaker(blocks=4, seed=3), home / "model")
    write_tokenizer(home / "model")
    saved_bert_of_pairs(home / "bert")
    write_glue(home / "data")
    write_tasks(home / "data" / "benchmarks")
    (home / "corpus.jsonl").write_text("\n".join(json.dumps({"text": text}) for text, _ in labelled(1500)))
    text = ["--corpus", home / "corpus.jsonl", "--num_sequences", 6, "--num_tokens", 24, "--seeds", "0,1", "--loops", 3]
    s.run("intervene", home / "model", *text, "--root", home / "by_text")
    chosen = ["--tasks", "arc_challenge,winogrande", "--variants", "skip,reverse", "--middles", 3]
    s.run("intervene", home / "model", "--folder", home / "data", *chosen, "--root", home / "by_tasks")
    glue = {"tasks": ["cola", "mrpc"], "max_steps": 2, "batch_size": 4, "num_tokens": 30}
    recipe = _recipe(home / "glue.yaml", glue)
    s.run("intervene", home / "bert", "--folder", home / "data", "--glue", recipe, "--root", home / "glue_run")
    (home / "tuning").mkdir()
    for split in ("train", "test"):
        shutil.copy(
            home / "data" / "benchmarks" / "arc_challenge_test.parquet", home / "tuning" / f"arc_{split}.parquet"
        )
    _recipe(home / "tuning" / "tasks.yaml", {"benchmark": {"arc_challenge": "arc_{split}.parquet"}})
    recipe = _recipe(home / "finetune.yaml", {"task": "arc_challenge", "batch_size": 4, "num_tokens": 60})
    tuned = ["--folder", home / "tuning", "--variants", "skip", "--root", home / "tuned"]
    s.run("intervene", home / "model", "--finetune", recipe, *tuned)
    s.keep("intervene", *(home / name for name in ("by_text", "by_tasks", "glue_run", "tuned")))


def mteb(s: Scenarios) -> None:
    from tests.tasks.tiny_tasks import write_tiny_data

    home = s.work / "mteb"
    saved_gpt2(home / "model")
    for step in (0, 100):
        saved_gpt2(home / "run" / f"step-{step:09d}", n_layer=2)
    write_tiny_data(home / "data")
    tasks = "Banking77Classification,STSBenchmark,TwitterURLCorpus,AskUbuntuDupQuestions,TwentyNewsgroupsClustering"
    common = ["--folder", home / "data"]
    s.run("mteb", home / "model", "--tasks", tasks, *common, "--root", home / "scores")
    s.run("mteb", home / "run", "--tasks", "STSBenchmark", *common, "--root", home / "steps", "--allow_suspect")
    s.keep("mteb", home / "scores", home / "steps")


def select(s: Scenarios) -> None:
    home = s.work / "select"
    saved_gpt2(home / "model")
    saved_vit(home / "vit")
    write_banking77(home / "data", labelled(90), labelled(30, first=90))
    write_csv(home / "songs.csv", labelled(90), ("title", "mood"))
    task = ["--task", "banking77", "--folder", home / "data", "--tolerance", "0.1"]
    s.run("select", home / "model", *task, "--rounds", 2, "--root", home / "out")
    songs = ["--task", home / "songs.csv", "--text", "title", "--label", "mood"]
    s.run("select", home / "model", *songs, "--rounds", 2, "--root", home / "songs", "--rule", "best")
    digits = ["--images", "digits", "--num_train", 60, "--num_test", 20, "--rounds", 2]
    s.run("select", home / "vit", *digits, "--root", home / "images")
    s.keep("select", *(home / name for name in ("out", "songs", "images")))


def correlate(s: Scenarios) -> None:
    home = s.work / "correlate"
    s.run("correlate", "--data", "published", "--root", home / "published", "--resamples", 100)
    runs.make_models(home / "models")
    (home / "scores.csv").write_text(
        "model,arc,family\n" + "".join(f"{name},{n * n % 7},x\n" for n, name in enumerate(runs.MODELS))
    )
    wanted = ["--metric", "coupling/coupling[k=12]", "--score", f"{home / 'scores.csv'}:arc"]
    s.run("correlate", home / "models", *wanted, "--root", home / "over_models", "--resamples", 100)
    for number in range(3):
        metric, scores = layer_scores.tables(6, seed=number)
        layer_scores.add(home / "layers" / f"m{number}", f"org/m{number}", None, scores=scores, metric=metric)
    folders = [home / "layers" / f"m{number}" for number in range(3)]
    over = ["--metrics", "prompt_entropy", "--scores", "mteb", "--resamples", 100]
    s.run("correlate", *folders, *over, "--root", home / "over_layers")
    s.keep("correlate", *(home / name for name in ("published", "over_models", "over_layers")))


def emerge(s: Scenarios) -> None:
    """Times and order of three seeds of one training, each alone and together."""
    home = s.work / "emerge"
    for seed in range(3):
        runs.make_run(home / f"seed{seed}", run=f"seed{seed}", seed=seed)
    folders = [home / f"seed{seed}" for seed in range(3)]
    s.run("emerge", folders[0], "--root", home / "one")
    s.run("emerge", *folders, "--seeds", "--root", home / "together")
    s.keep("emerge", home / "one", home / "together")


def pages(s: Scenarios) -> None:
    """Pages of all that there is to draw, from made-up numbers."""
    home = s.work / "pages"
    every = ("trajectory", "coupling", "representation", "next_token_probe", "lens")
    every += ("token_coupling", "coupling_matrices", "cross_token_influence")
    steps = (0, 1, 8, 64)  # of a long run
    runs.make_run(home / "run", steps=steps, analyses=every, failing=((64, "coupling", "RuntimeError: no SVD"),))
    layer_results.write_layer_results(home / "run", run="quickstart")
    runs.make_series(home / "series", steps=(*steps, 512, 1000, 143_000), suspect=(512,))
    runs.make_models(home / "models")
    variant_results.write(home / "variants")
    for name in ("run", "series", "models", "variants"):
        s.run("report", home / name, "--export", home / name / "all.csv")
        s.run("report", home / name, "--pictures", home / name / "pictures")
    s.keep("pages", *(home / name for name in ("run", "series", "models", "variants")))


def analyses(s: Scenarios) -> None:
    """Every analysis there is, on a model of text and one of images."""
    from lit_layers.measuring.one_model import measure
    from tests.support.tiny_models import tiny

    inputs = every_analysis.save_inputs(s.work / "analyses")
    target = s.out / "analyses"
    target.mkdir(parents=True)
    for name, found in (("gpt2", every_analysis.of_text(inputs)), ("vit", every_analysis.of_images())):
        for analysis in found:
            measurement = measure(tiny(name), analysis, run="r", step=0, tokens=0)
            records.append(target / f"{name}.jsonl", measurement)
        lines = [_without_times(json.loads(line)) for line in (target / f"{name}.jsonl").read_text().splitlines()]
        (target / f"{name}.jsonl").write_text(s.plain("\n".join(json.dumps(line, sort_keys=True) for line in lines)))


# -------------------------------------------------------------------------------------------- options, refusals


def options(s: Scenarios) -> None:
    """The option table of every verb."""
    for verb in sorted(COMMANDS):
        s.run(verb, "--help")
        s.keep(f"options/{verb}")
    for name in ("LitCausalLM", "LitImageClassifier"):
        s.run("fit", f"--model.help=lit_layers.training.{name}")
    for name in ("LitTextData", "LitImageData"):
        s.run("fit", f"--data.help=lit_layers.training.{name}")
    s.keep("options/fit_classes")


def refusals(s: Scenarios) -> None:
    """What is said of wrong input, a command each."""
    from tests.cli.test_bad_input import OPTIONS

    model, text, missing = s.work / "select" / "model", s.work / "shards", s.work / "nowhere"
    if not model.exists():
        saved_gpt2(model)
    if (recipe := s.work / "fit.yaml").exists():
        for option, _ in OPTIONS:
            s.run("fit", "--config", recipe, "--root", s.work / "refused", *option.split(" "))
    wrong: list[list[object]] = [
        ["fitt"],
        ["fit"],
        ["fit", "--config", missing],
        ["fit", "--model", "Nothing"],
        ["fit", "--analyses", "[{class_path: lit_layers.analyses.Nothing}]"],
        *[[verb, missing] for verb in ("analyze", "audit", "report", "select", "mteb", "intervene")],
        *[[verb] for verb in ("analyze", "audit", "report", "select", "mteb", "intervene", "prepare")],
        *[[verb, "--nothing", 3] for verb in sorted(COMMANDS)],
        ["correlate"],
        ["correlate", missing, "--metric", "coupling/coupling", "--score", "arc"],
        ["correlate", "--data", "other"],
        ["analyze", model, "--steps", "0,1", "--corpus", text],
        ["analyze", model, "--corpus", missing],
        ["analyze", model, "--config", missing],
        ["analyze", model, "--device", "abacus", "--corpus", text],
        ["analyze", model, "--shard", "3/2", "--corpus", text],
        ["analyze", model, "--dtype", "int3", "--corpus", text],
        ["audit", s.work, "--grammar", "deep"],
        ["intervene", model],
        ["intervene", model, "--tasks", "arc_chalenge"],
        ["intervene", model, "--variants", "skp", "--corpus", "python"],
        ["intervene", model, "--middles", "a", "--corpus", "python"],
        ["mteb", model, "--tasks", "STSBenchmrk"],
        ["mteb", model, "--tasks", "STSBenchmark", "--layers", "90"],
        ["mteb", model, "--tasks", "STSBenchmark", "--pooling", "max"],
        ["select", model, "--task", "bankin77"],
        ["select", model, "--task", missing],
        ["select", model, "--rule", "luck", "--task", "banking77"],
        ["select", model, "--tolerance", "-1", "--task", "banking77"],
        ["prepare", "--source", missing, "--tokenizer", "bpe:300", "--root", s.work / "never"],
        ["prepare", "--source", s.work / "text", "--tokenizer", "bpe:3", "--root", s.work / "never"],
        [
            "prepare",
            "--source",
            s.work / "text",
            "--tokenizer",
            "bpe:300",
            "--root",
            s.work / "never",
            "--max_documents",
            0,
        ],
        ["report", s.work / "text"],
    ]
    for words in wrong:
        s.run(*words)
    s.keep("refusals")


SCENARIOS: dict[str, Callable[[Scenarios], None]] = {
    each.__name__: each
    for each in (
        *(fit, images, series, offloaded, intervene, mteb, select, correlate, emerge, pages),
        analyses,
        *(options, refusals),
    )
}


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """A folder whose name is the same each time, so that tables that are as wide as a path are equal."""
    work = Path(tempfile.gettempdir()) / "snap"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    os.environ["LIT_LAYERS_CACHE"] = str(work / "cache")
    yield work
    shutil.rmtree(work, ignore_errors=True)


def snapshot(out: Path, only: list[str]) -> None:
    torch.set_num_threads(1)
    with _scratch() as work:
        _corpus(work)
        for name in only or SCENARIOS:
            shutil.rmtree(out / name, ignore_errors=True)
            SCENARIOS[name](Scenarios(work, out))
            print(name, file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", type=lambda text: text.split(","), default=[])
    chosen = parser.parse_args()
    snapshot(chosen.out.resolve(), chosen.only)
