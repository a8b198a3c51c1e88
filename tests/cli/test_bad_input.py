"""What was once taken, or ended in a traceback, an abort or a wait without end: one sentence each, and exit code 2."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import yaml

from lit_layers.cli.main import main
from tests.cli.test_fit import RECIPE
from tests.support.labelled_texts import saved_gpt2
from tests.support.runs import make_run

A_BILLION, MUCH = "at most", "100000000000000000000"
OPTIONS = [
    ("--trainer.accumulate_grad_batches -1", "trainer.accumulate_grad_batches: expected at least 1, got -1"),
    ("--trainer.devices text", "trainer: `devices` selected with `CPUAccelerator` should be an int > 0"),
    ("--trainer.devices -1", "trainer: `devices` selected with `CPUAccelerator` should be an int > 0"),
    ("--trainer.max_epochs 0", "trainer: no step was trained: max_steps, max_epochs or max_time ends the run"),
    ("--trainer.devices -2", "trainer: `devices` selected with `CPUAccelerator` should be an int > 0"),
    (f"--trainer.max_steps {MUCH}", f"trainer.max_steps: expected {A_BILLION}"),
    ("--trainer.max_steps null", "trainer.max_steps: Expected a int. Got value: None"),
    ("--trainer.max_step 20", "unknown option --trainer.max_step; did you mean --trainer.max_steps?"),
    ("--model.lr 2.5", "model.lr: expected less than 1, got 2.5"),
    ("--model nothing", "model: expected one of LightningModule, NoneType, got nothing"),
    ("--data.num_workers -1", "data.num_workers: expected at least 0, got -1"),
    (f"--steps [{MUCH}]", f"steps: expected {A_BILLION}"),
    ("--root=", "root: Not of type Path: expected a file or folder, got ''"),
    ("--seed_everything true", "seed_everything: Expected a int. Got value: True"),
    ("--seed_everything -1", "seed_everything: expected at least 0, got -1"),
    ("--resume_every 0", "resume_every: expected at least 1, got 0"),
]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({**RECIPE, "corpus": str(corpus), "root": str(folder / "run")}))
    return path


def refused(argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(argv)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith(f"lit-layers {argv[0]}: error: ")]
    assert code == 2, argv
    assert len(said) == 1, argv
    assert sentence in said[0], argv


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.nightly)])
def test_options_of_a_run_that_would_do_harm_are_refused(
    recipe: Path, capsys: pytest.CaptureFixture[str], every: int
) -> None:
    for option, sentence in OPTIONS[::every]:
        refused(["fit", "--config", str(recipe), *option.split(" ")], sentence, capsys)
    for verb in ("analyze", "intervene"):
        refused([verb, "model", "--root="], "root: expected one of Path, NoneType, got", capsys)
    assert not (recipe.parent / "run").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("correlate MODELS --metric coupling --score score --seed -1", "seed: expected at least 0, got -1"),
        ("emerge RUN --confidence=", "confidence: Expected a float. Got value:"),
        ("emerge EleutherAI/pythia-70m", "is not there: measure it first, by lit-layers analyze EleutherAI/pythia-70m"),
        ("correlate MODELS --metric coupling --score score --root NOWHERE", "cannot write to NOWHERE"),
        ("correlate MODELS --metric coupling --score score --root FOLDER", "models.csv, which is read, would be"),
        ("select nothing --task MODELS --root FOLDER", "models.csv, which is read, would be replaced in"),
        ("emerge TIMES --root FOLDER", "times.csv, which is read, would be replaced in"),
        ("select nothing --task MODELS --text=", "text: expected a name or a path, got ''"),
        ("report RUN --workspace=", "workspace: expected a name or a path, got ''"),
        ("audit RUN --submodule=", "submodule: expected a name or a path, got ''"),
        ("mteb nothing --tokenizer=\t", r"tokenizer: expected a name or a path, got '\t'"),
        ("prepare --source= --tokenizer bpe:300 --root FOLDER", "source: expected a name or a path, got ''"),
        ("select nothing --task MODELS --by x", "by: expected one of typing.Literal['accuracy'"),
        ("correlate MODELS --metric coupling --score score --group=", "group: expected a name or a path, got ''"),
        ("correlate NAMELESS --metric coupling --score score", "nameless.csv: row 2 has no name in column model"),
        ("analyze MODELS --root ~nosuchuser", "root: expected one of Path, NoneType, got ~nosuchuser"),
        (
            "correlate MODELS --metric coupling --score score --resamples 10000000",
            "resamples: expected at most 1,000,000",
        ),
        ("analyze MODELS --root FOLDER --code=~", "--code: expected an importable package or module, or a folder such"),
        ("analyze MODELS --root FOLDER --code=null", "or a folder such as ., got 'null'"),
        ("analyze RUN --follow --patience=-1", "patience: expected"),
        ("report TORN", "measurements.jsonl, line 2: not valid JSON"),
        ("report ", "expected a file or folder, got ''"),
        ("analyze nothing --untrained 1 --steps all", "untrained: is for one model, and nothing is a series"),
        ("intervene nothing --tasks gsm9k --folder RUN", "task: there is no 'gsm9k'; did you mean gsm8k?"),
        ("intervene nothing --tasks rows.csv", "rows.csv"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_opened_or_computed(
    words: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "RUN", steps=(0, 1), analyses=("coupling",), layers=2)
    shutil.copytree(tmp_path / "RUN", tmp_path / "TORN")
    log = tmp_path / "TORN" / "measurements.jsonl"
    log.write_text("\n".join([log.read_text().splitlines()[0], '{"run": ', ""]))
    (tmp_path / "models.csv").write_text("model,coupling,score\na,1,2\nb,2,1\nc,3,5\n")
    (tmp_path / "nameless.csv").write_text("model,coupling,score\na,1,2\n,2,1\nc,3,5\n")
    (tmp_path / "times.csv").write_text("step,loss\n0,3\n1,2\n")
    places = {"TIMES": str(tmp_path / "times.csv"), "NAMELESS": str(tmp_path / "nameless.csv")}
    places |= {"FOLDER": str(tmp_path)}
    places |= {"MODELS": str(tmp_path / "models.csv"), "NOWHERE": "/proc/nowhere/at/all"}
    places |= {name: str(tmp_path / name) for name in ("RUN", "TORN")}
    for name, place in places.items():
        words, sentence = words.replace(name, place), sentence.replace(name, place)
    refused(words.split(" "), sentence, capsys)


def test_a_recipe_in_another_encoding_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "recipe.yaml"
    for text in ("root: é".encode("utf-16"), "root: é".encode("latin-1")):
        file.write_bytes(text)
        refused(["fit", "--config", str(file)], "config: 'utf-8' codec can't decode byte", capsys)
        refused(["analyze", "model", f"--config={file}"], "config: 'utf-8' codec can't decode byte", capsys)


def test_a_run_whose_file_is_damaged_is_refused_by_every_reader(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", steps=(0, 1), analyses=("coupling",), layers=2)
    facts = (run / "run.json").read_text()
    correlated = ["correlate", str(run), "--metric", "coupling", "--score", "validation/loss"]
    for content in (facts.encode("utf-16"), facts[:100].encode()):
        (run / "run.json").write_bytes(content)
        for argv in (["report", str(run)], correlated):
            refused(argv, "run.json: not valid JSON", capsys)


def test_a_vocabulary_beyond_reason_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("Some text.\n" * 20)
    argv = ["prepare", "--source", str(tmp_path / "text.txt"), "--root", str(tmp_path / "out"), "--tokenizer"]
    for size in ("99999999999", "2000001", "256", "-300", "٣٠٠"):
        refused([*argv, f"bpe:{size}"], "expected bpe:SIZE with a size over 256", capsys)


def test_models_that_cannot_be_opened_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved_gpt2(tmp_path / "model")
    rows = [json.dumps({"text": f"Some words of text {n}. " * 20}) for n in range(400)]
    (tmp_path / "text.jsonl").write_text("\n".join(rows) + "\n")
    quick = {"corpus": str(tmp_path / "text.jsonl"), "analyses": RECIPE["analyses"]}
    (tmp_path / "quick.yaml").write_text(yaml.safe_dump(quick))
    others = ["--config", str(tmp_path / "quick.yaml"), "--root", str(tmp_path / "out")]
    config = json.loads((tmp_path / "model" / "config.json").read_text())

    class Hostile:
        def __reduce__(self) -> tuple:
            return (Path.touch, (tmp_path / "ran",))

    pickled = tmp_path / "pickled"
    shutil.copytree(tmp_path / "model", pickled)
    (pickled / "model.safetensors").unlink()
    (pickled / "pytorch_model.bin").write_bytes(pickle.dumps({"weight": Hostile()}, protocol=2))
    quantised = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    for change in ({"quantization_config": quantised}, {"n_layer": "two"}, {"n_layer": 10**20}, {"n_layer": -1}):
        (tmp_path / "model" / "config.json").write_text(json.dumps({**config, **change}))
        refused(["analyze", str(tmp_path / "model"), *others], str(tmp_path / "model"), capsys)
    for text in (b"[1]", b"\xff\xfe{", b"", b'"' + b"\xe9" + b'"', b"{" * 5000):
        (tmp_path / "model" / "config.json").write_bytes(text)
        refused(["analyze", str(tmp_path / "model"), *others], str(tmp_path / "model"), capsys)
    refused(["analyze", str(pickled), *others], str(pickled), capsys)
    assert not (tmp_path / "ran").exists()


@pytest.mark.nightly
def test_a_word_of_megabytes_is_text_like_any_other(tmp_path: Path) -> None:
    import random

    from lit_layers.data.tokenization import train_bpe

    word = "".join(random.Random(0).choices("abcdefghij", k=1_000_000))
    tokenizer = train_bpe([word, "Other words. " * 9], 400).tokenizer
    assert tokenizer.decode(tokenizer.encode(word[:5000]).ids) == word[:5000]


@pytest.mark.slow
def test_texts_longer_than_the_model_reads_are_refused_before_anything_is_measured(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    behind = Path(__file__).parents[2] / "recipes" / "analyses" / "text.yaml"
    sentence = "trajectory: num_tokens: GPT2LMHeadModel takes at most "
    content = yaml.safe_load(behind.read_text())
    content["analyses"] = content["analyses"][:1]
    content["analyses"][0]["init_args"]["batches"]["init_args"]["num_sequences"] = 1
    (tmp_path / "text.yaml").write_text(yaml.safe_dump(content))
    refused(["fit", "--config", str(recipe), "--config", str(tmp_path / "text.yaml")], sentence, capsys)


def test_a_callback_that_watches_what_nobody_logs_is_told_in_one_sentence(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stopping = {"class_path": "lightning.pytorch.callbacks.EarlyStopping", "init_args": {"monitor": "nothing"}}
    content = yaml.safe_load(recipe.read_text())
    content["trainer"]["callbacks"] = [stopping]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({**content, "root": str(tmp_path / "run")}))
    argv = ["fit", "--config", str(tmp_path / "recipe.yaml")]
    refused(argv, "trainer: Early stopping conditioned on metric `nothing` which is not available", capsys)
    assert (tmp_path / "run" / "report.html").exists(), "what was trained is there"


def test_a_recipe_whose_trainer_is_a_number_is_refused(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({**yaml.safe_load(recipe.read_text()), "trainer": 3}))
    refused(["fit", "--config", str(tmp_path / "recipe.yaml")], "trainer: expected the options of a Trainer", capsys)
