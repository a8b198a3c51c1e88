"""How much memory streaming takes, in a process of its own; briefly, by what is resident: `models/test_streaming`."""

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


@pytest.mark.soak
def test_a_block_and_the_states_are_what_is_in_memory(tmp_path):
    facts = measured(tmp_path, 10, 1280, 8, 64, "no")
    resident = facts["block"] + facts["states"]
    assert facts["peak"] <= 1.5 * resident
    assert facts["model"] > 6 * facts["peak"]


@pytest.mark.soak
def test_coupling_adds_half_a_block_and_what_any_width_takes(tmp_path):
    """A Jacobian's proof works on three float64 matrices: 24 d^2 bytes beside the 64 d^2 of such a block."""
    facts = measured(tmp_path, 4, 1280, 2, 32, "coupling")
    any_width = 16 * 2**20
    assert facts["peak"] <= 1.5 * (facts["block"] + facts["states"] + facts["factors"]) + any_width
    assert facts["model"] > 2 * facts["peak"]
