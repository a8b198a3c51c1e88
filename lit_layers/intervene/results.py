"""Scores on disk: one JSON file for each task and schedule, so that an interrupted run goes on where it was."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_layers.durable import write_json
from lit_layers.errors import InputError
from lit_layers.functional.block_schedules import Step, format_schedule
from lit_layers.intervene.scores import TaskScores, mean_and_error


@dataclass(frozen=True)
class ResultFolder:
    """The results of one task, of one model, under one set of options: all of it is in the folder's name."""

    folder: Path

    def file(self, schedule: Sequence[Step]) -> Path:
        """Named by a hash, as a schedule may be longer than a file's name; the file says which it is."""
        return self.folder / f"{hashlib.sha256(format_schedule(schedule).encode()).hexdigest()[:16]}.json"

    def read(self, schedule: Sequence[Step]) -> TaskScores | None:
        """What was found of this schedule; None where there is nothing, or a damaged file."""
        try:
            found = json.loads(self.file(schedule).read_text(encoding="utf-8"))
            return _scores(found) if found["schedule"] == format_schedule(schedule) else None
        except FileNotFoundError:
            return None
        except OSError as error:
            raise InputError(f"results: cannot read {self.folder}: {(error.strerror or str(error)).lower()}") from error
        except (ValueError, KeyError, TypeError, AttributeError):
            return None

    def write(self, schedule: Sequence[Step], scores: TaskScores, facts: dict[str, Any]) -> None:
        """Returns when the file is on the disk. `facts` are for its readers.

        Raises:
            InputError: where it cannot be written.
        """
        summary = {}
        for metric, values in scores.values.items():
            value, error = mean_and_error(metric, [values])
            summary[metric] = {"value": value, "stderr": error}
        content = {
            **facts,
            "schedule": format_schedule(schedule),
            "n": len(next(iter(scores.values.values()))),
            "scores": summary,
            "random_score": scores.random_score,
            "rows_hash": scores.rows_hash,
            "num_cut": scores.num_cut,
            "values": {metric: _line(values) for metric, values in scores.values.items()},
            "log_likelihoods": [_line(row) for row in scores.log_likelihoods],
            "texts": scores.texts,
        }
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(self.file(schedule), content)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise InputError(f"results: cannot write {self.folder}: {reason}") from error


def _scores(found: dict[str, Any]) -> TaskScores:
    return TaskScores(
        values={metric: _numbers(line) for metric, line in found["values"].items()},
        log_likelihoods=[_numbers(line) for line in found["log_likelihoods"]],
        texts=found["texts"],
        random_score=found["random_score"],
        rows_hash=found["rows_hash"],
        num_cut=found["num_cut"],
    )


def _line(values: Sequence[float]) -> str:
    """On one line of the file, exactly."""
    return " ".join(str(int(value)) if float(value).is_integer() else repr(float(value)) for value in values)


def _numbers(line: str) -> list[float]:
    return [float(number) for number in line.split()]
