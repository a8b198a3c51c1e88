"""How much memory streaming takes, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def measured(folder: Path, *options) -> dict[str, float]:
    command = [sys.executable, "-m", "tests.support.streaming_memory", str(folder), *map(str, options)]
    # Left to itself, glibc keeps tens of MB of what is freed, which says nothing about what is in use.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_block_and_the_states_are_what_is_in_memory(tmp_path):
    facts = measured(tmp_path, 10, 1280, 8, 64, "no")
    resident = facts["block"] + facts["states"]
    assert facts["peak"] <= 1.5 * resident
    assert facts["model"] > 6 * facts["peak"]


@pytest.mark.slow
def test_coupling_adds_the_work_space_of_a_jacobian_and_no_more(tmp_path):
    """The work space: of the 2,048 vectors that are carried back at a time, six activations as wide as the MLP."""
    facts = measured(tmp_path, 12, 512, 4, 32, "coupling")
    work_space = 6 * 2048 * (4 * 512) * 4  # 100 MB
    assert facts["peak"] <= 1.5 * (facts["block"] + facts["states"] + facts["factors"]) + work_space
    assert facts["model"] > facts["peak"]
