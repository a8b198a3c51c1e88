"""A run at W&B: a mirror of its numbers, which the run's files complete where it lacks some, and a workspace."""

import contextlib
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
from lit_layers.files.durable import replace_file
from lit_layers.identity import logged_name
from lit_layers.metrics import look_up, sentence
from lit_layers.records import Measurement
from lit_layers.report import logged_numbers as shown

logger = logging.getLogger(__name__)
NOTES = "lit_layers_sent.jsonl"  # in the run's folder of W&B: the rows that were sent, in order
LAG = 30.0  # seconds: what W&B had received earlier is in its file, also where its process was killed
_INIT = 8.0  # seconds to wait for the server
LIMIT = 300.0  # seconds until W&B has sent all, at the end
# A line of W&B's settings that may name a server, other than the one that `wandb init` writes down.
_ADDRESS = re.compile(r"^(?!\s*$|\s*[#;\[]|(entity|project|mode) *=|base_url *= *https://api\.wandb\.ai/?$).+", re.M)
abandoned: "list[WandbMirror]" = []  # W&B's own end may wait for ever for theirs


class WandbMirror:
    """Show a run's scalars and measurements at W&B. No training fails because of W&B.

    A point is a name at a step. `open` finds out which points W&B has (from what the mirror noted as it sent them, and
    from the server's count of rows) and sends those that `metrics.jsonl` and `measurements.jsonl` hold beyond them;
    `log_step` sends what is new. So write to the files first, then call `log_step` once for each step. A row sent
    shortly before a kill may be sent twice, unchanged. Each name has `trainer/global_step` as its axis, each row the
    tokens as a second one.

    All numbers are in the table at the end. Numbers of other settings than an analysis was first measured with have
    names of their own, `coupling@1a2b3c4d/...`. A mirror that raises is given up with one sentence. W&B itself sends
    the rows, from a process of its own: only the end of the run waits for that.

    Args:
        project: the project at W&B.
        mode: auto: online where there is an API key and the server answers, else offline, said in one line; online:
            refuse to start otherwise; offline; disabled. The variable WANDB_MODE decides where mode is auto.
        entity: the team or user; None: the key's own.
        group: of the run at W&B, such as the seeds of one training.
        scalars: plotted: one variant of each metric is a curve, and one metric of each analysis has a curve a layer;
            all: everything but pairs of layers.
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
        self.closing_line = ""  # the run's address, or how to upload an offline run, and how to get its workspace
        self._run: Any = None  # while rows are sent
        self._sent = defaultdict[str, set[int | None]](set)  # by name, the steps that W&B has
        self._steps = set[int]()  # that were measured

    def open(self, root: str | Path, *, run_id: str, config: Mapping[str, Any]) -> None:
        """Start or resume the run, and send what W&B lacks of its files, without suspect checkpoints.

        Raises:
            InputError: where settings of the folder would send the key elsewhere, or `mode` is online without a server.
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
        """Send the points of one closed step, and pictures of layers by steps where they are due."""
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
        """Close the run, with the table of all numbers where it ended well. Returns when all is sent."""
        if self._run is None:
            return
        with self._stop_on_error():
            # A run that was cut short is gone on with, and sends its table at its end.
            is_due = self._num_rows > self._num_before or None not in self._sent[shown.TABLE]
            if exit_code == 0 and is_due and (row := shown.end_of_run(self.root)):
                self._send(None, row)
            end = ThreadPoolExecutor(1).submit(self._run.finish, exit_code=exit_code)
            limit = min(LIMIT, 15) if exit_code == 143 else LIMIT  # a cluster kills soon after SIGTERM
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
        # Tables and figures are staged before they are logged: inside the run's folder, not in the user's home.
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
                wandb.teardown()  # its service still holds the id of the run that did not start
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
        """Find out which points W&B has, and keep the notes of these."""
        file, noted = self.root / "wandb" / NOTES, list[dict[str, Any]]()
        for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
            with contextlib.suppress(ValueError):  # torn
                noted.append(json.loads(line))
        rows = [row for row in noted if "row" in row]
        is_online = self._run.settings.mode != "offline"
        before = self._run.starting_step or 0 if is_online else 0
        # Of W&B's own step, which never falls: what is sent again has new numbers.
        self._num_rows = self._num_before = max([before, *(row["row"] + 1 for row in rows)])
        if is_online:  # a run that was offline, or a crash, has kept the others from the server
            rows = [row for row in rows if row["row"] < before]
        elif rows and "is_closed" not in noted[-1]:  # killed
            rows = [row for row in rows if row["at"] <= rows[-1]["at"] - LAG]
        for row in rows:
            self._mark_sent(row)
        last = {"row": self._num_rows - 1, "step": None, "names": [], "at": 0.0}
        replace_file(file, "".join(json.dumps(row) + "\n" for row in [*rows, last]))

    def _file_rows(self) -> list[tuple[int, int | None, dict[str, float], list[Measurement]]]:
        """Return all that the run's files hold, step by step."""
        measured, self._plain = shown.measured_in(self.root)
        found: list[Any] = [(m.step, m.tokens, {}, [m]) for m in measured if m.step is not None]
        self._steps |= {step for step, *_ in found}
        for row in records.rows(self.root / "metrics.jsonl"):
            found.append((int(row.pop("step")), row.pop("tokens", None), row, []))
        return sorted(found, key=lambda each: each[0])

    def _send(self, step: int | None, row: dict[str, Any]) -> None:
        axis = {} if step is None else {shown.AXIS: step}
        self._run.log({**row, **axis}, step=self._num_rows, commit=True)
        # Afterwards: a row that was sent and not noted is sent twice, the other way round it would be lost.
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
        """Send nothing more after an error, whatever it is, and say so: no training ends for it.

        Raises:
            InputError: where the run has not begun.
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
    """Refuse a `wandb/settings` of the working directory that sends data, and the key with it, to another server.

    W&B reads it, and a folder that was downloaded with a run may hold one.

    Raises:
        InputError: naming the setting.
    """
    file = Path("wandb/settings")
    if line := _ADDRESS.search(file.read_text(errors="replace") if file.is_file() else ""):
        raise InputError(
            f"{file} of this folder says {line[0][:200]}, and W&B may send the run and your key elsewhere by it: "
            "remove that line; the variable WANDB_BASE_URL names a server of your own"
        )


def _has_credentials(wandb: Any) -> bool:
    """Return whether wandb would find a key by itself; asking it would prompt in a terminal."""
    from requests.utils import get_netrc_auth  # which wandb needs, too

    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    settings = wandb.setup().settings
    return bool(settings.api_key) or get_netrc_auth(settings.base_url) is not None


# ------------------------------------------------------------------------------------------------ the workspace


def save_workspace(root: str | Path, target: str) -> str:
    """Make a workspace at ENTITY/PROJECT with the charts that a run has, for all runs there; return its address.

    Raises:
        InputError: another place, nothing was measured, or W&B cannot be reached or refuses it.
    """
    entity, _, project = target.partition("/")
    if not entity or not project or "/" in project:
        raise InputError(f"workspace: expected ENTITY/PROJECT at W&B, got {target!r}")
    refuse_settings_of_folder()
    made = workspace_of(root, entity, project)
    try:
        made.save()
    except Exception as error:  # of wandb, requests, its GraphQL client: each has its own
        raise InputError(f"{target}: W&B did not take it ({first_line(error)[:300]})") from error
    return made.url


def workspace_of(root: str | Path, entity: str, project: str) -> Any:
    """Return a workspace of `wandb_workspaces`: all layers of a metric in one chart, and its picture over the steps."""
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
    for (analysis, metric), lines in curves.items():
        chart = wr.LinePlot(title=look_up(metric).unit_title, y=[*lines], log_y=look_up(metric).log or None, **look)
        charts.setdefault(sentence(analysis), []).append(chart)
    charts["Layers by steps"] = [
        wr.MediaBrowser(title=name, media_keys=[name], num_columns=1, gallery_axis="step")
        for name in shown.surfaces_of(measured, plain)
    ]
    charts["All numbers"] = [wr.WeavePanelSummaryTable(table_name=shown.TABLE)]
    sections = [ws.Section(name=title, is_open=True, panels=panels) for title, panels in charts.items() if panels]
    settings, name = ws.WorkspaceSettings(x_axis=shown.AXIS, max_runs=50), "Emergence, layer by layer"
    return ws.Workspace(entity=entity, project=project, name=name, sections=sections, settings=settings)
