"""Lists of analyses get data that fit the models; if there are fewer texts, this is reported."""

from pathlib import Path

import pandas as pd
import pytest
import yaml

from lit_layers.analyses import NextTokenProbe, Probe
from lit_layers.cli.verbs.analyze import Command
from lit_layers.data import EvalText
from lit_layers.errors import InputError
from lit_layers.measuring.one_model import measure
from tests.support.labelled_texts import saved_gpt2
from tests.support.measured_series import analyze
from tests.support.targets import target

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> str:
    """Return a corpus of 13 documents, 4 of them held out."""
    folder = tmp_path_factory.mktemp("small")
    for split, number in (("train", 9), ("validation", 4)):
        texts = [f"Document {n} counts {' '.join(str(n * k) for k in range(90))}." for n in range(number)]
        pd.DataFrame({"text": texts}).to_parquet(folder / f"{split}.parquet")
    return str(folder)


def test_probes_learn_the_tokenizer_of_a_run_that_trained_its_own(small, tmp_path):
    recipe = tmp_path / "analyses.yaml"
    described = yaml.safe_load((ROOT / "recipes" / "analyses" / "probes.yaml").read_text())
    recipe.write_text(yaml.safe_dump({"corpus": small, "tokenizer": "bpe:280", **described}))
    probe, sweep, *_ = Command(["model", "--config", str(recipe)]).analyses(target())
    assert isinstance(probe, Probe)
    pd.DataFrame({"text": [f"word {n}" for n in range(20)], "label": ["a", "b"] * 10}).to_csv(tmp_path / "task.csv")
    for analysis in (probe, sweep):
        analysis.task = type(analysis._reader.task)("task", str(tmp_path / "task.csv"), test=None)
        del analysis._reader
        analysis.check_data()


def text(corpus: str, **options: object) -> EvalText:
    return EvalText(corpus, "bpe:280", num_tokens=20, **options)


def test_all_windows_are_used_if_they_are_few_and_this_is_reported(small, caplog):
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


def test_a_smaller_set_is_tagged_and_gives_equal_numbers_in_training_and_analyze(small, tmp_path):
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
