"""`--plan` measures the first checkpoint of a series, and prints what all of them take."""

from lit_layers import records
from lit_layers.cli.main import main
from lit_layers.models.build import causal_lm, save


def test_a_series_is_planned_by_its_first_checkpoint_which_is_not_measured_again(tmp_path, corpus, capsys):
    for step in (2, 4):
        network = causal_lm("gpt2", seed=step, n_layer=2, n_embd=32, n_head=2, n_positions=128, vocab_size=300)
        save(network, tmp_path / "run" / f"step-{step:09d}", corpus / "tokenizer")
    words = ["analyze", tmp_path / "run", "--corpus", corpus, "--metrics", "trajectory,lens", "--device", "cpu"]
    assert main([*map(str, words), "--plan"]) == 0
    *_, first, second, whole = capsys.readouterr().out.splitlines()
    assert [first.split()[0], second.split()[0]] == ["trajectory", "lens"]
    assert whole.startswith("in all, 2 checkpoints ")
    found = records.read(tmp_path / "run" / "measurements.jsonl")
    assert {m.step for m in found} == {2}
    assert main([*map(str, words)]) == 0
    assert records.read(tmp_path / "run" / "measurements.jsonl")[: len(found)] == found
