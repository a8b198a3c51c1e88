import json
import re
import shlex
from pathlib import Path

import pytest

from lit_layers.cli.main import main
from lit_layers.cli.options import Recipe
from lit_layers.cli.verbs.prepare import prepare
from lit_layers.data.preparing import TokenShards

ROOT = Path(__file__).parents[2]


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    rows = [{"body": f"Document {index} speaks of layer {index % 7} and of nothing else."} for index in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def arguments(corpus, out, *more):
    return ["prepare", "--source", str(corpus), "--tokenizer", "bpe:270", "--root", str(out), *more]


def test_the_command_prepares_and_prints_counts_and_the_checksum(corpus, tmp_path, capsys):
    options = ("--column", "body", "--validation", "0.2", "--max_documents", "50")
    assert main(arguments(corpus, tmp_path / "out", *options)) == 0
    shards = TokenShards.open(tmp_path / "out")
    printed = capsys.readouterr().out
    assert f"sha256 {shards.checksum}" in printed
    assert f"{shards.num_documents('train'):,} documents" in printed
    assert f"{shards.num_tokens('validation'):,} tokens" in printed
    assert shards.num_documents("train") + shards.num_documents("validation") == 50


def test_the_documented_commands_that_need_a_network_are_accepted_by_the_parser():
    page = (ROOT / "docs" / "data.md").read_text()
    lines = re.findall(r"^lit-layers prepare (.*)$", page.replace("\\\n", " "), re.MULTILINE)
    assert len(lines) >= 5
    for line in lines:
        Recipe(prepare, shlex.split(line, comments=True)).read()
