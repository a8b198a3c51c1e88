"""Options with their defaults, metrics with their names in W&B, analyses with their hashes are as written down."""

import json

import pytest

from tests.support import golden

RENEW = "if that is meant: python -m tests.support.golden, and say in CHANGELOG.md what changed"


@pytest.mark.parametrize("file", golden.FILES)
def test_what_users_and_earlier_results_rely_on_is_as_before(file):
    content = json.loads(json.dumps(golden.FILES[file](), default=str))
    expected = json.loads((golden.GOLDEN / f"{file}.json").read_text())
    assert content == expected, RENEW
