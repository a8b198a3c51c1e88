"""Files of Jacobian lenses, made by hand as the reference implementation and others who write them describe them."""

import json
import pickle
from typing import Any

import pytest
import torch

from lit_layers.analyses import JacobianLens
from lit_layers.errors import InputError
from lit_layers.files.lens_files import read_lens, write_lens
from lit_layers.models.view import LayeredModel
from tests.support.listed_batches import Listed
from tests.support.tiny_models import LAYERS, tiny

SWAP = torch.tensor([[0.0, 1.0], [1.0, 0.0]])


def content(**others: Any) -> dict[str, Any]:
    """Of a model with three blocks of width 2: the last one, block 2, has no matrix, its own being the identity."""
    matrices = {0: (2 * SWAP).half(), 1: torch.tensor([[1.5, 0.25], [0.0, 1.0]]).half()}
    return {"J": matrices, "n_prompts": 100, "source_layers": [0, 1], "d_model": 2} | others


def saved(path, **others: Any):
    torch.save(content(**others), path / "lens.pt")
    return path / "lens.pt"


@pytest.mark.parametrize(
    "others",
    [
        {},
        {"metadata": {"model_name": "tiny", "estimator": "jacobian_lens", "target_layer": 2, "dim_batch": 8}},
        {"provenance": {"capture_point": "block_output", "stream_reduce": "none", "target_layer": 2, "t_max": 128}},
        {"provenance": {"capture_point": None, "model_id": "tiny"}},
        {"J": content()["J"] | {2: torch.eye(2).half()}, "source_layers": [0, 1, 2]},  # with that of the last block
    ],
)
def test_the_output_of_block_l_is_layer_l_plus_1_and_what_others_add_changes_nothing(others, tmp_path):
    matrices, num_prompts = read_lens(saved(tmp_path, **others), 3)
    assert num_prompts == 100
    assert {layer: matrix.tolist() for layer, matrix in matrices.items()} == {
        1: [[0.0, 2.0], [2.0, 0.0]],
        2: [[1.5, 0.25], [0.0, 1.0]],
    }
    assert {matrix.dtype for matrix in matrices.values()} == {torch.float32}


def test_a_lens_by_hand_carries_states_as_the_reference_does(tmp_path):
    """It gives `residual @ J.T`, read by the model's own norm and head."""
    model: Any = tiny("gpt2", torch.float64)
    generator = torch.Generator().manual_seed(3)
    matrix = torch.randn(model.config.n_embd, model.config.n_embd, generator=generator).half()
    torch.save({"J": {1: matrix}, "n_prompts": 2, "source_layers": [1], "d_model": len(matrix)}, tmp_path / "lens.pt")
    ids = torch.randint(3, 60, (2, 9), generator=generator)
    analysis = JacobianLens(
        batches=Listed({"input_ids": ids}), num_prompts=1, num_tuned=1, skip_first=0,
        lenses=("jacobian",), file=str(tmp_path / "lens.pt"),
    )  # fmt: skip
    found = {record.metric: record for record in analysis.run(LayeredModel(model))}
    with torch.no_grad():
        output = model(input_ids=ids[1:], output_hidden_states=True)
        carried = output.hidden_states[2][0] @ matrix.double().T  # hidden_states begin with the embedding
        own, lens = (z.log_softmax(-1)[:-1] for z in (output.logits[0], model.lm_head(model.transformer.ln_f(carried))))
    assert found["lens_kl"].layer == 2
    assert found["lens_kl"].value == pytest.approx((own.exp() * (own - lens)).sum(-1).mean().item(), rel=1e-6)


def test_what_is_written_has_the_fields_of_the_reference_and_their_kinds(tmp_path):
    jacobians = torch.stack([torch.eye(2), 2 * SWAP, torch.tensor([[1.5, 0.25], [0.0, 1.0]])]).double()
    write_lens(tmp_path / "lens.pt", jacobians, 100)
    written, expected = torch.load(tmp_path / "lens.pt", weights_only=True), content()
    assert written.keys() == expected.keys()
    for name in ("n_prompts", "source_layers", "d_model"):
        assert written[name] == expected[name]
        assert type(written[name]) is type(expected[name])
    assert [*written["J"]] == [0, 1]
    for layer, matrix in written["J"].items():
        assert matrix.dtype == torch.float16
        assert torch.equal(matrix, expected["J"][layer])


def test_layers_that_are_not_finite_are_left_out_and_what_float16_cannot_hold_is_refused(tmp_path):
    jacobians = torch.eye(2).double().repeat(3, 1, 1)
    jacobians[1, 0, 0] = torch.nan
    write_lens(tmp_path / "lens.pt", jacobians, 1)
    assert torch.load(tmp_path / "lens.pt", weights_only=True)["source_layers"] == [1]
    with pytest.raises(InputError, match="no layer from 1 on has a finite Jacobian"):
        write_lens(tmp_path / "other.pt", jacobians[:2], 1)
    with pytest.raises(InputError, match=r"layer 2 has entries up to 7e\+04, more than torch.float16 holds: use"):
        write_lens(tmp_path / "other.pt", 70000 * jacobians, 1)
    assert not (tmp_path / "other.pt").exists()
    write_lens(tmp_path / "other.pt", 70000 * jacobians, 1, dtype=torch.float32)
    assert read_lens(tmp_path / "other.pt", 3)[0][2][0, 0] == 70000


@pytest.mark.parametrize(
    ("others", "sentence"),
    [
        ({"metadata": {"target_layer": 1}}, "metadata: expected target_layer to be 2, the last block of the model"),
        ({"provenance": {"target_layer": 30}}, "provenance: expected target_layer to be 2"),
        ({"provenance": {"target_layer": torch.tensor([2, 2])}}, r"target_layer to be 2, .*, got tensor\(\[2, 2\]\)"),
        ({"d_model": torch.tensor([2, 2])}, r"its layer 0 is no matrix of tensor"),
        ({"provenance": {"capture_point": "attn_in"}}, "expected capture_point to be block_output, got 'attn_in'"),
        ({"provenance": {"stream_reduce": "mean"}}, "expected stream_reduce to be none, got 'mean'"),
        ({"metadata": {"estimator": "relevance_lens"}}, "expected estimator to be jacobian_lens, got 'relevance_lens'"),
        ({"source_layers": [0]}, r"source_layers are \[0\], and its matrices of \[0, 1\]"),
        ({"J": content()["J"] | {2: SWAP}, "source_layers": [0, 1, 2]}, "got another of the last: it is of another"),
        ({"J": content()["J"] | {5: SWAP}, "source_layers": [0, 1, 5]}, "with 3 blocks, got one with more than 5"),
        ({"J": {2: torch.eye(2)}, "source_layers": [2]}, "got none of them"),
    ],
)
def test_matrices_of_other_states_are_refused_though_their_shapes_fit(others, sentence, tmp_path):
    with pytest.raises(InputError, match=sentence):
        read_lens(saved(tmp_path, **others), 3)


CONFIG = {"model_type": "gpt2", "n_embd": 2, "n_layer": 3, "vocab_size": 9, "_name_or_path": "/models/tiny"}


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        (
            {"vocab_size": 10},
            "provenance.config_json: expected vocab_size to be 9, as of the model that it is read with, ",
        ),
        (
            {"model_type": "llama"},
            "expected model_type to be 'gpt2', as of the model that it is read with, got 'llama'",
        ),
        ({"num_hidden_layers": 4}, "expected num_hidden_layers to be 3, as of the model that it is read with, got 4"),
    ],
)
@pytest.mark.parametrize("written", [dict, json.dumps])
def test_a_lens_with_the_config_of_another_model_is_refused(told, sentence, written, tmp_path):
    with pytest.raises(InputError, match=sentence):
        read_lens(saved(tmp_path, provenance={"config_json": written(CONFIG | told)}), 3, config=CONFIG)


def test_another_name_is_said_and_a_config_that_agrees_or_says_other_things_changes_nothing(tmp_path):
    agreeing = {**CONFIG, "_name_or_path": "owner/Tiny", "torch_dtype": "bfloat16", "n_inner": None}
    for config in (agreeing, json.dumps(agreeing), "as of today", "[1]", {"t_max": 128}):
        read_lens(saved(tmp_path, provenance={"config_json": config}), 3, config=CONFIG)
    other = {"config_json": json.dumps({"model": "owner/small"})}
    with pytest.warns(UserWarning, match="says that it is of owner/small, but it is read with /models/tiny"):
        read_lens(saved(tmp_path, provenance=other), 3, config=CONFIG)
    read_lens(saved(tmp_path, provenance=other), 3)  # a model without a name


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_matrices_that_are_not_finite_are_refused(number, tmp_path):
    with pytest.raises(InputError, match="expected matrices of finite numbers, got NaN or infinity in that of block 1"):
        read_lens(saved(tmp_path, J=content()["J"] | {1: torch.tensor([[1, 0], [0, number]]).half()}), 3)


def test_the_analysis_gives_the_config_of_its_model(tmp_path):
    model: Any = tiny("gpt2")
    told = {"config_json": json.dumps(model.config.to_dict() | {"n_head": 2})}
    matrix = torch.eye(model.config.n_embd)
    whole = {"J": {0: matrix}, "n_prompts": 1, "source_layers": [0], "d_model": len(matrix), "provenance": told}
    torch.save(whole, tmp_path / "lens.pt")
    analysis = JacobianLens(batches=Listed({"input_ids": torch.ones(2, 30).long()}), file=str(tmp_path / "lens.pt"))
    with pytest.raises(InputError, match="expected n_head to be 4, as of the model that it is read with, got 2"):
        analysis.check_options(LayeredModel(model))


class Harm:
    def __reduce__(self):
        return print, ("ran",)


@pytest.mark.parametrize(
    ("whole", "sentence"),
    [
        ({"weights": 1}, "expected a Jacobian lens"),
        ({"jacobian_sum": {0: torch.eye(2)}, "n_done": 3}, "expected a Jacobian lens"),  # of a fit that was cut short
        ({"J": {}, "n_prompts": 1, "d_model": 2}, "expected a Jacobian lens"),
        ({"J": {0: torch.eye(3)}, "n_prompts": 1, "d_model": 2}, "its layer 0 is no matrix of 2 x 2"),
        ({"J": {"a": torch.eye(2)}, "n_prompts": 1, "d_model": 2}, "its layer 'a' is no matrix"),
        ({"J": {0: torch.eye(2)}, "n_prompts": 0, "d_model": 2}, "n_prompts is 0"),
    ],
)
def test_a_file_that_is_no_lens_is_refused_in_a_sentence(whole, sentence, tmp_path):
    torch.save(whole, tmp_path / "lens.pt")
    with pytest.raises(InputError, match=sentence):
        read_lens(tmp_path / "lens.pt", LAYERS)


@pytest.mark.parametrize("matrix", [torch.empty(4, 4, device="meta"), torch.zeros(1, dtype=torch.float16).expand(4, 4)])
def test_a_matrix_that_is_not_in_the_file_whole_is_refused(matrix, tmp_path):
    torch.save({"J": {0: matrix}, "n_prompts": 1, "d_model": 4}, tmp_path / "lens.pt")
    with pytest.raises(InputError, match="its layer 0 is no matrix of 4 x 4"):
        read_lens(tmp_path / "lens.pt", LAYERS)


def test_nothing_in_a_file_runs(tmp_path, capsys):
    (tmp_path / "lens.pt").write_bytes(pickle.dumps({"J": Harm()}))
    with pytest.raises(InputError, match="it cannot be read as weights alone"):
        read_lens(tmp_path / "lens.pt", LAYERS)
    torch.save({"J": Harm()}, tmp_path / "lens.pt")
    with pytest.raises(InputError, match="it cannot be read as weights alone"):
        read_lens(tmp_path / "lens.pt", LAYERS)
    assert capsys.readouterr().out == ""
    with pytest.raises(InputError, match=r"nope\.pt: no such file"):
        read_lens(tmp_path / "nope.pt", LAYERS)
