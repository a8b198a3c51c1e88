"""The recipes of the papers run as they are written, in a stand-in world."""

import pytest

from tests.support.papers_place import cases, place, run_as_written  # noqa: F401

pytestmark = pytest.mark.timeout(0)


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(("name", "sizes"), cases())
def test_a_recipe_runs_as_it_is_written(name: str, sizes: str, capsys: pytest.CaptureFixture) -> None:
    run_as_written(name, sizes, capsys)
