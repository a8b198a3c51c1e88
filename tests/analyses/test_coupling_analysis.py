"""The coupling analysis against its definition, prompt by prompt and pair by pair."""

import math

import numpy as np
import pytest
import torch

from lit_layers.analyses import Coupling, CouplingMatrices, TokenCoupling
from lit_layers.errors import InputError
from lit_layers.models.view import LayeredModel
from tests.analyses.whole_jacobians import copy_without_block_2, coupling_by_loops, whole_jacobians
from tests.support.listed_batches import Listed
from tests.support.measured import records_of
from tests.support.references import jacobian_shape_of
from tests.support.tiny_models import LAYERS, tiny, tiny_batch

SHAPE = ("non_normality", "symmetric_share", "effective_rank")
SHAPE += ("leading_eigenvalue", "eigenvector_output_cosine", "eigenvector_input_cosine")


def run(model, *batches, **options):
    """Return the records by (metric, layer, other_layer, tags)."""
    records = records_of(Coupling(batches=Listed(*batches), **options), model)
    keys = [
        (r.metric, r.layer, r.other_layer, *sorted(tag for tag in r.tags.items() if not tag[0].startswith("num_")))
        for r in records
    ]
    assert len(set(keys)) == len(keys)
    return dict(zip(keys, records, strict=True))


@pytest.fixture(scope="module")
def model():
    return tiny("gpt2", torch.float64)


def last_token_jacobians(model, batch, **options):
    """Return Jacobians (prompts, layers, dim, dim) of a batch, and states (layers + 1, prompts, dim)."""
    jacobians, states = [], []
    for ids in batch["input_ids"]:
        own, hidden = whole_jacobians(model, model.transformer.h, {"input_ids": ids[None]}, outputs=[-1], **options)
        jacobians.append(own[:, -1, -1])
        states.append([state.detach()[0, -1].numpy() for state in hidden])
    return np.array(jacobians), np.array(states).transpose(1, 0, 2)


def couplings(prompt, k, **options):
    """Return the coupling of every pair of blocks (layers, layers), and the coupling of random bases."""
    pairs = [[coupling_by_loops(first, second, k, **options) for second in prompt] for first in prompt]
    return np.moveaxis(np.array(pairs), -1, 0)


def test_every_record_equals_the_definition_applied_to_the_running_model(model):
    batch = tiny_batch("gpt2", batch=3, tokens=7)
    jacobians, states = last_token_jacobians(model, batch)
    records = run(model, batch, k=(0.1, 8), num_singular_values=4)
    for k in (3, 8):
        pairs, random = (np.stack(each) for each in zip(*(couplings(prompt, k) for prompt in jacobians), strict=True))
        spectra = np.linalg.svd(jacobians, compute_uv=False)
        excess = 1 - (1 - pairs) / (1 - random)
        off = ~np.eye(LAYERS, dtype=bool)
        far = np.abs(np.subtract.outer(range(LAYERS), range(LAYERS)))
        gaps = (spectra[..., :k] - spectra[..., 1 : k + 1]).min(-1) / spectra[..., 0]
        expected = {
            ("coupling", None, None): pairs[:, off].mean(-1),
            ("coupling_with_diagonal", None, None): pairs.mean((1, 2)),
            ("random_coupling", None, None): random.mean((1, 2)),
            ("excess_coupling", None, None): excess[:, off].mean(-1),
            ("min_gap", None, None): gaps.min(),
            ("num_tied", None, None): (gaps < 1e-4).sum(),
        }
        for i in range(LAYERS):
            for j in range(LAYERS):
                expected["coupling_pair", i + 1, j + 1] = pairs[:, i, j]
        for key, values in expected.items():
            record = records.pop((*key, ("k", k)))
            assert record.value == pytest.approx(np.mean(values), rel=1e-7, abs=1e-10)
            assert record.n == 3
            if np.ndim(values):
                assert record.stderr == pytest.approx(np.std(values, ddof=1) / 3**0.5, rel=1e-6, abs=1e-10)
        for distance in range(LAYERS):
            record = records.pop(("coupling_by_distance", None, None, ("distance", distance), ("k", k)))
            assert record.value == pytest.approx(pairs[:, far == distance].mean(), abs=1e-10)
    carried = states[0]
    for layer in range(1, LAYERS + 1):
        carried = carried + np.einsum("pij,pj->pi", jacobians[:, layer - 1], carried)
        cosine = (carried * states[layer]).sum(-1)
        cosine /= np.linalg.norm(carried, axis=-1) * np.linalg.norm(states[layer], axis=-1)
        assert records.pop(("linearized_rollout", layer, None)).value == pytest.approx(cosine.mean())
        norms = np.linalg.norm(jacobians[:, layer - 1], axis=(1, 2))
        assert records.pop(("jacobian_norm", layer, None)).value == pytest.approx(norms.mean())
        shapes = np.mean([jacobian_shape_of(jacobian) for jacobian in jacobians[:, layer - 1]], 0)
        for metric, value in zip(SHAPE, shapes, strict=True):
            assert records.pop((f"jacobian_{metric}", layer, None)).value == pytest.approx(value, rel=1e-6)
        for index in range(1, 5):
            record = records.pop(("singular_value", layer, None, ("index", index)))
            assert record.value == pytest.approx(spectra[:, layer - 1, index - 1].mean())
    assert records.pop(("linearized_rollout", None, None)).value == pytest.approx(cosine.mean())
    slopes = [np.polyfit([1, 2, 3], 1 / prompt[:, 0], 1)[0] for prompt in spectra]
    assert records.pop(("spectrum_slope", None, None)).value == pytest.approx(np.mean(slopes))
    r_squared = [np.corrcoef([1, 2, 3], 1 / prompt[:, 0])[0, 1] ** 2 for prompt in spectra]
    assert records.pop(("spectrum_r_squared", None, None)).value == pytest.approx(np.mean(r_squared))
    assert not records


def test_the_preset_gives_the_numbers_of_published_code(model, monkeypatch):
    batch = tiny_batch("gpt2", batch=2, tokens=6)
    monkeypatch.setitem(Coupling.PRESETS["released_code"], "k", (10, 30))
    jacobians, states = last_token_jacobians(model, batch, final_norm=model.transformer.ln_f)
    records = run(model, batch, preset="released_code")
    for k in (10, 30):
        pairs = [couplings(prompt, k, absolute=True)[0] for prompt in jacobians]
        record = records["coupling_with_diagonal", None, None, ("k", k)]
        assert record.value == pytest.approx(np.mean(pairs), abs=1e-9)
    carried = states[0]
    for layer in range(LAYERS - 1):
        carried = carried + np.einsum("pij,pj->pi", jacobians[:, layer], carried)
    cosine = (carried * states[-1]).sum(-1) / np.linalg.norm(carried, axis=-1) / np.linalg.norm(states[-1], axis=-1)
    assert records["linearized_rollout", None, None].value == pytest.approx(cosine.mean(), rel=1e-9)


def test_a_token_can_be_given_by_name_or_index(model):
    batch = tiny_batch("gpt2", batch=1, tokens=6)

    def value(token):
        return run(model, batch, k=(6,), token=token)["coupling", None, None, ("k", 6)].value

    last, first = value("last"), value("first")
    assert last == value(-1) == value(5) == value("last_patch")
    assert first == value(0) == value("cls")
    assert abs(last - first) > 1e-4


def test_a_dead_block_has_no_pairs_and_never_enters_a_mean(model):
    model = copy_without_block_2(model)
    records = run(model, tiny_batch("gpt2", batch=2, tokens=6), k=(6,))
    k = ("k", 6)
    assert ("coupling_pair", 2, 1, k) not in records
    assert records["jacobian_norm", 2, None].value == 0
    assert {key[1] for key in records for metric in SHAPE if key[0] == f"jacobian_{metric}"} == {1, 3}
    assert {key[1:3] for key in records if key[0] == "coupling_pair"} == {(1, 1), (1, 3), (3, 1), (3, 3)}
    missing = {"coupling": 8, "excess_coupling": 8, "coupling_with_diagonal": 10}  # of 2 x 6 and 2 x 9 pairs
    for metric, number in missing.items():
        assert math.isnan(records[metric, None, None, k].value)
        assert records[metric, None, None, k].n == 0
        assert records[metric, None, None, k].tags == {"k": 6, "num_undefined": 2, "num_undefined_pairs": number}
    for distance, number in ((0, 2), (1, 8)):
        assert (
            records["coupling_by_distance", None, None, ("distance", distance), k].tags["num_undefined_pairs"] == number
        )
    distant = [records["coupling_pair", *pair, k].value for pair in ((1, 3), (3, 1))]
    assert records["coupling_by_distance", None, None, ("distance", 2), k].value == pytest.approx(np.mean(distant))
    assert records["num_tied", None, None, k].tags == {"k": 6, "num_undefined_blocks": 2}


WIDE = "expected k between 1 and the dimension 32, got 33; the model is 32 wide: choose another k"


def test_invalid_options_are_refused_before_the_measurement(model):
    for analysis, message in (
        (Coupling(batches=Listed(), k=(33,)), WIDE),
        (CouplingMatrices(batches=Listed(), pairs=[(1, 2)], k=33), WIDE),
        (TokenCoupling(batches=Listed(), k=(33,)), WIDE),
        (Coupling(batches=Listed(), k=(0.01,)), "expected k between 1 and the dimension 32, got 0.32"),
        (Coupling(batches=Listed(), sign=None), r"expected sign to be one of \['signed', 'absolute'\], got None"),
        (
            Coupling(batches=Listed(), preset="released_code", k=(3,)),
            "sets k to .* got k .* as well: leave one of them",
        ),
        (Coupling(batches=Listed(), preset="released_code"), "expected k between 1 and the dimension 32, got 50"),
        (CouplingMatrices(batches=Listed(), pairs=[(1, 4)], k=3), r"expected pairs of blocks 1..3, got \[\[1, 4\]\]"),
        (TokenCoupling(batches=Listed(), pairs=[(1, 1), (0, 1)]), r"pairs of blocks 1..3, got \[\[1, 1\], \[0, 1\]\]"),
        (TokenCoupling(batches=Listed(), pairs=[(1, 2, 3)]), r"expected pairs of blocks 1..3, got \[\[1, 2, 3\]\]"),
    ):
        with pytest.raises(InputError, match=f"^{analysis.name}: .*{message}"):
            analysis.check(LayeredModel(model))


@pytest.mark.soak
def test_mean_patch_averages_metrics_and_not_jacobians_over_patches():
    model, batch = tiny("vit", torch.float64), tiny_batch("vit", batch=2)
    batch["pixel_values"] = batch["pixel_values"].double()
    records = run(model, batch, k=(4,), token="mean_patch", num_patches=3)
    off = ~np.eye(LAYERS, dtype=bool)
    means, excesses, norms, slopes = [], [], [], []
    for image in batch["pixel_values"]:
        jacobians, _ = whole_jacobians(model, model.blocks, {"pixel_values": image[None]})
        for token in (1, 9, 16):  # patches have positions 1..16, after the class token
            own = jacobians[:, token, token]
            pairs, random = couplings(own, 4)
            spectra = np.linalg.svd(own, compute_uv=False)
            means.append(pairs[off].mean())
            excesses.append((1 - (1 - pairs) / (1 - random))[off].mean())
            norms.append(np.linalg.norm(own[1]))
            slopes.append(np.polyfit([1, 2, 3], 1 / spectra[:, 0], 1)[0])
    k = ("k", 4)
    for key, values in {
        ("coupling", None, None, k): means,
        ("excess_coupling", None, None, k): excesses,
        ("jacobian_norm", 2, None): norms,
        ("spectrum_slope", None, None): slopes,
    }.items():
        per_image = np.reshape(values, (2, 3)).mean(1)
        assert records[key].value == pytest.approx(per_image.mean(), rel=1e-7, abs=1e-10)
        assert records[key].stderr == pytest.approx(per_image.std(ddof=1) / 2**0.5, rel=1e-6)
        assert records[key].n == 2
    whole = run(model, batch, k=(4,), token="mean_patch", num_patches=None)
    assert whole.keys() == records.keys()
    with pytest.raises(InputError, match="GPT2LMHeadModel has no mean_patch: choose another token"):
        run(tiny("gpt2"), tiny_batch("gpt2"), k=(4,), token="mean_patch")
