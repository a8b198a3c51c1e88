"""Numbers of hidden states as metrics of torchmetrics: equal to the functions, in Lightning, and over two ranks."""

import json
import math

import lightning as L
import pytest
import torch
from torch import distributed, nn
from torchmetrics import MetricCollection

from lit_layers.functional import entropy, trajectory
from lit_layers.integrations.torchmetrics import (
    EffectiveRank,
    Expodistance,
    LineShapeScore,
    PromptEntropy,
)
from lit_layers.models.build import causal_lm
from tests.support.forked import run_ranks

CLASSES = [LineShapeScore, Expodistance, PromptEntropy, EffectiveRank]


def states(seed: int, prompts: int = 3, tokens: int = 6) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Four layers of a batch whose prompts are of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(4, prompts, tokens, 5, generator=generator)
    mask = torch.arange(tokens) < torch.tensor([tokens, tokens - 2, tokens - 3])[:prompts, None]
    return [*hidden], mask.long()


def by_hand(kind: type, batches, drop_first: int = 0) -> float:
    """The mean over prompts, each by itself and without padding."""
    values = []
    for hidden, mask in batches:
        for row, real in enumerate(mask.bool()):
            tokens = torch.stack([layer[row][real][drop_first:] for layer in hidden]).double()
            if kind is LineShapeScore:
                steps = tokens.diff(dim=0)
                unit = steps / steps.norm(dim=-1, keepdim=True)
                values.append((len(unit) / unit.sum(0).norm(dim=-1)).mean())
            elif kind is Expodistance:
                rates = tokens.norm(dim=-1).log().diff(dim=0)
                values.append((rates.std(0, correction=0) / rates.mean(0).abs()).mean())
            else:
                singular = torch.linalg.svdvals(tokens[1:])  # layers 1..L
                shares = singular**2 if kind is PromptEntropy else singular
                shares = shares / shares.sum(-1, keepdim=True)
                entropies = -(shares * shares.log()).sum(-1)
                values.append((entropies if kind is PromptEntropy else entropies.exp()).mean())
    return torch.stack(values).mean().item()


@pytest.mark.parametrize("kind", CLASSES)
def test_a_metric_is_the_mean_over_prompts_without_their_padding(kind):
    batches = [states(1), states(2)]
    for drop_first in (0, 1):
        metric = kind(drop_first=drop_first)
        for batch in batches:
            metric.update(*batch)
        assert metric.compute().item() == pytest.approx(by_hand(kind, batches, drop_first), rel=1e-6)
    alone = kind()
    alone.update(states(1)[0])  # no mask: nothing is padding
    assert alone.compute().item() == pytest.approx(by_hand(kind, [(states(1)[0], torch.ones(3, 6))]), rel=1e-6)


def test_options_are_those_of_the_function_and_of_a_layer():
    hidden, _ = states(3)
    path, of_layer = LineShapeScore(layer=2), PromptEntropy(layer=2, normalization="maxEntropy")
    path.update(hidden)
    of_layer.update(hidden)
    expected = trajectory.line_shape_score(torch.stack(hidden[:3])).mean()
    assert path.compute().item() == pytest.approx(expected.item())
    expected = entropy.matrix_entropy(hidden[2], normalization="maxEntropy").mean()
    assert of_layer.compute().item() == pytest.approx(expected.item())


def test_what_has_no_value_is_left_out_and_nothing_at_all_is_nan():
    hidden, mask = states(4)
    hidden[2][0, 0] = hidden[1][0, 0]  # a step of length zero: this token has no line-shape score
    metric = LineShapeScore()
    metric.update(hidden, mask * 0)
    assert math.isnan(metric.compute().item())
    metric.update(hidden, mask)
    later = mask.clone()
    later[0, 0] = 0
    assert metric.compute().item() == pytest.approx(by_hand(LineShapeScore, [(hidden, later)]))


def test_a_collection_tells_its_metrics_apart_although_their_states_begin_alike():
    """torchmetrics updates only one of two metrics whose states are equal after the first batch: here nothing."""
    hidden, mask = states(5)
    together = MetricCollection({kind.__name__: kind() for kind in CLASSES} | {"second": PromptEntropy(layer=2)})
    together.update(hidden, mask * 0)
    together.update(hidden, mask)
    values = together.compute()
    for kind in CLASSES:
        assert values[kind.__name__].item() == pytest.approx(by_hand(kind, [(hidden, mask)]))
    assert values["second"] != values["PromptEntropy"]


class Own(L.LightningModule):
    """A user's module that logs a metric and a collection."""

    def __init__(self) -> None:
        super().__init__()
        self.model = causal_lm("gpt2", n_layer=2, n_embd=16, n_head=2, n_positions=8, vocab_size=50)
        self.line_shape_score = LineShapeScore()
        self.spread = MetricCollection([PromptEntropy(), EffectiveRank()], prefix="spread/")

    def validation_step(self, batch, index):
        hidden = self.model(input_ids=batch, output_hidden_states=True).hidden_states
        self.line_shape_score.update(hidden)
        self.spread.update(hidden)
        self.log("line_shape_score", self.line_shape_score)
        self.log_dict(self.spread)


def test_a_module_logs_them_from_its_validation_step(tmp_path):
    tokens = torch.randint(50, (6, 8), generator=torch.Generator().manual_seed(0))
    module = Own().eval()
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
    }
    trainer = L.Trainer(accelerator="cpu", devices=1, default_root_dir=tmp_path, **quiet)
    (logged,) = trainer.validate(module, torch.utils.data.DataLoader(tokens, batch_size=4), verbose=False)
    with torch.no_grad():
        hidden = module.model(input_ids=tokens, output_hidden_states=True).hidden_states
    expected = trajectory.line_shape_score(torch.stack(hidden)).mean().item()
    assert logged["line_shape_score"] == pytest.approx(expected, rel=1e-6)
    ranks = [entropy.effective_rank(layer) for layer in hidden[1:]]
    assert logged["spread/EffectiveRank"] == pytest.approx(torch.stack(ranks).mean().item(), rel=1e-6)


def test_two_ranks_of_unequal_size_give_what_one_gives(tmp_path):
    batches = [states(1), states(2), states(3)]

    def of(numbers) -> dict[str, float]:
        metrics = nn.ModuleList([kind() for kind in CLASSES])
        for number in numbers:
            for metric in metrics:
                metric.update(*batches[number])
        return {type(metric).__name__: metric.compute().item() for metric in metrics}

    def rank() -> int:
        distributed.init_process_group("gloo")
        number = distributed.get_rank()
        found = of([[0, 2], [1]][number])
        (tmp_path / f"{number}.json").write_text(json.dumps(found))
        distributed.destroy_process_group()
        return 0

    assert run_ranks(rank) == [0, 0]
    one = of([0, 1, 2])
    for number in (0, 1):
        assert json.loads((tmp_path / f"{number}.json").read_text()) == pytest.approx(one, rel=1e-9)
