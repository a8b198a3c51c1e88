"""A downloaded folder as the working directory: its Python files are never imported."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from lit_layers.cli.main import main
from lit_layers.errors import InputError
from lit_layers.figures.vega import isolated_command
from lit_layers.measuring.engine import cluster
from tests.support.runs import make_run

# Modules that the commands import late, after they have parsed their options.
MODULES = ("vl_convert", "pyarrow", "yaml", "torch", "numpy", "pandas", "jinja2", "lightning", "multiprocessing")
CHILD = """
import subprocess, sys
from lit_layers.cli.main import main
sys.argv = ["lit-layers", "report", "nowhere"]
main()
sys.exit(subprocess.run([sys.executable, "-c", "import multiprocessing, vl_convert"]).returncode)
"""


@pytest.fixture
def planted(downloaded: Path, payload: str) -> Path:
    for name in MODULES:
        (downloaded / f"{name}.py").write_text(payload)
    return downloaded


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("start", ["script", pytest.param("module", marks=pytest.mark.nightly)])
def test_a_command_in_a_downloaded_folder_imports_nothing_from_it(start, planted, canary, tmp_path):
    """Start the installed script, and the module.

    Python reads an empty entry of PYTHONPATH as the working directory, and `export PYTHONPATH=$PYTHONPATH:~/code`
    leaves one if the variable was not set. The commands must ignore that entry.
    """
    make_run(planted / "run", steps=(0, 8), layers=3, analyses=("trajectory",))
    script, module = [str(Path(sys.executable).with_name("lit-layers"))], [sys.executable, "-m", "lit_layers.cli.main"]
    # An empty cache makes the command build the script of the page in another Python process.
    environment = {**os.environ, "PYTHONPATH": f":{Path(__file__).parents[2]}", "XDG_CACHE_HOME": str(tmp_path)}
    line = [*(script if start == "script" else module), "report", "run"]
    done = subprocess.run(line, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert not canary.exists()
    assert (planted / "run" / "report.html").is_file()


@pytest.mark.nightly  # starts three Python processes
def test_a_python_process_that_a_command_starts_imports_nothing_from_the_folder(planted, canary):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}  # not our command
    subprocess.run([sys.executable, "-P", "-c", CHILD], env=environment, capture_output=True, check=True)
    assert not canary.exists()


def test_figures_are_drawn_by_a_python_process_that_ignores_environment_variables(planted, canary, monkeypatch):
    """It uses the packages of this process."""
    monkeypatch.setenv("PYTHONPATH", str(planted))
    Path("program.py").write_text(
        "import numpy, sys, vl_convert\nprint(numpy.__file__, vl_convert.__file__, sys.argv[1])\n"
    )
    line = isolated_command(planted / "program.py", ["numpy", "vl_convert"], "word")
    printed = subprocess.run(line, capture_output=True, text=True, check=True).stdout.split()
    drawing = find_spec("vl_convert")  # not imported in the tests' own process
    assert drawing is not None
    assert printed == [np.__file__, drawing.origin, "word"]
    assert not canary.exists()


def test_the_import_path_is_not_changed(planted, capsys):
    before = list(sys.path)
    assert main(["report", "."]) == 2
    assert main(["audit", "."]) != 0
    assert sys.path == before
    assert str(planted) not in sys.path


@pytest.mark.nightly  # starts a Ray cluster
@pytest.mark.filterwarnings("ignore")
def test_workers_import_nothing_from_the_folder(planted, canary, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("RAY_ADDRESS", "local")
    with cluster() as ray:
        found = ray.get(ray.remote(lambda: __import__("yaml").__file__).remote())
    assert Path(found).name == "__init__.py"
    assert not canary.exists()


def test_a_ray_cluster_that_another_user_announces_in_the_shared_folder_is_not_joined(tmp_path, monkeypatch):
    """Results of its workers would be unpickled."""
    import ray

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("it joins"))
    file = Path(ray._common.utils.get_ray_address_file(None))
    assert file.is_relative_to(tmp_path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("203.0.113.7:6379")
    mine = os.lstat(file)
    monkeypatch.setattr(os, "getuid", lambda: mine.st_uid + 1)
    monkeypatch.setattr(os, "lstat", lambda path: os.stat_result([*mine[:4], mine.st_uid + 2, *mine[5:]]))
    sentence = f"{file}, which names .* is of another user .*: name the cluster in RAY_ADDRESS"
    with pytest.raises(InputError, match=sentence), cluster():
        pass
    monkeypatch.setenv("RAY_ADDRESS", "203.0.113.7:6379")
    with pytest.raises(pytest.fail.Exception, match="it joins"), cluster():
        pass
