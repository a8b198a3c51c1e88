"""A model beside its first blocks: which folders are measured, and how each is opened."""

import importlib

import pytest

from lit_layers.models.build import save, vit
from lit_layers.models.copies import truncate
from lit_layers.select.export import compare_costs
from tests.support.tiny_models import tiny

VIT = {"depth": 3, "embed_dim": 32, "num_heads": 4, "img_size": 16, "patch_size": 4}


@pytest.mark.parametrize(
    ("name", "heads"),
    [("gpt2", 1), ("gpt2_trunk", 0), ("bert_classifier", 1), ("vit", 1), ("vit_headless", 0)],
)
def test_the_whole_is_measured_with_its_head_where_it_has_one_and_without(name, heads, tmp_path, monkeypatch):
    module, opened = importlib.import_module("lit_layers.models.costs"), []
    plainly = module.open_plainly

    def noted(folder, head):
        opened.append((folder, head))
        return plainly(folder, head=head)

    monkeypatch.setattr(module, "open_plainly", noted)
    made = {"vit": lambda: vit("deit_tiny_patch16_224", num_classes=5 * heads, **VIT).eval()}
    model = made.get(name.partition("_")[0], lambda: tiny(name))()
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    save(model, whole)
    save(truncate(model, 2, head=False), cut)
    found = compare_costs(whole, cut, layer=2, num_layers=3, num_tokens=4, batch_size=2, num_rounds=1, num_warm_up=0)
    names = ["all 3 blocks and head"] * heads + ["all 3 blocks", "first 2 blocks"]
    assert [cost.name for cost in found] == names
    assert opened == [(whole, True)] * heads + [(whole, not heads), (cut, False)]
    sizes = [cost.parameters for cost in found]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-2] > sizes[-1]
