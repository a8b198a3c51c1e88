"""A probe on a task while a model trains: without a trace in the weights, and as after training."""

import json
import tempfile

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from lit_layers import records
from lit_layers.analyses import NextTokenResidual, Probe, SampleSizeSweep
from lit_layers.data import ProbeTask
from lit_layers.data.tokenization import TextTokenizer, save_tokenizer
from lit_layers.training import EmergenceCallback, SeriesCheckpoint
from lit_layers.training.run_folder import step_folder
from tests.support.measured_series import analyze
from tests.support.random_text import RandomText
from tests.support.tiny_training import fit

WORDS = ["<|endoftext|>", "[UNK]", *"abcdefghijklmnopqrstuvwxyz"]


class FullDisk(Probe):
    def _features_of(self, model, rows, results):
        super()._features_of(model, rows, results)
        raise OSError("no space left on device")


@pytest.fixture
def task(tmp_path) -> tuple[ProbeTask, str]:
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    save_tokenizer(TextTokenizer(words, WORDS[0]), tmp_path / "tokenizer")
    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", 40), ("test", 20)):
        rows = []
        for number in range(count):
            letters = [WORDS[i] for i in torch.randint(2, 28, (8,), generator=generator).tolist()]
            rows.append({"text": " ".join([*letters, "ab"[number % 2]]), "label": number % 2})
        (tmp_path / "task").mkdir(exist_ok=True)
        (tmp_path / "task" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ProbeTask("letters", str(tmp_path / "task")), str(tmp_path / "tokenizer")


@pytest.mark.soak
def test_a_probe_leaves_no_trace_in_training_and_finds_the_same_afterwards(task, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    options = {"task": task[0], "tokenizer": task[1]}
    analyses = [
        Probe(**options),
        SampleSizeSweep(**options, num_seeds=2),
        NextTokenResidual(batches=RandomText(num_batches=4, batch_size=8), num_halves=2),
        FullDisk(**options, name="failing"),
    ]
    root = tmp_path / "run"
    _, watched = fit(tmp_path, [SeriesCheckpoint([2, 4], root), EmergenceCallback(analyses, [2, 4], root)], steps=4)
    _, plain = fit(tmp_path, [], steps=4)
    assert all(
        torch.equal(ours, theirs)
        for ours, theirs in zip(watched.state_dict().values(), plain.state_dict().values(), strict=True)
    )
    found = {(m.step, m.analysis): m for m in records.read(root / "measurements.jsonl")}
    assert [m.error is None for m in found.values()] == [True, True, True, False] * 3  # step 0 as well
    assert found[4, "failing"].error == "OSError: no space left on device"
    assert not list((tmp_path / "scratch").glob("lit_layers-*"))
    again = analyze(step_folder(root, 4), analyses[:3], root=tmp_path / "again")
    for measurement in again:
        assert measurement.error is None
        assert measurement.records == found[4, measurement.analysis].records
    assert max(r.value for r in found[4, "probe/letters"].records if r.metric == "accuracy" and r.layer == 0) == 1.0
