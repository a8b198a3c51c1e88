"""The Jacobian lens and its controls, against numpy and the logit lens of `Lens`."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from lit_layers.analyses import JacobianLens
from lit_layers.analyses.jacobian_lens import shuffle_weights, single_prompts
from lit_layers.errors import InputError
from lit_layers.models.view import LayeredModel
from tests.support.listed_batches import Listed
from tests.support.measured import records_of
from tests.support.tiny_models import tiny

SKIP = 2


def prompts(number: int = 7, tokens: int = 12) -> Listed:
    ids = torch.randint(3, 60, (number, tokens), generator=torch.Generator().manual_seed(4))
    return Listed({"input_ids": ids[:3]}, {"input_ids": ids[3:]})


def lens(batches=None, **options) -> JacobianLens:
    fixed = {"num_prompts": 2, "skip_first": SKIP}
    return JacobianLens(batches=batches or prompts(), **(fixed | options))


@pytest.fixture(scope="module")
def view() -> LayeredModel:
    return LayeredModel(tiny("gpt2", torch.float64))


@pytest.fixture(scope="module")
def records(view):
    return records_of(lens(), view)


def fitted_matrices(view: LayeredModel, batches: Any, num_prompts: int) -> torch.Tensor:
    """Return the lens (layers, dim, dim) fitted on the first prompts."""
    given = [*itertools.islice(single_prompts(batches), num_prompts)]
    return lens(batches, num_prompts=num_prompts).fit(view, "jacobian", given)[0]


def values(records, metric: str, name: str) -> list[float]:
    return [r.value for r in records if r.metric == metric and r.tags.get("lens", name) == name]


def test_divergence_and_rank_equal_those_of_numpy(view, records):
    """Apply the lens matrix and the model's norm and head, then compute softmax and ranks in numpy."""
    fitted = fitted_matrices(view, prompts(), 2)
    identity = np.eye(view.dim)
    for name, matrices in (("jacobian", fitted.numpy()), ("logit", [identity] * view.num_layers)):
        for layer in range(view.num_layers):
            divergences, ranks = [], []
            for batch in prompts():
                for ids in batch["input_ids"]:
                    trajectory = view.trajectory({"input_ids": ids[None]})
                    carried = torch.from_numpy(trajectory.hidden[layer].numpy() @ matrices[layer].T)
                    scores = view.readout(carried)[0].detach().numpy()
                    own = trajectory.logits[0].numpy()
                    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (own, scores))
                    positions = range(SKIP, len(ids) - 1)
                    divergences.append([(np.exp(p[t]) * (p[t] - q[t])).sum() for t in positions])
                    ranks.append([1 + (scores[t] > scores[t, ids[t + 1]]).sum() for t in positions])
            held_out = slice(2, None)
            expected = np.mean(divergences[held_out]), np.exp(np.log(ranks[held_out]).mean())
            found = values(records, "lens_kl", name)[layer], values(records, "lens_rank", name)[layer]
            assert found == pytest.approx(expected, rel=1e-6), (name, layer)


def test_shuffled_weights_permute_only_the_weights_of_blocks(view):
    model = shuffle_weights(view, 0)
    for before, after in zip(view.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(before.flatten().sort().values, after.flatten().sort().values, rtol=0, atol=0)
    moved = [n for n, p in model.named_parameters() if not torch.equal(p, dict(view.model.named_parameters())[n])]
    assert moved
    assert all(".h." in name and model.get_parameter(name).ndim > 1 for name in moved)


def test_prompts_that_are_too_short_are_left_out_and_counted(view):
    ids = torch.cat([b["input_ids"] for b in prompts()])
    chosen = [0, 0, 1, 2, 3, 4, 4, 5, 6]
    length = torch.tensor([SKIP + 1, 99, 99, 99, 99, 99, 2, 99, 99])  # the first and the seventh are cut
    mask = (torch.arange(ids.shape[1]) < length[:, None]).long()
    cut = records_of(lens(Listed({"input_ids": ids[chosen], "attention_mask": mask}), num_prompts=3), view)
    whole = records_of(lens(num_prompts=2), view)
    assert [r.value for r in cut] == pytest.approx([r.value for r in whole], rel=1e-6)
    for record in cut:
        assert record.tags.get("num_undefined") == 1
        is_fitted = record.tags.get("lens", "jacobian") == "jacobian"
        assert record.tags.get("num_undefined_fit_prompts") == (1 if is_fitted else None)
    assert not any("num_undefined" in name for record in whole for name in record.tags)


def test_too_short_held_out_prompts_are_refused(view):
    ids = torch.randint(3, 60, (6, 12), generator=torch.Generator().manual_seed(4))
    with pytest.raises(InputError, match=r"give more than 2 \(num_prompts\) of more than 3 tokens"):
        records_of(lens(Listed({"input_ids": ids[:2]}, {"input_ids": ids[2:, :3]})), view)


def test_options_that_leave_no_prompt_are_refused_before_the_measurement(view):
    for options, sentence in (
        ({"num_prompts": 7}, "no prompt to compare on: give more than 7"),
        ({"skip_first": 40}, "no prompt to fit on: .* of more than 41 tokens"),
    ):
        with pytest.raises(InputError, match=sentence):
            lens(**options).check(view)
