"""The README of an exported model and its tables."""

import yaml

from lit_layers.select.export import HeadFacts, render
from tests.support.exports import card

FACTS = HeadFacts(
    kind="classification", task="moods", layer=2, pooling="last", max_tokens=512, classes=("joy", "anger", "none")
)


def cells(table):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_the_page_shows_the_origin_of_the_model_the_reason_for_the_layer_and_an_example():
    content = card(revision="step5000", commit="abc1", weights_hash="00ff", notes=["N."])
    page = render(content, FACTS, package="transformers", picture="validation.png")
    header = yaml.safe_load(page.split("---")[1])
    assert (header["base_model"], header["library_name"]) == ("someone/tiny", "transformers")
    rows = {row[0]: row[1] for row in cells(page) if len(row) == 2}
    assert rows["source model"] == "someone/tiny"
    assert (rows["revision"], rows["commit"], rows["hash of its weights"]) == ("step5000", "abc1", "00ff")
    assert (rows["task"], rows["classes"]) == ("moods", "3")
    scores = [row for row in cells(page) if len(row) == 3]
    assert scores[2:] == [["1", "0.5000", ""], ["2", "0.7500", "chosen"], ["3", "0.7525", ""]]
    assert rows["chosen by"] == "within_tolerance, tolerance 0.01"
    assert (rows["2 (chosen)"], rows["3 (last)"]) == ("0.7400", "0.7425")
    for part in ("(validation.png)", "cut after block 2 of 3, with a classifier for moods", "- N."):
        assert part in page
    code = page.split("```python")[1].split("```")[0]
    compile(code, "README", "exec")


def test_a_page_leaves_out_unknown_facts():
    facts = HeadFacts(kind="regression", task="stars", layer=2, pooling="mean", max_tokens=None, classes=None)
    page = render(card(source="/some/folder", tolerance=None), facts, package="timm", picture=None, of_images=True)
    assert set(yaml.safe_load(page.split("---")[1])) == {"library_name", "tags"}
    for part in ("revision", "None", "Notes", "![", "probabilities", ", tolerance", "base_model"):
        assert part not in page
    assert "with a regression for stars" in page
    assert "its licence applies to them." in page


def test_a_page_mentions_images_and_a_final_norm_only_if_the_model_has_them():
    facts = HeadFacts(kind="regression", task="stars", layer=2, pooling="mean", max_tokens=None, classes=None)
    pages = [
        render(card(), facts, package="transformers", picture=None, of_images=present, final_norm=present)
        for present in (True, False)
    ]
    for part, expected in (
        ("pixel_values", [True, False]),
        ("averaged over the patches", [True, False]),
        ("has passed the final norm", [True, False]),
        ("AutoTokenizer", [False, True]),
        ("timm", [False, False]),
    ):
        assert [part in page for page in pages] == expected, part
