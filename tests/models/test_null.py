"""The null model: which weights are new, which are kept, and that no tensor keeps its weights by accident."""

import pytest
import torch
from torch import nn

from lit_layers.errors import InputError
from lit_layers.models.build import untrained, vit, weights_hash
from lit_layers.models.null import SEED, null_model, refuse_unknown_constructor
from lit_layers.models.structure import family_of
from lit_layers.models.view import LayeredModel
from tests.support.tiny_models import EVERY, tiny, tiny_batch


def model_of(name: str) -> nn.Module:
    """Return a tiny model in which no parameter has the value of an untrained model."""
    options = {"depth": 2, "embed_dim": 32, "num_heads": 2, "img_size": 16, "patch_size": 4}
    model = vit("deit_tiny_patch16_224", **options) if name == "vit" else tiny(name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


@pytest.mark.parametrize("name", [name for name in EVERY if name not in ("vit_average", "vit_headless")])
def test_every_tensor_of_the_blocks_is_drawn_again_and_all_others_are_kept(name):
    model = model_of(name)
    before, fresh = weights_hash(model), dict(untrained(model, seed=SEED).named_parameters())
    null = dict(null_model(model, "blocks").named_parameters())
    inside = {id(each) for block in family_of(model).block_list(model) for each in block.parameters()}
    norms = {id(each) for m in model.modules() if "Norm" in type(m).__name__ for each in m.parameters(recurse=False)}
    drawn = [path for path, each in model.named_parameters() if id(each) in inside - norms]
    assert drawn
    for path, own in model.named_parameters():
        assert torch.equal(null[path], own) is (path not in drawn), path
        assert torch.equal(null[path], fresh[path] if path in drawn else own), path
    assert weights_hash(null_model(model, "all")) == weights_hash(untrained(model, seed=SEED)) != before
    assert weights_hash(model) == before
    assert null_model(model, "labels") is model
    if name == "gpt2":  # as GPT-2 is initialised: 0.02, and projections into the residual stream divided by sqrt(2 L)
        for path in drawn:
            std = 0.02 / (6**0.5 if "c_proj.weight" in path else 1) if "weight" in path else 0
            assert null[path].std().item() == pytest.approx(std, rel=0.1)


def test_embedding_and_readout_of_the_null_are_those_of_the_model():
    model, batch = tiny("gpt2"), tiny_batch("gpt2")
    view, null = LayeredModel(model), LayeredModel(null_model(model, "blocks"))
    before, after = view.trajectory(batch).hidden, null.trajectory(batch).hidden
    assert torch.equal(before[0], after[0])
    assert not torch.isclose(before[1], after[1]).any()
    assert torch.equal(model.lm_head(model.transformer.ln_f(after[3])), null.model(**batch).logits)


def test_a_network_of_the_users_own_and_weights_that_stay_the_same_are_refused():
    with pytest.raises(InputError, match="null: new weights are for models of transformers and timm, got Sequential"):
        refuse_unknown_constructor(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(InputError, match="null: weight of a Conv1D is not random: its new weights equal"):
        null_model(untrained(tiny("gpt2"), seed=SEED), "blocks")
