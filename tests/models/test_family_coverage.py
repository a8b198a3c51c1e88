"""How many classes of transformers and timm are taken apart, and that the page says so."""

import pytest

from tests.support import family_coverage

CAUSAL, MASKED, IMAGES = family_coverage.GROUPS
DOZEN = ("apertus", "bloom", "deepseek_v3", "falcon_h1", "gemma3", "glm4_moe", "jamba", "phi3", "qwen3_next", "smollm3")
REFUSED = {"cpmant": "(3, 44, 32) for an input of (3, 12)", "zaya": "(0) that blocks before it"}


def test_a_dozen_causal_architectures_are_what_the_page_says_of_them():
    page = family_coverage.TABLE.read_text(encoding="utf-8").split("## Masked")[0]
    outcomes = family_coverage.of_group(CAUSAL, (*DOZEN, *REFUSED))
    assert len(outcomes) == len(DOZEN) + len(REFUSED)
    for outcome in outcomes:
        in_rows = f"| `{outcome.kind}` | {outcome.reason}" in page
        assert (outcome.how == "structure") != in_rows
        assert f"`{outcome.kind}`" in page
    reasons = " ".join(outcome.reason for outcome in outcomes)
    assert all(reason in reasons for reason in REFUSED.values())


def test_timm_names_of_one_shape_are_taken_apart_and_hierarchical_ones_refused():
    with family_coverage.quiet():
        for name, how in (("vit_tiny_patch16_224", "row"), ("eva02_tiny_patch14_224", "structure")):
            assert family_coverage.of_timm(name, **family_coverage.narrow(name)).how == how
        for name in ("beit_base_patch16_224", "vit_small_patch16_rope_224"):
            assert family_coverage.of_timm(name, **family_coverage.narrow(name)).how == "structure"
        refused = family_coverage.of_timm("swin_tiny_patch4_window7_224")
    assert (refused.how, "not (batch, tokens, dim) of one shape" in refused.reason) == ("refused", True)


@pytest.mark.nightly
def test_the_page_is_what_is_found_of_every_class():
    groups = dict(family_coverage.sweep())
    assert family_coverage.TABLE.read_text(encoding="utf-8") == family_coverage.table(groups)
    for group, least in ((CAUSAL, 0.92), (MASKED, 0.81), ("timm, VisionTransformer", 1), ("timm, Eva", 1)):
        built = [outcome for outcome in groups[group] if outcome.how != "not tiny"]
        assert sum(outcome.is_taken_apart for outcome in built) >= least * len(built)
    assert sum(outcome.how != "not tiny" for outcome in groups[CAUSAL]) >= 165
