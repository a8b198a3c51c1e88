"""The Jacobian lens and its controls, against numpy, the logit lens of `Lens`, and the published file format."""

import numpy as np
import pytest
import torch

from lit_layers.analyses import JacobianLens, Lens, fit_jacobian_lens
from lit_layers.analyses.readouts.jacobian_lens import with_shuffled_weights
from lit_layers.errors import InputError
from lit_layers.files.lens_files import write_lens
from lit_layers.models.view import LayeredModel
from tests.support.listed_batches import Listed
from tests.support.tiny_models import tiny

SKIP = 2


def prompts(number: int = 7, tokens: int = 12) -> Listed:
    ids = torch.randint(3, 60, (number, tokens), generator=torch.Generator().manual_seed(4))
    return Listed({"input_ids": ids[:3]}, {"input_ids": ids[3:]})


def lens(batches=None, **options) -> JacobianLens:
    fixed = {"num_prompts": 2, "num_tuned": 3, "skip_first": SKIP, "tuned_steps": 20}
    return JacobianLens(batches=batches or prompts(), **(fixed | options))


@pytest.fixture(scope="module")
def view() -> LayeredModel:
    return LayeredModel(tiny("gpt2", torch.float64))


@pytest.fixture(scope="module")
def records(view):
    return list(lens().run(view))


def values(records, metric: str, name: str) -> list[float]:
    return [r.value for r in records if r.metric == metric and r.tags.get("lens", name) == name]


def test_divergence_and_rank_are_those_of_numpy(view, records):
    """From the states by the lens' matrix through the model's own norm and head, softmax and ranks in numpy."""
    fitted = fit_jacobian_lens(view, prompts(), num_prompts=2, skip_first=SKIP)
    identity = np.eye(view.dim)
    for name, matrices in (("jacobian", fitted.jacobians.numpy()), ("logit", [identity] * view.num_layers)):
        for layer in range(view.num_layers):
            divergences, ranks = [], []
            for batch in prompts():
                for ids in batch["input_ids"]:
                    trajectory = view.trajectory({"input_ids": ids[None]})
                    carried = torch.from_numpy(trajectory.hidden[layer].numpy() @ matrices[layer].T)
                    scores = view.readout(carried)[0].detach().numpy()
                    own = trajectory.logits[0].numpy()
                    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (own, scores))
                    places = range(SKIP, len(ids) - 1)
                    divergences.append([(np.exp(p[t]) * (p[t] - q[t])).sum() for t in places])
                    ranks.append([1 + (scores[t] > scores[t, ids[t + 1]]).sum() for t in places])
            held_out = slice(3, None)  # two fit, three train the affine maps
            expected = np.mean(divergences[held_out]), np.exp(np.log(ranks[held_out]).mean())
            found = values(records, "lens_kl", name)[layer], values(records, "lens_rank", name)[layer]
            assert found == pytest.approx(expected, rel=1e-6), (name, layer)


def test_the_logit_lens_is_that_of_lens_where_no_place_is_skipped(view):
    ids = torch.cat([b["input_ids"] for b in prompts()])
    here = list(lens(num_prompts=1, num_tuned=1, skip_first=0, lenses=("logit",)).run(view))
    there = list(Lens(batches=Listed({"input_ids": ids[1:]})).run(view))
    expected = [r.value for r in there if r.metric == "kl_to_final"][:-1]
    assert values(here, "lens_kl", "logit") == pytest.approx(expected, rel=1e-9)


@pytest.mark.soak
def test_the_affine_maps_come_nearer_than_the_states_as_they_are_and_shuffled_weights_do_not(view, records):
    tuned, logit, shuffled = (np.array(values(records, "lens_kl", name)) for name in ("tuned", "logit", "shuffled"))
    trained = list(lens(prompts(40, 16), num_tuned=36, tuned_steps=150, lenses=("tuned", "logit")).run(view))
    better = np.array(values(trained, "lens_kl", "tuned")) < np.array(values(trained, "lens_kl", "logit"))
    assert better.all()
    assert len(tuned) == len(logit) == len(shuffled) == view.num_layers
    model = with_shuffled_weights(view, 0)
    for before, after in zip(view.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(before.flatten().sort().values, after.flatten().sort().values, rtol=0, atol=0)
    moved = [n for n, p in model.named_parameters() if not torch.equal(p, dict(view.model.named_parameters())[n])]
    assert moved
    assert all(".h." in name and model.get_parameter(name).ndim > 1 for name in moved)


def test_halves_are_of_every_second_prompt_and_their_mean_is_the_lens(view):
    fitted = fit_jacobian_lens(view, prompts(), num_prompts=4, skip_first=SKIP)
    ids = torch.cat([b["input_ids"] for b in prompts()])
    for half in (0, 1):
        alone = fit_jacobian_lens(view, [{"input_ids": ids[half:4:2]}], num_prompts=2, skip_first=SKIP)
        torch.testing.assert_close(fitted.halves[half], alone.jacobians, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(fitted.halves.mean(0), fitted.jacobians)


def test_padding_on_the_left_changes_nothing(view):
    ids = torch.cat([b["input_ids"] for b in prompts()])
    left = torch.cat([torch.zeros(7, 3, dtype=torch.long), ids], 1)
    mask = torch.cat([torch.zeros(7, 3, dtype=torch.long), torch.ones_like(ids)], 1)
    padded = list(lens(Listed({"input_ids": left, "attention_mask": mask}), tuned_steps=2).run(view))
    plain = list(lens(tuned_steps=2).run(view))
    assert [r.value for r in padded] == pytest.approx([r.value for r in plain], rel=1e-6)


def test_prompts_that_are_too_short_are_left_out_and_counted(view):
    ids = torch.cat([b["input_ids"] for b in prompts()])
    chosen, length = (
        [0, 0, 1, 2, 3, 4, 4, 5, 6],
        torch.tensor([SKIP + 1, 99, 99, 99, 99, 99, 2, 99, 99]),
    )  # 2nd and 7th cut
    mask = (torch.arange(ids.shape[1]) < length[:, None]).long()
    cut = list(lens(Listed({"input_ids": ids[chosen], "attention_mask": mask}), num_prompts=3, num_tuned=4).run(view))
    whole = list(lens(num_prompts=2, num_tuned=3).run(view))
    assert [r.value for r in cut] == pytest.approx([r.value for r in whole], rel=1e-6)
    for record in cut:
        compares = record.metric != "jacobian_lens_halves"
        assert record.tags.get("num_undefined") == (1 if compares else None)
        assert record.tags.get("num_undefined_fit_prompts") == (
            1 if record.tags.get("lens", "jacobian") == "jacobian" else None
        )
    assert not any("num_undefined" in name for record in whole for name in record.tags)


def test_the_model_is_as_it_was(view):
    before = {name: p.clone() for name, p in view.model.named_parameters()}
    list(lens(lenses=("tuned", "shuffled"), tuned_steps=2).run(view))
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in view.model.named_parameters())


def test_a_file_has_the_keys_of_the_reference_and_is_measured_as_the_lens_it_holds(view, tmp_path):
    fitted = fit_jacobian_lens(view, prompts(), num_prompts=2, skip_first=SKIP)
    write_lens(tmp_path / "lens.pt", fitted.jacobians, 2, dtype=torch.float32, about={"model": "tiny"})
    content = torch.load(tmp_path / "lens.pt", weights_only=True)
    assert content.keys() == {"J", "n_prompts", "source_layers", "d_model", "metadata"}
    # Block outputs are counted from 0 there: that of block l is our layer l + 1; layer 0 and the last have none.
    assert [*content["J"]] == content["source_layers"] == [*range(view.num_layers - 1)]
    torch.testing.assert_close(content["J"][0].double(), fitted.jacobians[1], rtol=1e-6, atol=1e-7)
    here = list(lens(file=str(tmp_path / "lens.pt"), lenses=("jacobian",)).run(view))
    there = list(lens(lenses=("jacobian",)).run(view))
    expected = [r.value for r in there if r.metric == "lens_kl" and r.layer]
    assert values(here, "lens_kl", "jacobian") == pytest.approx(expected, rel=1e-4)  # of float32
    fitted.save(tmp_path / "half.pt")
    assert next(iter(torch.load(tmp_path / "half.pt", weights_only=True)["J"].values())).dtype == torch.float16


def test_held_out_prompts_that_are_all_too_short_are_said(view):
    ids = torch.randint(3, 60, (6, 12), generator=torch.Generator().manual_seed(4))
    with pytest.raises(InputError, match="no prompt is left to compare on: give more than 3 that have a place from 2"):
        list(lens(Listed({"input_ids": ids[:3]}, {"input_ids": ids[3:, :3]})).run(view))


# -------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"num_tuned": 1}, "expected num_tuned of at least num_prompts, 2, got 1"),
        ({"num_tuned": 7}, "no prompt is left to compare on: give more than 7"),
        ({"skip_first": 40}, "skip_first: none of the first 2 prompts has a place from 40 on"),
        ({"lenses": ()}, "expected at least one of lenses, got none"),
        ({"lenses": ("logits",)}, "expected lenses to be"),
        ({"tuned_steps": 0}, "expected tuned_steps of at least 1, got 0"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_anything_is_measured(options, sentence, view):
    with pytest.raises(InputError, match=sentence):
        lens(**options).check(view)
    with pytest.raises(InputError, match=sentence):
        list(lens(**options).run(view))


def test_a_model_that_predicts_no_next_token_and_a_lens_of_another_width_are_refused(view, tmp_path):
    with pytest.raises(InputError, match="expected a model that predicts the next token, got BertForMaskedLM"):
        list(lens().run(LayeredModel(tiny("bert"))))
    write_lens(tmp_path / "lens.pt", torch.zeros(2, 3, 3), 1)
    with pytest.raises(InputError, match="is of a model of width 3"):
        list(lens(file=str(tmp_path / "lens.pt")).run(view))
