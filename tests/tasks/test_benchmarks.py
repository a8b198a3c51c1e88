"""Benchmark scores at every checkpoint equal those of lm-eval's own evaluation, and cost its forward passes only."""

import pytest

from lit_layers.cli.options import _instantiate
from lit_layers.errors import InputError
from lit_layers.models.view import LayeredModel
from lit_layers.tasks.benchmarks import Benchmarks
from tests.support.benchmark_rows import lm_eval_file, tiny_causal_model
from tests.support.measured import records_of
from tests.support.tiny_models import tiny

NAMES = {"task_score": "acc", "task_score_norm": "acc_norm", "task_perplexity": "perplexity"}


@pytest.mark.filterwarnings("ignore:invalid escape sequence")
@pytest.mark.soak
def test_scores_at_each_checkpoint_equal_those_of_lm_eval_and_cost_its_forward_passes(folder, tmp_path):
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    tasks, tokenizer = ("arc_challenge", "lambada"), str(folder / "tokenizer")
    files = [lm_eval_file(task, tmp_path) for task in tasks]
    analysis = Benchmarks(tasks=tasks, tokenizer=tokenizer, folder=folder / "local", batch_size=4, limit=3)
    options = {"limit": 3, "bootstrap_iters": 2, "task_manager": TaskManager(include_defaults=False)}
    for seed in (0, 1):  # two checkpoints of one run
        model, read = tiny_causal_model(blocks=2, seed=seed), []
        wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1)
        evaluated = [simple_evaluate(wrapped, tasks=[file], **options) for file in files]
        model.register_forward_pre_hook(lambda module, inputs, read=read: read.append(inputs[0].numel()))
        records = records_of(analysis, model)
        results = {task: next(iter(each["results"].values())) for task, each in zip(tasks, evaluated, strict=True)}
        assert [r.metric for r in records if r.tags["task"] == tasks[0]] == [*[*NAMES][:2], "random_score"]
        for record in (r for r in records if r.metric in NAMES):
            name, expected = NAMES[record.metric], results[record.tags["task"]]
            assert (record.value, record.n) == (pytest.approx(expected[f"{name},none"], rel=1e-5), 3)
            if name != "perplexity":  # lm-eval draws the error of a perplexity at random
                assert record.stderr == pytest.approx(expected[f"{name}_stderr,none"], rel=1e-5)
        assert records[2].value == pytest.approx((1 / 4 + 1 / 3 + 1 / 5) / 3)
        texts = ["".join(each.arguments) for scorer in analysis._scorers.values() for each in scorer.requests()]
        length = sum(len(wrapped.tok_encode(text)) - 1 for text in texts)
        assert 0.9 * length < sum(read) <= 1.2 * length


def test_wrong_options_are_refused(folder):
    analysis = Benchmarks(tasks=("arc_easy", "a.yaml"), tokenizer=str(folder / "tokenizer"))
    with pytest.raises(InputError, match="tokenizer: it has 400 tokens and the model 61"):
        analysis.check(LayeredModel(tiny("gpt2")))
    with pytest.raises(InputError, match=r"a recipe names no task file, which is code, got a\.yaml"):
        _instantiate(Benchmarks, tasks=analysis.tasks, tokenizer=analysis.tokenizer)
