"""Job scripts and files for clusters, tested without a cluster.

Scripts run with programs that record their arguments. Files have the required keys, and call our commands.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lit_layers.cli.options import Recipe
from lit_layers.cli.verbs.analyze import analyze

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "recipes").rglob("*.sh"))
JOBS = [path for path in SCRIPTS if path.parent.name == "slurm" and path.stem != "sweep"]
JOB = {
    "SLURM_JOB_NODELIST": "node[1-4]",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_CPUS_PER_TASK": "32",
    "SLURM_JOB_ID": "7",
    "SLURM_ARRAY_TASK_ID": "3",
    "SLURM_ARRAY_TASK_COUNT": "8",
}


@pytest.fixture
def programs(tmp_path) -> Path:
    """Install srun, ray, torchrun and lit-layers that record their arguments and run what they would start."""
    starts = {
        "srun": '[ "$CODE" = 0 ] || exit "$CODE"; while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
        "ray": 'while [ "$1" != "--" ]; do shift; done; shift; exec "$@"',
        "torchrun": 'printf "store %s\\n" "$TORCH_DISABLE_SHARE_RDZV_TCP_STORE" >> "$NOTES"; '
        'while [ "$1" != "--no-python" ]; do shift; done; shift; exec "$@"',
        "lit-layers": "true",
        "scontrol": 'if [ "$1" = show ]; then printf "node1\\nnode2\\n"; fi',
    }
    for name, rest in starts.items():
        file = tmp_path / "bin" / name
        file.parent.mkdir(exist_ok=True)
        note = 'printf "%s " "$@"; printf "\\n"'
        file.write_text(f'#!/usr/bin/env bash\n{{ printf "{name} "; {note}; }} >> "$NOTES"\n{rest}\n')
        file.chmod(0o755)
    return tmp_path / "bin"


def noted(script: Path, programs: Path, code: int = 0) -> dict[str, list[str]]:
    """Run a script whose srun exits with this code; return the recorded arguments by program."""
    notes = programs.parent / "notes"
    notes.write_text("")
    environment = {**os.environ, **JOB, "PATH": f"{programs}:{os.environ['PATH']}", "NOTES": str(notes)}
    environment["CODE"] = str(code)
    ended = subprocess.run(["bash", "-u", str(script), "--root", "out"], env=environment, cwd=ROOT, check=False)
    assert ended.returncode == code, script
    return {line.split()[0]: line.split()[1:] for line in notes.read_text().splitlines()}


def test_a_job_script_starts_one_command_with_the_values_of_slurm(programs):
    for script in JOBS:
        words = noted(script, programs)
        if "srun" in words:
            assert "--cpus-per-task=32" in words["srun"], script
            assert "--kill-on-bad-exit=1" in words["srun"], script
        ours = words["lit-layers"]
        assert ours[-2:] == ["--root", "out"], script
        recipes = [ours[number + 1] for number, word in enumerate(ours) if word == "--config"]
        assert all((ROOT / path).is_file() for path in recipes), script
        if ours[0] == "analyze":
            Recipe(analyze, ours[1:]).read()


def test_only_a_job_whose_command_ends_with_143_requeues_itself(programs):
    for name in ("fit", "sweep"):
        script = ROOT / "recipes" / "slurm" / f"{name}.sh"
        assert noted(script, programs, code=143)["scontrol"] == ["requeue", "7"]
    assert "scontrol" not in noted(ROOT / "recipes" / "slurm" / "fit.sh", programs, code=1)


def test_ray_has_the_first_node_as_head_and_torchrun_starts_lost_ranks_again(programs):
    words = noted(ROOT / "recipes" / "slurm" / "analyze_ray.sh", programs)
    assert words["ray"][:3] == ["symmetric-run", "--address", "node1:6379"]
    assert words["ray"][words["ray"].index("--min-nodes") + 1] == "4"
    assert words["lit-layers"][-4:-2] == ["--engine", "ray"]
    words = noted(ROOT / "recipes" / "slurm" / "fit_elastic.sh", programs)
    for option, value in (("--max-restarts", "3"), ("--rdzv-endpoint", "node1:29500")):
        assert words["torchrun"][words["torchrun"].index(option) + 1] == value
    assert words["store"] == ["1"]  # with torchrun's own store, restarted ranks cannot connect
    assert words["lit-layers"][words["lit-layers"].index("--resume") + 1] == "last"


def test_shellcheck_finds_nothing():
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert shellcheck, "it comes with the extra dev"
    subprocess.run([shellcheck, "-x", "-P", "SCRIPTDIR", *map(str, SCRIPTS)], check=True)
