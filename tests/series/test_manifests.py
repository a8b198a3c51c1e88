"""Facts on published series, compared with numbers from other sources."""

from pathlib import Path

import pytest

from lit_layers.errors import InputError
from lit_layers.series.opening import entries_of, known_facts, repositories_of

MANIFESTS = Path(__file__).parents[2] / "checkpoints"


def test_pythia_has_154_steps_of_two_million_tokens():
    facts = known_facts("EleutherAI/pythia-70m-deduped")
    steps = facts.expected() or ()
    assert len(steps) == 154
    assert steps[:5] == (0, 1, 2, 4, 8)
    assert steps[10:13] == (512, 1000, 2000)
    assert steps[-1] == 143000
    assert facts.tokens_per_step == 1024 * 2048 == 2_097_152
    assert round(143000 * 2_097_152 / 1e9, 1) == 299.9


def test_the_two_smallest_models_have_no_deduplicated_variant():
    names = repositories_of(MANIFESTS / "pythia.yaml")
    assert len([name for name in names if "v0" not in name]) == 10 + 8
    assert "EleutherAI/pythia-14m-deduped" not in names


def test_the_first_release_has_its_own_steps():
    facts = known_facts("EleutherAI/pythia-1.4b-deduped-v0")
    assert facts.expected() == tuple(range(1000, 143001, 1000))


def test_crfm_has_608_steps_without_the_untrained_model():
    facts = known_facts("stanford-crfm/expanse-gpt2-small-x777")
    steps = facts.expected() or ()
    assert len(steps) == 608
    at = {0: 10, 9: 100, 10: 150, 47: 2000, 48: 2100, 227: 20000, 228: 21000, -1: 400000}
    assert {index: steps[index] for index in at} == at
    assert facts.tokens_per_step == 512 * 1024


def test_olmo_has_tokens_per_step_where_they_are_known():
    tokens = {"2-0425-1B": 2_097_152, "2-1124-7B": 4_194_304, "2-1124-13B": 8_388_608, "1B-hf": None}
    for repo, expected in tokens.items():
        assert known_facts(f"allenai/OLMo-{repo}").tokens_per_step == expected, repo
        assert known_facts(f"allenai/OLMo-{repo}").grammar == "stages", repo


def test_multiberts_have_28_steps_of_five_seeds():
    names = repositories_of(MANIFESTS / "multiberts.yaml")
    assert names == [f"google/multiberts-seed_{seed}" for seed in range(5)]
    steps = known_facts(names[0]).expected() or ()
    assert (len(steps), steps[0], steps[9], steps[10], steps[-1]) == (28, 20_000, 200_000, 300_000, 2_000_000)


def test_datadecide_has_three_seeds_in_each_repository():
    for size, seeds in {"1B": "large", "150M": "small"}.items():
        default, *others = known_facts(f"allenai/DataDecide-dolma1_7-{size}").grammar or []
        assert (default, others) == ("step{step}-seed-default", [f"step{{step}}-seed-{seeds}-aux-{n}" for n in (2, 3)])


def test_suspect_steps_belong_to_the_repository_that_has_them():
    facts = known_facts("EleutherAI/pythia-160m-weight-seed2")
    assert list(facts.suspect) == [0]
    assert len(facts.expected() or ()) == 154
    assert known_facts("EleutherAI/pythia-160m-weight-seed3").suspect == {}


def test_an_unknown_repository_is_not_an_error():
    facts = known_facts("org/name")
    assert facts.expected() is None
    assert facts.tokens_per_step is None


def test_a_wrong_manifest_is_refused(tmp_path):
    path = tmp_path / "own.yaml"
    for text, sentence in (
        ("a: [", "not valid YAML"),
        ("repositories: 3", "repositories: Input should be a valid array, got 3; see checkpoints/pythia.yaml"),
        ("repositories: [{names: a/b, range: []}]", "repositories.0.range: Unexpected keyword argument"),
        ("repositories: [{names: a/b, suspect: {2024-01-01: 3}}]", "not valid YAML"),
        ("repositories: [{names: 2024-01-01}]", "not valid YAML .Object of type date"),
    ):
        path.write_text(text)
        with pytest.raises(InputError, match=f"own.yaml: .*{sentence}|{sentence}"):
            entries_of(path)
