"""Every list of analyses has the data it asks for behind every recipe and series that it is documented with."""

import logging
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pytest
import yaml

from lit_layers.analyses import NextTokenProbe, Probe
from lit_layers.analyses.base import Analysis
from lit_layers.analyses.probes.task_probes import TaskTexts
from lit_layers.cli.verbs.analyze import Command
from lit_layers.data import EvalText, prepare
from lit_layers.errors import InputError
from lit_layers.measuring.one_model import measure
from tests.support.labelled_texts import saved_gpt2
from tests.support.measured_series import analyze
from tests.support.targets import target

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "recipes").rglob("*.*")]
LISTS = "recipes/analyses/"
# Images that the splits of ImageNet hold; they are not on any test machine.
IMAGENET = {"train": 1_281_167, "validation": 50_000}


def commands() -> Iterator[str]:
    """Each command of the pages and recipes, however it is set: comments, lines broken, prose."""
    for page in sorted(PAGES):
        text = re.sub(r"\\\n#?", " ", page.read_text())
        yield from re.findall(r"lit-layers (?:fit|analyze)[^\n`]*(?:\n[^\n`]*)??(?=`|\n|$)", text)
        yield from (" ".join(span.split()) for span in re.findall(r"`(lit-layers (?:fit|analyze)[^`]*)`", text))


def recipes_of(command: str) -> tuple[str, ...]:
    return tuple(re.findall(r"--config (recipes/\S+?\.yaml)", command))


def documented() -> Iterator[tuple[str, ...]]:
    """The recipes of each command that names a list of analyses."""
    for found in map(recipes_of, commands()):
        if any(path.startswith(LISTS) for path in found):
            yield found


TOGETHER = sorted(set(documented()))
OF_IMAGES = [paths for paths in TOGETHER if LISTS + "images.yaml" in paths]
ELSEWHERE = ("recipes/gpt2/", "recipes/series/", "recipes/deit/")
OF_PYTHON = [paths for paths in TOGETHER if paths not in OF_IMAGES and not paths[0].startswith(ELSEWHERE)]


def test_the_commands_are_found():
    for paths in (
        ("recipes/series/pythia_70m.yaml", "recipes/analyses/text.yaml"),  # docs/series.md
        ("recipes/series/gpt2_family.yaml", "recipes/analyses/text.yaml"),  # the recipe's own header
        ("recipes/analyses/representation.yaml",),  # prose
    ):
        assert paths in TOGETHER


def test_no_list_asks_the_quickstart_for_longer_texts_than_it_reads():
    reads = yaml.safe_load((ROOT / "recipes/quickstart/gpt2.yaml").read_text())["model"]["init_args"]["config"]
    names = "recipes/quickstart/gpt2.yaml", "checkpoints/quickstart ", "checkpoints/first "
    behind = {path for one in commands() if any(name in one for name in names) for path in recipes_of(one)}
    lists = {path for path in behind if path.startswith(LISTS)}
    assert len(lists) >= 4
    for path in lists:
        asked = map(int, re.findall(r"num_tokens: (\d+)", (ROOT / path).read_text()))
        assert max(asked) <= reads["n_positions"], path


@pytest.fixture(scope="session")
def tokenizers(realdata) -> dict[str, str]:
    folder = realdata / "tokenizers"
    return {"gpt2": str(folder / "gpt2"), "the series' own": str(folder / "gpt_neox_20b")}


@pytest.fixture(scope="session")
def wikitext(realdata, tmp_path_factory) -> str:
    """The 60 validation articles of WikiText-103, and a few of its training articles."""
    folder = tmp_path_factory.mktemp("wikitext")
    shutil.copy(realdata / "wikitext2" / "validation.parquet", folder)
    pd.read_parquet(realdata / "wikitext2" / "train.parquet").head(5).to_parquet(folder / "train.parquet")
    return str(folder)


@pytest.fixture(scope="session")
def openwebtext(realdata, tokenizers, tmp_path_factory) -> str:
    """Shards with a hundredth of the 90 M tokens that are held out of OpenWebText: more than 13,000 windows of 64."""
    folder = tmp_path_factory.mktemp("openwebtext")
    rows = pd.read_parquet(realdata / "pretrain_mix" / "train.parquet")[["text"]].sample(4000, random_state=0)
    rows.to_parquet(folder / "documents.parquet")
    shards = folder / "shards"
    prepare(str(folder / "documents.parquet"), tokenizers["gpt2"], shards, validation=0.9, progress=False)
    return str(shards)


@pytest.fixture
def corpus_of(request) -> Callable[[str], str]:
    """What stands in for the corpus that a recipe names."""
    return lambda name: request.getfixturevalue({"data/openwebtext": "openwebtext"}.get(name, name))


def listed(paths: tuple[str, ...], corpus: str, tokenizer: str, tmp_path: Path) -> list[Analysis]:
    """What the last list of these recipes measures, read as `analyze` reads it."""
    merged = tmp_path / "analyses.yaml"
    last = yaml.safe_load((ROOT / [path for path in paths if path.startswith(LISTS)][-1]).read_text())
    merged.write_text(yaml.safe_dump({"corpus": corpus, "tokenizer": tokenizer, **last}))
    return Command(["model", "--config", str(merged)]).analyses(target())


def told(paths: tuple[str, ...], key: str, default: str) -> str:
    found = [yaml.safe_load((ROOT / path).read_text()).get(key) for path in paths]
    return next((value for value in reversed(found) if value), default)


def begin(analyses: list[Analysis], realdata: Path) -> None:
    for analysis in analyses:
        if isinstance(analysis, TaskTexts):
            analysis.folder = str(realdata)
        analysis.check_data()


@pytest.mark.nightly  # the short version is on small sets, below
@pytest.mark.realdata
@pytest.mark.timeout(0)
def test_data_of_a_documented_command_is_enough(corpus_of, tokenizers, realdata, tmp_path, caplog):
    for paths in [paths for paths in TOGETHER if paths not in [*OF_IMAGES, *OF_PYTHON]]:
        corpus = told(paths, "corpus", "")
        tokenizer = tokenizers[told(paths, "tokenizer", "the series' own")]
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            begin(listed(paths, corpus_of(corpus), tokenizer, tmp_path), realdata)
        short = [message for message in caplog.messages if "all are taken" in message]
        is_short = corpus == "wikitext" and LISTS + "text.yaml" in paths
        assert len(short) == (2 if is_short else 0), f"{paths}: what is smaller than it was asked for is said"


@pytest.mark.nightly
@pytest.mark.realdata
def test_data_of_the_documented_commands_on_images_is_enough(realdata, tmp_path):
    assert OF_IMAGES
    (images,) = {paths[-1] for paths in OF_IMAGES}
    begin(listed((images,), str(realdata / "cifar10"), "none", tmp_path), realdata)
    asked = re.findall(r"num_images: (\d+)", (ROOT / images).read_text())
    assert max(map(int, asked)) <= min(IMAGENET.values())


@pytest.mark.nightly
@pytest.mark.realdata
@pytest.mark.timeout(0)
def test_data_of_a_documented_command_on_the_python_library_is_enough(realdata, tokenizers, tmp_path):
    """Of a list alone with the tokenizer of any model: those that keep indents whole have windows of nothing else."""
    for paths in OF_PYTHON:
        of_a_model = tokenizers.values() if len(paths) == 1 else ()
        for tokenizer in (told(paths, "tokenizer", "bpe:2048"), *of_a_model):
            begin(listed(paths, "python", tokenizer, tmp_path), realdata)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> str:
    """A corpus of 13 documents, 4 of them held out."""
    folder = tmp_path_factory.mktemp("small")
    for split, number in (("train", 9), ("validation", 4)):
        texts = [f"Document {n} counts {' '.join(str(n * k) for k in range(90))}." for n in range(number)]
        pd.DataFrame({"text": texts}).to_parquet(folder / f"{split}.parquet")
    return str(folder)


def test_probes_learn_the_tokenizer_of_a_run_that_trained_its_own(small, tmp_path):
    probe, sweep, *_ = listed((LISTS + "probes.yaml",), small, "bpe:280", tmp_path)
    assert isinstance(probe, Probe)
    pd.DataFrame({"text": [f"word {n}" for n in range(20)], "label": ["a", "b"] * 10}).to_csv(tmp_path / "task.csv")
    for analysis in (probe, sweep):
        analysis.task = type(analysis._reader.task)("task", str(tmp_path / "task.csv"), test=None)
        del analysis._reader
        analysis.check_data()


def text(corpus: str, **options: object) -> EvalText:
    return EvalText(corpus, "bpe:280", num_tokens=20, **options)


def test_all_windows_are_taken_where_they_are_enough_and_that_is_said(small, caplog):
    whole = text(small, num_sequences=1)
    total = next(n for n in range(2, 500) if not exists(text(small, num_sequences=n))) - 1
    caplog.clear()
    taken = text(small, num_sequences=1000, min_sequences=total)
    assert len(taken.windows()) == total == sum(len(batch["input_ids"]) for batch in taken)
    assert len(taken) == -(-total // taken.batch_size)
    assert [m for m in caplog.messages if f"has {total} windows" in m and "num_sequences asks for 1000" in m]
    exactly = text(small, num_sequences=total)
    assert taken.content_hash() == exactly.content_hash()
    assert (whole.windows() == taken.windows()[:1]).all()
    with pytest.raises(InputError, match=rf"has {total} windows .*, and min_sequences is {total + 1}"):
        text(small, num_sequences=1000, min_sequences=total + 1).windows()
    assert len(text(small, num_sequences=5, min_sequences=2).windows()) == 5


def exists(batches: EvalText) -> bool:
    try:
        return bool(len(batches.windows()))
    except InputError:
        return False


def test_a_smaller_set_stands_in_the_tags_and_gives_equal_numbers_wherever_it_is_measured(small, tmp_path):
    folder = tmp_path / "model"
    saved_gpt2(folder, n_layer=1, vocab_size=280)
    parts = {"train": {"documents": (0.0, 0.75)}, "test": {"documents": (0.75, 1.0)}}

    def probe() -> NextTokenProbe:
        sets = {name: text(small, num_sequences=900, min_sequences=4, **part) for name, part in parts.items()}
        return NextTokenProbe(**sets, num_classes=5, random_labels=False)

    (after,) = analyze(folder, [probe()], root=tmp_path / "root")
    assert after.error is None
    (coverage,) = (record for record in after.records if record.metric == "coverage")
    assert coverage.tags["num_train_wanted"] == coverage.tags["num_test_wanted"] == 900
    from lit_layers.models.saved import load

    during = measure(load(folder), probe(), run="run", step=0)
    assert during.records == after.records
    hashes = ("config_hash", "data_hash")
    assert [during.provenance[name] for name in hashes] == [after.provenance[name] for name in hashes]


def test_too_little_data_is_refused_before_a_model_is_opened(small, tmp_path, monkeypatch):
    monkeypatch.setattr("lit_layers.models.saved.load", None)
    folder = tmp_path / "model"
    saved_gpt2(folder, n_layer=1)
    few = text(small, num_sequences=900)
    with pytest.raises(InputError, match="num_sequences is 900"):
        analyze(folder, [NextTokenProbe(train=few, test=few)], root=tmp_path / "root")
