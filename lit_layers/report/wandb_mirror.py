"""A copy of a run at W&B, which is completed from the run's files, and a W&B workspace with the charts of the run."""

import contextlib
import hashlib
import json
import logging
import os
import re
import shlex
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Literal

from lit_layers import records
from lit_layers.errors import InputError, first_line
from lit_layers.figures.theme import EDGE
from lit_layers.files.durable import replace_file
from lit_layers.identity import logged_name
from lit_layers.metrics import look_up, sentence
from lit_layers.records import Measurement
from lit_layers.report import logged_numbers as shown
from lit_layers.schema import run_facts

logger = logging.getLogger(__name__)
NOTES = "lit_layers_sent.jsonl"  # log of sent rows, in the wandb folder of the run
LAG = 30.0  # seconds; rows sent longer ago are in W&B's file even if its process was killed
_INIT = 8.0  # seconds to wait for the server
LIMIT = 300.0  # seconds to wait for uploads at the end
# Matches a line of W&B's settings file that may name another server: any line that `wandb init` does not write.
_ADDRESS = re.compile(r"^(?!\s*$|\s*[#;\[]|(entity|project|mode) *=|base_url *= *https://api\.wandb\.ai/?$).+", re.M)
# Mirrors that failed. If there are any, `run_and_end` skips wandb's exit handler, which could hang.
abandoned: "list[WandbMirror]" = []


class WandbMirror:
    """A mirror of a run's scalars and measurements at W&B. A failure of W&B never stops training.

    A point is the value of one name at one step. `open` finds out which points W&B already has, from the mirror's log
    of sent rows and from the server's row count. It then sends the missing points of `metrics.jsonl` and
    `measurements.jsonl`. `log_step` sends new points. So write to the files first, then call `log_step` once per step.
    A row sent just before the process is killed may be sent twice, with equal values. All charts have
    `trainer/global_step` as x-axis; each row also has the number of tokens.

    The table at the end has all records. If an analysis was measured with several settings (options and data), only the
    records of the first settings keep the plain name. Records of other settings are named `coupling@1a2b3c4d/...`, with
    a hash of the settings. After an error the mirror stops and logs one warning. W&B uploads rows in a process of its
    own, so only the end of the run waits for uploads.

    Args:
        project: the W&B project.
        mode: auto: online if there is an API key and the server answers, otherwise offline with a warning. online: fail
            at the start if W&B cannot be reached. offline: only write files. disabled: do nothing. With auto, the
            variable WANDB_MODE takes precedence.
        entity: the W&B team or user; None uses the default of the API key.
        group: group of the run at W&B, e.g. to group runs that differ only in their seed.
        scalars: the values that become curves over steps. plotted: one variant of each metric, such as its mean, and
            values per layer for only one metric of each analysis. all: everything except values of layer pairs.
    """

    def __init__(
        self,
        project: str = "lit_layers",
        mode: Literal["auto", "online", "offline", "disabled"] = "auto",
        *,
        entity: str | None = None,
        group: str | None = None,
        scalars: shown.Scalars = "plotted",
    ) -> None:
        self.scalars: shown.Scalars = scalars
        self.mode = mode
        self.target = {"project": project, "entity": entity, "group": group}
        self.closing_line = ""  # the run's address or the upload command, and the workspace command
        self._run: Any = None  # None unless rows can be sent
        self._sent = defaultdict[str, set[int | None]](set)  # steps that W&B has, by name of the value
        self._steps = set[int]()  # measured steps

    def open(self, root: str | Path, *, run_id: str, config: Mapping[str, Any]) -> None:
        """Start or resume the W&B run, and send the points that it lacks.

        Measurements of checkpoints that an audit found suspect are not sent.

        Raises:
            InputError: W&B settings in the working directory name another server, or `mode` is online and W&B cannot be
                reached.
        """
        self.root = Path(root)
        mode = (os.environ.get("WANDB_MODE", "").lower() or "auto") if self.mode == "auto" else self.mode
        if mode == "disabled":
            return
        with self._stop_on_error():
            self._start(mode, run_id, dict(config))
            self._read_notes()
            for row in self._file_rows():
                self.log_step(*row)

    def log_step(
        self, step: int, tokens: int | None, scalars: Mapping[str, float], measurements: Sequence[Measurement]
    ) -> None:
        """Send the points of one finished step, and heat maps over layers and steps if they are due."""
        if self._run is None:
            return
        with self._stop_on_error():
            curves = shown.curves_of(measurements, self._plain, self.scalars)
            row: dict[str, Any] = {**scalars, **{name: record.value for name, record in curves.items()}}
            if measurements and step not in self._steps:
                self._steps.add(step)
                if shown.are_maps_due(len(self._steps)):
                    row |= shown.layer_maps(self.root, step)
            if new := {name: value for name, value in row.items() if step not in self._sent[name]}:
                self._send(step, new | ({} if tokens is None else {"tokens": tokens}))

    def finish(self, exit_code: int = 0) -> None:
        """Close the W&B run and wait until all rows are sent.

        If the run ended well, the table of all records is sent first.
        """
        if self._run is None:
            return
        with self._stop_on_error():
            for row in self._null_rows():
                self.log_step(*row)
            # Send no table for an interrupted run: it may be resumed, and then sends its table at its end.
            is_due = self._num_rows > self._num_before or None not in self._sent[shown.TABLE]
            if exit_code == 0 and is_due and (row := shown.end_of_run(self.root)):
                self._send(None, row)
            end = ThreadPoolExecutor(1).submit(self._run.finish, exit_code=exit_code)
            limit = min(LIMIT, 15) if exit_code == 143 else LIMIT  # clusters kill a job soon after SIGTERM
            if not wait([end], limit).done:
                raise TimeoutError(f"not all was sent within {limit:.0f} s")
            end.result()
            self._note({"is_closed": True})
        self._run = None

    def _start(self, mode: str, run_id: str, config: dict[str, Any]) -> None:
        import wandb

        if mode == "auto" and not _has_credentials(wandb):
            logger.warning("W&B: no API key, so the run is mirrored offline")
            mode = "offline"
        if mode != "offline":
            refuse_settings_of_folder()
        root = self.root.resolve()
        (root / "wandb").mkdir(parents=True, exist_ok=True)
        # W&B copies tables and figures before it uploads them: have it copy to the run's folder, not the user's home.
        os.environ["WANDB_DATA_DIR"] = str(root / "wandb")
        settings = wandb.Settings(console="off", silent=True, reinit="create_new", init_timeout=_INIT)
        options = {"config": config, "id": run_id, "resume": "allow", "name": root.name, "dir": str(root)}
        options |= {"settings": settings, **self.target}
        try:
            run = wandb.init(**options, mode="offline" if mode == "offline" else "online")
        except (wandb.Error, OSError) as error:
            if mode == "online":
                reason = first_line(error)
                raise InputError(f"wandb.mode online: W&B cannot be reached ({reason}); try auto") from error
            logger.warning("W&B: cannot be reached (%s), so the run is mirrored offline", first_line(error))
            if wandb.run is None:
                wandb.teardown()  # frees the run id, which W&B still holds after the failed start
            run = wandb.init(**options, mode="offline")
        run.define_metric(shown.AXIS)
        run.define_metric("*", step_metric=shown.AXIS, step_sync=False)
        quoted = shlex.quote(str(self.root))
        later = f"offline; upload it with: wandb sync {quoted}/wandb/offline-run-*-{run_id}*"
        where = later if run.settings.mode == "offline" else run.url
        workspace = f"lit-layers report {quoted} --workspace {run.entity or 'ENTITY'}/{self.target['project']}"
        self.closing_line = f"W&B          {where}\nworkspace    {workspace}"
        self._run = run

    def _read_notes(self) -> None:
        """Read the log of sent rows, and mark as sent the rows that are at W&B.

        The other rows are removed from the log, and are sent again.
        """
        file, noted = self.root / "wandb" / NOTES, list[dict[str, Any]]()
        for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
            with contextlib.suppress(ValueError):  # skip an incomplete last line
                noted.append(json.loads(line))
        rows = [row for row in noted if "row" in row]
        is_online = self._run.settings.mode != "offline"
        before = self._run.starting_step or 0 if is_online else 0
        # The next row number. W&B's row numbers never decrease, so rows that are sent again get new numbers.
        self._num_rows = self._num_before = max([before, *(row["row"] + 1 for row in rows)])
        if is_online:  # rows from `before` on never reached the server (offline run or crash): send them again
            rows = [row for row in rows if row["row"] < before]
        elif rows and "is_closed" not in noted[-1]:  # the process was killed: its last rows may be lost
            rows = [row for row in rows if row["at"] <= rows[-1]["at"] - LAG]
        for row in rows:
            self._mark_sent(row)
        last = {"row": self._num_rows - 1, "step": None, "names": [], "at": 0.0}
        replace_file(file, "".join(json.dumps(row) + "\n" for row in [*rows, last]))

    def _file_rows(self) -> list[tuple[int, int | None, dict[str, float], list[Measurement]]]:
        """Return step, tokens, scalars and measurements of each point in the run's files, sorted by step.

        A point is one measurement without scalars, or one row of metrics.jsonl without measurements.
        """
        measured, self._plain = shown.measured_in(self.root)
        found: list[Any] = [(m.step, m.tokens, {}, [m]) for m in measured if m.step is not None]
        self._steps |= {step for step, *_ in found}
        for row in records.rows(self.root / "metrics.jsonl"):
            found.append((int(row.pop("step")), row.pop("tokens", None), row, []))
        return [*sorted(found, key=lambda each: each[0]), *self._null_rows()]

    def _null_rows(self) -> list[tuple[int, int | None, dict[str, float], list[Measurement]]]:
        """Return rows, as `_file_rows` does, with the run's nulls at its first and last measured steps."""
        values = shown.null_curves_of(records.read_nulls(self.root), self._plain, self.scalars)
        return [(step, None, values, []) for step in sorted({min(self._steps), max(self._steps)})] if values else []

    def _send(self, step: int | None, row: dict[str, Any]) -> None:
        axis = {} if step is None else {shown.AXIS: step}
        self._run.log({**row, **axis}, step=self._num_rows, commit=True)
        # Note the row after sending it: a crash in between sends it twice. The other order would lose it.
        note = {"row": self._num_rows, "step": step, "names": [*row], "at": time.time()}
        self._note(note)
        self._mark_sent(note)
        self._num_rows += 1

    def _note(self, line: Mapping[str, Any]) -> None:
        with open(self.root / "wandb" / NOTES, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _mark_sent(self, note: Mapping[str, Any]) -> None:
        for name in note["names"]:
            self._sent[name].add(note["step"])

    @contextlib.contextmanager
    def _stop_on_error(self) -> Iterator[None]:
        """Stop the mirror and log a warning if the `with` block raises an error, so that training goes on.

        Raises:
            InputError: the block raises an InputError before the W&B run has started.
        """
        try:
            yield
        except (Exception, SystemExit) as error:
            if isinstance(error, InputError) and self._run is None:
                raise
            if self._run is not None:
                abandoned.append(self)
            self._run = None
            reason = "pip install 'lit_layers[wandb]'" if isinstance(error, ImportError) else first_line(error)
            later = f"`lit-layers report {shlex.quote(str(self.root))} --wandb` adds what is missing later"
            self.closing_line = f"W&B: stopped ({reason}); the run goes on, {later}"
            logger.warning("%s", self.closing_line)


def refuse_settings_of_folder() -> None:
    """Refuse a `wandb/settings` file in the working directory that names another server.

    W&B reads this file and would send data and API key to that server. A downloaded run folder may
    contain such a file.

    Raises:
        InputError: the file names another server; the message quotes the setting.
    """
    file = Path("wandb/settings")
    if line := _ADDRESS.search(file.read_text(errors="replace") if file.is_file() else ""):
        raise InputError(
            f"{file} of this folder says {line[0][:200]}, and W&B may send the run and your key elsewhere by it: "
            "remove that line; the variable WANDB_BASE_URL names a server of your own"
        )


def _has_credentials(wandb: Any) -> bool:
    """Return whether wandb finds an API key, without wandb's own check, which may ask the user for a key."""
    from requests.utils import get_netrc_auth  # a dependency of wandb

    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    settings = wandb.setup().settings
    return bool(settings.api_key) or get_netrc_auth(settings.base_url) is not None


def id_of_run(root: Path) -> str:
    """Return the id that the training used at W&B, or else an id derived from the first line of the run's records."""
    if found := run_facts(root).get("id"):
        return str(found)
    files = (root / "measurements.jsonl", root / "metrics.jsonl")
    with next(file for file in files if file.is_file()).open("rb") as lines:
        return hashlib.sha256(lines.readline()).hexdigest()[:8]


# ------------------------------------------------------------------------------------------------ the workspace


def save_workspace(root: str | Path, target: str) -> str:
    """Create a W&B workspace at `target` (ENTITY/PROJECT) with the charts of a run, and return its address.

    The workspace shows all runs of the project.

    Raises:
        InputError: `target` is not ENTITY/PROJECT, nothing was measured, or W&B cannot be reached or refuses it.
    """
    entity, _, project = target.partition("/")
    if not entity or not project or "/" in project:
        raise InputError(f"workspace: expected ENTITY/PROJECT at W&B, got {target!r}")
    refuse_settings_of_folder()
    made = workspace_of(root, entity, project)
    try:
        made.save()
    except Exception as error:  # wandb, requests and GraphQL errors have no common base
        raise InputError(f"{target}: W&B did not take it ({first_line(error)[:300]})") from error
    return made.url


def workspace_of(root: str | Path, entity: str, project: str) -> Any:
    """Return a W&B workspace with one chart of all layers for each metric, and heat maps over layers and steps."""
    try:
        import wandb_workspaces.reports.v2 as wr
        import wandb_workspaces.workspaces as ws
    except ImportError as error:
        raise InputError("wandb_workspaces is not installed: pip install 'lit_layers[wandb]'") from error
    root = Path(root)
    measured, plain = shown.measured_in(root)
    look: dict[str, Any] = {"x": shown.AXIS, "title_x": "Optimizer step", "log_x": True}
    rows = records.rows(root / "metrics.jsonl")
    scalars = dict.fromkeys(name for row in rows for name in row if name not in ("step", "tokens"))
    charts: dict[str, list[Any]] = {"Training": [wr.LinePlot(title=name, y=[name], **look) for name in scalars]}
    curves = defaultdict[tuple[str, str], dict[str, None]](dict)
    for m in measured:
        for curve, record in shown.curves_of([m] if m.step is not None else [], plain).items():
            curves[logged_name(m, plain), record.metric][curve] = None
    if not curves:
        raise InputError(f"{root}: nothing was measured at a step there, so a workspace would have no charts")
    nulls, run_id = shown.null_curves_of(records.read_nulls(root), plain), id_of_run(root)
    for (analysis, metric), lines in curves.items():
        own_nulls = [name for name in nulls if name.rpartition("/")[0] in lines]
        own: dict[str, Any] = {"y": [*lines, *own_nulls], "log_y": look_up(metric).log or None}
        own["line_colors"] = {f"{run_id}:{name}": EDGE for name in own_nulls}
        chart = wr.LinePlot(title=look_up(metric).unit_title, **own, **look)
        charts.setdefault(sentence(analysis), []).append(chart)
    charts["Layers by steps"] = [
        wr.MediaBrowser(title=name, media_keys=[name], num_columns=1, gallery_axis="step")
        for name in shown.surfaces_of(measured, plain)
    ]
    charts["All numbers"] = [wr.WeavePanelSummaryTable(table_name=shown.TABLE)]
    sections = [ws.Section(name=title, is_open=True, panels=panels) for title, panels in charts.items() if panels]
    settings, name = ws.WorkspaceSettings(x_axis=shown.AXIS, max_runs=50), "Emergence, layer by layer"
    return ws.Workspace(entity=entity, project=project, name=name, sections=sections, settings=settings)
