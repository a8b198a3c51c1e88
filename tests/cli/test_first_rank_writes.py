"""Only the first rank writes files: when a run begins, resumes, ends, is preempted or is overwritten."""

import os
import sys
from pathlib import Path

import pytest
import wandb  # noqa: F401 - importing it makes folders of its own, which no rank shall be blamed for

from lit_layers.cli.main import main
from lit_layers.training import LitCausalLM
from tests.cli.test_resume import PREEMPTION, recipe  # noqa: F401 - a fixture
from tests.support.forked import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_page")]
CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink", "shutil.rmtree"}


def files_written_by_the_second_rank(command: list[str], log: Path, before=lambda: None) -> tuple[list[int], list[str]]:
    """Return the exit codes, and every file that the second rank opened for writing, created, renamed or removed."""

    def fit() -> int:
        before()
        if os.environ["RANK"] == "1":
            noted = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

            def note(event: str, arguments: tuple) -> None:
                writing = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
                if (writing or event in CHANGES) and arguments[0] != os.devnull:
                    os.write(noted, f"{event} {arguments[0]}\n".encode())

            sys.addaudithook(note)
        return main(command)

    codes = run_ranks(fit)
    return codes, log.read_text().splitlines()


@pytest.mark.soak
def test_the_second_rank_never_writes_at_a_start_preemption_resume_or_overwrite(recipe, tmp_path):  # noqa: F811
    command = ["fit", "--config", str(recipe), "--root", str(tmp_path / "run"), "--trainer.devices", "2"]
    command += ["--trainer.strategy", "ddp"]
    plain = LitCausalLM.loss

    def nan_loss(self, batch):
        return plain(self, batch) * float("nan")

    for number, (options, before, code) in enumerate(
        (
            ([], lambda: PREEMPTION(False), 143),
            (["--resume", "last"], lambda: None, 0),
            (["--resume", "last"], lambda: None, 0),  # the run has already ended
            (["--if_exists", "overwrite", "--trainer.max_steps", "4"], lambda: None, 0),
            (["--if_exists", "overwrite"], lambda: setattr(LitCausalLM, "loss", nan_loss), 3),
        )
    ):
        written = files_written_by_the_second_rank([*command, *options], tmp_path / f"log{number}", before)
        assert written == ([code] * 2, []), options
