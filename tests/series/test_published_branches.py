"""Branches with the names of published series: which are steps, how many there are, and the tokens of each."""

from pathlib import Path

import pytest

from lit_layers.files.hub import Hub
from lit_layers.series import HubRevisions, audit
from lit_layers.series.opening import known_facts, repositories_of
from tests.support.series_hub import make_step

MANIFESTS = Path(__file__).parents[2] / "checkpoints"
B = 10**9


def olmoe(step: int) -> str:
    return f"step{step}-tokens{step * 4_194_304 // B}B"


# Names from model cards and evaluations: for OLMo 3 and Parc the known ones, for the others all.
SMOLLM3 = [f"stage1-step-{step}" for step in range(40_000, 3_440_001, 40_000)]
SMOLLM3 += [f"stage2-step-{step}" for step in range(3_480_000, 4_200_001, 40_000)]
SMOLLM3 += [f"stage3-step-{step}" for step in range(4_240_000, 4_720_001, 40_000)]
APERTUS = [f"step{step}-tokens{step * 42 // 10**4}B" for step in range(50_000, 1_000_001, 50_000)]
APERTUS += ["step1194000-tokens5014B", "step1432000-tokens6014B", "step1670000-tokens7014B", "step1678000-tokens7047B"]
APERTUS += [f"step{step}-tokens{7232 + 420 * n}B" for n, step in enumerate(range(1_700_000, 2_600_001, 50_000))]
APERTUS += ["step2627139-tokens15T"]
OLMO3 = ["stage1-step0", "stage1-step2000", "stage1-step707000", "stage1-step1413814"]
PARC = [f"checkpoint-{step}" for step in (10, 20, 40, 80, 160, 320, 640, 1280, 2560, 4000)]
SERIES = {
    "HuggingFaceTB/SmolLM3-3B-checkpoints": (SMOLLM3, ["lc-4k-to-32k-step-4000", "it-SFT", "it-soup-APO"]),
    "swiss-ai/Apertus-8B-2509": (APERTUS, ["longctx-step50", "longctx-step1300"]),
    "swiss-ai/Apertus-70B-2509": (["step1155828-tokens15T"], ["longctx-step50"]),
    "allenai/OLMoE-1B-7B-0924": ([olmoe(step) for step in range(5000, 1_220_001, 5000)], ["fp32"]),
    "allenai/Olmo-3-1025-7B": (OLMO3, ["stage2-step47684", "stage3-step11921"]),
    "LLM360/Amber": ([f"ckpt_{number:03d}" for number in range(359)], []),
    "jmichaelov/parc-mamba-seed5": (PARC, []),
}
# Number of steps, last step, tokens of the last step.
EXPECTED = {
    "HuggingFaceTB/SmolLM3-3B-checkpoints": (86 + 19 + 13, 4_720_000, 118 * 40_000 * 2_359_296),
    "swiss-ai/Apertus-8B-2509": (44, 2_627_139, 15_000 * B),
    "swiss-ai/Apertus-70B-2509": (1, 1_155_828, 15_000 * B),
    "allenai/OLMoE-1B-7B-0924": (244, 1_220_000, 5_117_050_880_000),
    "allenai/Olmo-3-1025-7B": (4, 1_413_814, 5_929_965_715_456),
    "LLM360/Amber": (359, 358, None),
    "jmichaelov/parc-mamba-seed5": (10, 4000, None),
}


def test_every_branch_of_a_published_series_is_recognized(monkeypatch):
    for repo, (count, last, tokens) in EXPECTED.items():
        branches = dict.fromkeys([*SERIES[repo][0], *SERIES[repo][1], "main"], "0" * 40)
        monkeypatch.setattr(Hub, "commits", lambda hub, name, branches=branches: branches)
        listing = HubRevisions(repo).listing
        assert [one.name for one in listing.checkpoints] == SERIES[repo][0], f"{repo} in step order"
        final = listing.checkpoints[-1]
        assert (len(listing.checkpoints), final.step, final.tokens) == (count, last, tokens), repo
        assert listing.expected in (None, tuple(one.step for one in listing.checkpoints)), repo


def test_tokens_of_a_step_equal_those_of_names_and_cards():
    assert round(known_facts("HuggingFaceTB/SmolLM3-3B-checkpoints").tokens_per_step * 40_000 / B, 1) == 94.4  # pyright: ignore
    assert olmoe(5000) == "step5000-tokens20B"
    assert olmoe(1_200_000) == "step1200000-tokens5033B"
    for repo, steps, trillions in (("1025-7B", 1_413_814, 5.93), ("1125-32B", 656_000, 5.50)):
        assert round(known_facts(f"allenai/Olmo-3-{repo}").tokens_per_step * steps / 10**12, 2) == trillions  # pyright: ignore


def test_manifests_list_each_repository_of_a_suite():
    parc = repositories_of(MANIFESTS / "parc.yaml")
    assert len(parc) == 3 * 6
    assert {"jmichaelov/parc-pythia-seed0", "jmichaelov/parc-rwkv-seed5"} <= set(parc)
    poly = repositories_of(MANIFESTS / "polypythias.yaml")
    assert len(poly) == 5 * 9 + 2 * 3
    assert len(known_facts("EleutherAI/pythia-14m-seed9").expected() or ()) == 154
    assert known_facts("EleutherAI/pythia-160m").warm_up == known_facts("EleutherAI/pythia-160m-data-seed3").warm_up


@pytest.mark.soak
def test_a_main_without_weights_and_later_trainings_are_not_reported(hub, root, model):
    root = root / "HuggingFaceTB" / "SmolLM3-3B-checkpoints"
    for number, branch in enumerate((*SMOLLM3[:2], SMOLLM3[-1], "lc-4k-to-32k-step-4000", "it-SFT")):
        make_step(model, root / branch, number / 8)
    (root / "main").mkdir()
    (root / "main" / "README.md").write_text("# checkpoints")
    found = audit(HubRevisions("HuggingFaceTB/SmolLM3-3B-checkpoints")).findings
    assert {each.kind for each in found} == {"gap"}
