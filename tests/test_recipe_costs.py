"""What recipes say they cost is what the plan counts, on any machine."""

import pytest

from tests.support.recipe_costs import ROOT, WITHOUT, recipes, with_cost


@pytest.mark.parametrize("path", recipes())
def test_the_cost_of_a_recipe_is_that_of_the_plan(path):
    """`python -m tests.support.recipe_costs` writes them anew."""
    text = (ROOT / path).read_text()
    assert with_cost(path, text) == text


def test_a_recipe_without_its_cost_is_found_and_an_overlay_needs_none():
    with pytest.raises(ValueError, match="recipes/glue/paper.yaml has no line '# Cost:'"):
        with_cost("recipes/glue/paper.yaml", "# A recipe.")
    for folder in WITHOUT:
        assert not any("# Cost:" in path.read_text() for path in (ROOT / folder).glob("*.yaml"))
