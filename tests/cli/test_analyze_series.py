"""`lit-layers analyze` on a run's folder: what training measured is known, and wrong input is told."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from lit_layers import records
from lit_layers.analyses import Trajectory
from lit_layers.cli.main import main
from lit_layers.cli.measuring import Checkpoints
from lit_layers.cli.verbs.analyze import Command
from lit_layers.data import EvalText
from lit_layers.data.tokenization import save_tokenizer, train_bpe
from tests.cli.conftest import PACKAGE
from tests.cli.test_fit import RECIPE, TEXT
from tests.support.measured_series import analyze as analyze_one
from tests.support.rounding import assert_same_numbers, close_records
from tests.support.saved_models import saved
from tests.support.targets import target

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, corpus) -> Path:
    folder = tmp_path_factory.mktemp("series")
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({**RECIPE, "corpus": str(corpus), "root": str(folder / "run")}))
    assert main(["fit", "--config", str(recipe)]) == 0
    return folder / "run"


@pytest.fixture
def recipe(tmp_path) -> Path:
    """The same analyses as in training."""
    path = tmp_path / "analyses.yaml"
    path.write_text(yaml.safe_dump({"analyses": RECIPE["analyses"]}))
    return path


def analyze(root: Path, *arguments) -> int:
    return main(["analyze", str(root), *map(str, arguments), "--device", "cpu"])


@pytest.mark.slow
def test_what_training_measured_is_known_and_elsewhere_comes_out_the_same(trained, recipe, tmp_path, capsys):
    before = (trained / "measurements.jsonl").read_bytes()
    assert analyze(trained, "--config", recipe) == 0
    assert "0 measured, 6 were known" in capsys.readouterr().out
    assert (trained / "measurements.jsonl").read_bytes() == before
    assert analyze(trained, "--config", recipe, "--root", tmp_path / "again", "--steps", "0,3") == 0
    written = {(m.step, m.analysis): m for m in records.read(trained / "measurements.jsonl")}
    found = records.read(tmp_path / "again" / "measurements.jsonl")
    assert [(m.step, m.analysis) for m in found] == [(s, n) for s in (0, 3) for n in ("trajectory", "coupling")]
    for measurement in found:
        training = written[measurement.step, measurement.analysis]
        close_records(measurement.records, training.records)
        assert measurement.tokens == training.tokens
        assert measurement.provenance["config_hash"] == training.provenance["config_hash"]


@pytest.mark.slow
def test_a_run_is_measured_with_the_analyses_of_its_training_and_others_stay_out_of_its_curves(
    trained, recipe, tmp_path, capsys
):
    root = tmp_path / "run"
    shutil.copytree(trained, root)
    file = root / "measurements.jsonl"
    before = file.read_bytes()
    assert analyze(root, "--steps", "0,2") == 0
    assert "0 measured, 4 were known, not measured again" in capsys.readouterr().out
    assert file.read_bytes() == before
    file.write_bytes(b"".join(before.splitlines(keepends=True)[2:]))  # step 0 is missing
    assert analyze(root, "--steps", "0,2") == 0
    assert "2 measured, 2 were known" in capsys.readouterr().out
    table = records.frame(file)
    expected = records.frame(trained / "measurements.jsonl")
    order = ["step", "analysis", "metric", "layer", "other_layer", "k"]
    values, in_training = (each.sort_values(order)["value"].tolist() for each in (table, expected))
    assert values == pytest.approx(in_training, rel=1e-4, abs=1e-6)  # of a mapped file, and of weights in memory
    options = {**RECIPE["analyses"][1]["init_args"], "k": [3]}
    recipe.write_text(yaml.safe_dump({"analyses": [{**RECIPE["analyses"][1], "init_args": options}]}))
    assert analyze(root, "--config", recipe, "--steps", "0") == 0
    assert records.frame(file).equals(table)
    assert set(records.frame(file, settings="last")["k"].dropna()) == {3}


def test_analyses_of_a_run_are_data_that_the_parser_refuses_like_those_of_a_recipe(tmp_path, capsys):
    root, proof = tmp_path / "run", tmp_path / "proof"
    saved(root / "step-000000000", "gpt2")
    hostile = {"class_path": "subprocess.Popen", "init_args": {"args": f"touch {proof}", "shell": True}}
    for analyses in ([hostile], [{"class_path": "lit_layers.analyses.Lens", "init_args": {"batches": hostile}}], [7]):
        about = {"run": "run", "config": {"analyses": analyses, "tokenizer": "bpe:300", "corpus": "python"}}
        (root / "run.json").write_text(json.dumps(about))
        assert analyze(root) == 2
        assert "the analyses of run, as its run.json has them: " in capsys.readouterr().err
    assert not proof.exists()


@pytest.mark.slow
def test_a_suspect_checkpoint_is_left_out_and_said(trained, recipe, tmp_path, capsys):
    root = tmp_path / "run"
    shutil.copytree(trained, root)
    shutil.copy(root / "step-000000003" / "model.safetensors", root / "step-000000002")
    out = tmp_path / "out"
    assert analyze(root, "--config", recipe, "--root", out) == 0
    assert "left out as suspect: step-000000002; --allow_suspect measures them" in capsys.readouterr().out
    assert {m.step for m in records.read(out / "measurements.jsonl")} == {0, 3}
    assert analyze(root, "--config", recipe, "--root", out, "--allow_suspect", "--shard", "1/3") == 0
    assert {m.step for m in records.read(out / "measurements.jsonl")} == {0, 2, 3}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--steps", "0,9"], "steps: "),
        (["--steps", "sometimes"], "got 'sometimes'"),
        (["--shard", "3"], "shard: expected i/n with i from 0 to n - 1, such as 0/4, got '3'"),
        (["--shard", "4/4"], "i from 0 to n - 1, such as 0/4, got '4/4'"),
        (["--revision", "step0"], "revision: is for one model"),
        (["--keep_downloads", "perhaps"], "perhaps"),
        (
            ["--series", "Models", "--series.models", "[a]"],
            "model: expected a model, a series of its checkpoints or --series, and not two",
        ),
        (["--analyses.k", "[99]"], "99"),
    ],
)
def test_wrong_input_is_one_sentence_and_nothing_is_written(trained, recipe, tmp_path, capsys, arguments, sentence):
    root = tmp_path / "out"
    assert analyze(trained, "--config", recipe, "--root", root, *arguments) == 2
    errors = [x for x in capsys.readouterr().err.splitlines() if "lit-layers analyze: error: " in x]
    assert len(errors) == 1
    assert sentence in errors[0]
    assert not root.exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "model: expected a model, a series of its checkpoints or --series"),
        (["--series", "Nothing"], "Nothing"),
        (["--series", "lit_layers.series.Nothing"], "expected one of Series, NoneType, got lit_layers.series.Nothing"),
        (["--series", "HubRevisions"], "missing: repo"),
        (
            ["--series", "HubRevisions", "--series.repo", "a/b", "--series.grammar", "x"],
            "grammar: expected auto, step, stages, continued, checkpoint or a template",
        ),
        (["--series", "Models", "--series.model", "[a]"], "unknown key model"),
        (
            ["--series", "Models", "--series.models", "[]"],
            "models: expected a list of folders or names on the",
        ),
        (["--series", "Models", "--series.models", "[./no]"], "cannot list the branches of ./no"),
        (
            ["--series", "StepFolders", "--series.root", "nowhere"],
            "expected a folder with checkpoints, nowhere",
        ),
        (
            ["--series", "StepFolders", "--series.root", "RUN", "--steps", "0,1"],
            "has options of its own",
        ),
        (["--series", "StepFolders", "--series.root", "RUN", "--untrained", "1"], "untrained: the class of --series"),
        (["--series", "StepFolders", "--series.root", "RUN", "--series.steps", "[0,9]"], "has no step 9"),
        (["--series", "StepFolders", "--series.root", "RUN", "--series.steps", "often"], "got 'often'"),
        (["--series", "LightningCheckpoints", "--series.root", "nowhere"], "*.ckpt) below nowhere, found none"),
    ],
)
def test_a_wrong_series_is_one_sentence_and_nothing_is_written(trained, recipe, tmp_path, capsys, arguments, sentence):
    arguments = [str(trained) if word == "RUN" else word for word in arguments]
    assert main(["analyze", *arguments, "--config", str(recipe), "--root", str(tmp_path / "out")]) == 2
    (error,) = [x for x in capsys.readouterr().err.splitlines() if "lit-layers analyze: error: " in x]
    assert sentence in error
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_series_by_its_class_gives_the_numbers_of_its_folder(trained, recipe, tmp_path, capsys):
    by_class = tmp_path / "series.yaml"
    options = {"root": str(trained), "steps": [0, 3]}
    by_class.write_text(
        yaml.safe_dump({"series": {"class_path": "lit_layers.series.StepFolders", "init_args": options}})
    )
    words = ["analyze", "--config", str(by_class), "--config", str(recipe), "--device", "cpu"]
    assert main(words) == 0
    assert "0 measured, 4 were known" in capsys.readouterr().out  # in its own folder, by its own tokenizer
    assert main([*words, "--root", str(tmp_path / "out"), "--series.steps", "[2]"]) == 0
    found = records.read(tmp_path / "out" / "measurements.jsonl")
    written = [m for m in records.read(trained / "measurements.jsonl") if m.step == 2]
    assert_same_numbers(found, written)


@pytest.mark.slow
def test_checkpoints_of_lightning_are_measured_like_the_folders_beside_them(trained, recipe, tmp_path, capsys):
    words = ["--series", "LightningCheckpoints", "--series.root", str(trained), "--config", str(recipe)]
    assert main(["analyze", *words, "--root", str(tmp_path / "out"), "--device", "cpu"]) == 0
    found = {(m.step, m.analysis): m.records for m in records.read(tmp_path / "out" / "measurements.jsonl")}
    written = {(m.step, m.analysis): m.records for m in records.read(trained / "measurements.jsonl")}
    assert found
    for key, numbers in found.items():
        close_records(numbers, written[key])


@pytest.fixture
def two_models(tmp_path) -> list[Path]:
    """Of other tokenizers: the same text is other tokens to each."""
    text = [path.read_text() for path in sorted(PACKAGE.glob("*.py"))]
    folders = []
    for size in (280, 300):
        folders.append(tmp_path / f"bpe{size}")
        saved(folders[-1], "gpt2", vocab_size=300, seed=size)
        save_tokenizer(train_bpe(text, size), folders[-1])
    return folders


@pytest.fixture
def text(tmp_path) -> Path:
    """Many small documents, so that some are held out."""
    everything = "".join(path.read_text() for path in sorted(PACKAGE.rglob("*.py")))
    documents = [everything[start : start + 300] for start in range(0, 300_000, 300)]
    (tmp_path / "text.txt").write_text("\n<|endoftext|>\n".join(documents))
    return tmp_path / "text.txt"


@pytest.mark.soak
def test_each_of_several_models_is_measured_on_text_in_its_own_tokens(two_models, text, tmp_path, capsys, monkeypatch):
    path = tmp_path / "recipe.yaml"
    batches = {"class_path": "lit_layers.data.EvalText", "init_args": {**TEXT["init_args"]}}
    trajectory = {"class_path": "lit_layers.analyses.Trajectory", "init_args": {"batches": batches}}
    path.write_text(yaml.safe_dump({"corpus": str(text), "analyses": [trajectory]}))
    models = ["--series", "Models", "--series.models", f"[{', '.join(map(str, two_models))}]"]
    words = ["analyze", *models, "--config", str(path), "--root", str(tmp_path / "out"), "--device", "cpu"]
    assert main(words) == 0
    found = records.read(tmp_path / "out" / "measurements.jsonl")
    assert [m.run for m in found] == [str(model) for model in two_models]
    for model, measurement in zip(two_models, found, strict=True):
        own = EvalText(str(text), str(model), num_sequences=4, num_tokens=16)
        (alone,) = analyze_one(model, [Trajectory(batches=own)], root=tmp_path / "alone" / model.name)
        close_records(measurement.records, alone.records)
        assert measurement.provenance["data_hash"] == alone.provenance["data_hash"]
    assert found[0].provenance["data_hash"] != found[1].provenance["data_hash"]
    assert main(words) == 0
    assert "0 measured, 2 were known" in capsys.readouterr().out
    assert main([*words, "--tokenizer", str(two_models[0])]) == 2
    assert "tokenizer: each of these models reads with its own: leave it out" in capsys.readouterr().err
    (two_models[1] / "tokenizer.json").unlink()
    assert main([*words, "--root", str(tmp_path / "again")]) == 1  # the other one is measured all the same
    assert f"failed: tokenizer: {two_models[1]} carries none; name one with --tokenizer" in capsys.readouterr().err
    assert [m.run for m in records.read(tmp_path / "again" / "measurements.jsonl")] == [str(two_models[0])]
    save_tokenizer(train_bpe(["another text"], 257), tmp_path / "another")
    given = f"{{{two_models[1]}: {tmp_path / 'another'}}}"
    assert main([*words, "--root", str(tmp_path / "again"), "--series.tokenizers", given]) == 0
    (two_models[0] / "tokenizer.json").unlink()
    assert main([*words, "--root", str(tmp_path / "none")]) == 2
    assert f"error: tokenizer: {two_models[0]} carries none" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_help_names_the_series_and_their_options(capsys):
    for words, said in (
        (["--help"], ["--series SERIES", "HubRevisions", "Models"]),
        (["--series.help=HubRevisions"], ["--series.repo REPO", "--series.steps STEPS"]),
        (["--series.help=Models"], ["--series.models [ITEM,...]"]),
    ):
        try:
            code = main(["analyze", *words])  # of the options of a class the parser itself tells, and ends
        except SystemExit as end:
            code = end.code
        assert code == 0
        out = capsys.readouterr().out
        assert all(word in out for word in said), out


@pytest.mark.parametrize("path", sorted((ROOT / "recipes" / "series").glob("*.yaml")), ids=lambda path: path.stem)
@pytest.mark.parametrize("analyses", ["text", pytest.param("coupling", marks=pytest.mark.soak)])
def test_every_recipe_of_a_series_fits_the_analyses_of_text(path, analyses):
    command = Command(["--config", str(path), "--config", str(ROOT / "recipes" / "analyses" / f"{analyses}.yaml")])
    (series,) = command.series(Checkpoints())
    assert series.name in (command.options.series.init_args.get("repo"), path.stem)
    made = command.analyses(target(series.name, "its/tokenizer"))
    texts = [value for analysis in made for value in vars(analysis).values() if isinstance(value, EvalText)]
    assert texts
    assert {(text.corpus, text.tokenizer) for text in texts} == {("wikitext", "its/tokenizer")}
    first = path.read_text().splitlines()
    assert f"--config recipes/series/{path.name} " in "".join(first)
