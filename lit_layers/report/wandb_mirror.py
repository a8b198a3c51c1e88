"""A run at W&B: a mirror of its numbers, which the run's files complete where it lacks some, and a workspace."""

import configparser
import contextlib
import json
import logging
import os
import queue
import shlex
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal

from lit_layers import records
from lit_layers.errors import InputError, first_line, refused
from lit_layers.figures.tables import grouped
from lit_layers.figures.theme import spread
from lit_layers.files.durable import replace_file
from lit_layers.identity import latest, logged_name, plain_settings
from lit_layers.metrics import look_up, sentence
from lit_layers.records import Measurement
from lit_layers.report import logged_numbers

logger = logging.getLogger(__name__)
NOTES = "lit_layers_sent.jsonl"  # in the run's folder of W&B: the rows that were sent, in order
LAG = 30.0  # seconds: what W&B had received earlier is in its file, also where its process was killed
_STEPS = 10_000  # that wait at most: W&B does not keep up then, and the files have them all
_INIT = 8.0  # seconds to wait for the server
TIMEOUT = 60.0  # seconds without an answer at the start, or without a row at the end
_LIMIT_AFTER_SIGTERM, _TERMINATED = 15.0, 143
_SERVER = "https://api.wandb.ai"  # which `wandb init` writes down, too
_NAMES = {"entity", "project", "base_url", "disabled", "mode", "anonymous"}  # settings that reach no address
_LINES = 25  # layers in one chart of a workspace; of deeper models some that are spread evenly have a line
abandoned: "list[WandbMirror]" = []  # W&B's own end may wait for ever for theirs


class WandbMirror:
    """Show a run's scalars and measurements at W&B, from a thread of its own: no training fails or waits for W&B.

    A point is a name at a step. `open` finds out which points W&B has (from what the mirror noted as it sent them, and
    from the server's count of rows) and sends those that `metrics.jsonl` and `measurements.jsonl` hold beyond them;
    `log_step` sends what is new. So write to the files first, then call `log_step` once for each step. A row sent
    shortly before a kill may be sent twice, unchanged. Each name has `trainer/global_step` as its axis, each row the
    tokens as a second one.

    Numbers of pairs of layers are in the table at the end. Numbers of other settings than an analysis was first
    measured with have names of their own, `coupling@1a2b3c4d/...`. A mirror that raises, falls behind or does not
    answer is given up with one sentence.

    Args:
        project: the project at W&B.
        mode: auto: online where there is an API key and the server answers, else offline, said in one line; online:
            refuse to start otherwise; offline; disabled. The variable WANDB_MODE decides where mode is auto.
        entity: the team or user; None: the key's own.
        group: of the run at W&B, such as the seeds of one training.
        scalars: plotted: one variant of each metric is a curve, without diagnostics; all: everything but pairs of
            layers.
    """

    def __init__(
        self,
        project: str = "lit_layers",
        mode: Literal["auto", "online", "offline", "disabled"] = "auto",
        *,
        entity: str | None = None,
        group: str | None = None,
        scalars: logged_numbers.Scalars = "plotted",
    ) -> None:
        self.scalars: logged_numbers.Scalars = scalars
        self.mode = mode
        self.place = {"project": project, "entity": entity, "group": group}
        self.num_rows = 0  # sent so far, in this and earlier processes
        self._message, self._is_off, self._refusal, self._exit_code = "", True, list[InputError](), 0
        self._run: Any = None
        self._wandb: Any = None
        self._sent: dict[int | None, frozenset[str]] = {}  # names by step
        self._names: dict[frozenset[str], frozenset[str]] = {}
        self._steps = set[int]()  # that were measured
        self._table_is_due = False
        self._notes: IO[str] | None = None
        self._calls: queue.Queue[Any] = queue.Queue()  # arguments of `log_step`, and None at the end
        self._is_started, self._has_ended = threading.Event(), threading.Event()

    def open(self, root: str | Path, *, run_id: str, config: Mapping[str, Any], allow_suspect: bool = False) -> None:
        """Start or resume the run; what W&B lacks of its files is sent meanwhile.

        Checkpoints that an audit found suspect are left out of curves and table, unless `allow_suspect`.

        Raises:
            InputError: where `mode` is online and W&B cannot be reached.
        """
        self.root, self._allow_suspect = Path(root), allow_suspect
        mode = (os.environ.get("WANDB_MODE", "").lower() or "auto") if self.mode == "auto" else self.mode
        if mode == "disabled":
            return
        try:
            import wandb
        except ImportError:
            install = "pip install 'lit_layers[wandb]'"
            self._say(f"W&B: not installed, so nothing is mirrored; {install}, then {self._adds_later()}")
            return
        with refused(f"cannot write {self.root}"):
            (self.root / "wandb").mkdir(parents=True, exist_ok=True)
        self._wandb, self._is_off = wandb, False
        threading.Thread(target=self._work, args=(mode, run_id, dict(config)), name="wandb", daemon=True).start()
        if not self._is_started.wait(TIMEOUT):
            self._give_up(f"no answer within {TIMEOUT:.0f} s")
        if self._refusal:
            raise self._refusal[0]

    def log_step(
        self, step: int, tokens: int | None, scalars: Mapping[str, float], measurements: Sequence[Measurement]
    ) -> None:
        """Hand over the points of one closed step. Returns at once."""
        if self._is_off:
            return
        self._calls.put((step, tokens, dict(scalars), list(measurements)))
        if self._calls.qsize() > _STEPS:
            self._give_up("it does not keep up")

    def finish(self, exit_code: int = 0) -> None:
        """Close the run, with the table of all numbers where it ended well.

        Returns when all is sent, or when no row was sent for a while.
        """
        if self._is_off:
            return
        self._exit_code = exit_code
        self._calls.put(None)
        is_killed, seen = exit_code == _TERMINATED, -1
        limit = min(TIMEOUT, _LIMIT_AFTER_SIGTERM) if is_killed else TIMEOUT
        while not self._has_ended.wait(limit):
            before, seen = seen, self.num_rows
            if is_killed or seen == before:
                self._give_up(f"no answer within {limit:.0f} s")
                break
        self._is_off = True

    def closing_line(self) -> str:
        """Return where to look: the run's address, or how to upload an offline run, and how to get its workspace."""
        return self._message

    # ------------------------------------------------------------------------------------------- the thread

    def _work(self, mode: str, run_id: str, config: dict[str, Any]) -> None:
        try:
            try:
                self._start(mode, run_id, config)
                self._read_notes()
            except InputError as error:
                self._refusal.append(error)
                self._is_off = True
            finally:
                self._is_started.set()
            if self._is_off:
                return
            for row in self._on_disk():
                self._log(*row)
            for row in iter(self._calls.get, None):
                self._log(*row)
            if self._exit_code == 0:  # a run that was cut short is gone on with, and sends its table at its end
                self._log_table()
            if not self._is_off:
                self._run.finish(exit_code=self._exit_code)
                self._note(is_closed=True)
        except BaseException as error:  # whatever it is: no training ends for it
            self._give_up(first_line(error))
        finally:
            if self._notes is not None:
                self._notes.close()
            self._has_ended.set()

    def _start(self, mode: str, run_id: str, config: dict[str, Any]) -> None:
        """Begin the run, or say why there is none.

        Raises:
            InputError: where settings of the folder would send the key elsewhere, or `mode` is online without a server.
        """
        if mode == "auto" and not _has_credentials(self._wandb):
            logger.warning("W&B: no API key, so the run is mirrored offline")
            mode = "offline"
        if mode != "offline":
            refuse_settings_of_folder()
        # Tables and figures are staged before they are logged: inside the run's folder, not in the user's home.
        os.environ["WANDB_DATA_DIR"] = str(self.root.resolve() / "wandb")
        quiet = {"console": "off", "silent": True, "reinit": "create_new", "init_timeout": _INIT}
        root = self.root.resolve()
        options = {"config": config, "id": run_id, "resume": "allow", "name": root.name, "dir": str(root)} | self.place

        def begun(mode: str) -> Any:
            return self._wandb.init(**options, mode=mode, settings=self._wandb.Settings(**quiet))

        try:
            self._run = begun("offline" if mode == "offline" else "online")
        except (self._wandb.Error, OSError) as error:
            if mode == "online":
                reason = first_line(error)
                raise InputError(f"wandb.mode online: W&B cannot be reached ({reason}); try auto") from error
            logger.warning("W&B: cannot be reached (%s), so the run is mirrored offline", first_line(error))
            if self._wandb.run is None:
                self._wandb.teardown()  # its service still holds the id of the run that did not start
            self._run = begun("offline")
        self._run.define_metric(logged_numbers.AXIS)
        self._run.define_metric("*", step_metric=logged_numbers.AXIS, step_sync=False)
        self._is_online = self._run.settings.mode != "offline"
        where = self._run.url
        if not self._is_online:
            folders = sorted(self.root.glob(f"wandb/offline-run-*-{run_id}*"))
            where = f"offline; upload it with: wandb sync {' '.join(shlex.quote(str(each)) for each in folders)}"
        workspace = f"{self._run.entity or 'ENTITY'}/{self.place['project']}"
        command = f"lit-layers report {shlex.quote(str(self.root))} --workspace {workspace}"
        self._message = f"W&B          {where}\nworkspace    {command}"

    def _read_notes(self) -> None:
        """Find out which points W&B has, and keep the notes of these."""
        file, noted = self.root / "wandb" / NOTES, list[dict[str, Any]]()
        for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
            with contextlib.suppress(ValueError):  # torn
                noted.append(json.loads(line))
        rows = [row for row in noted if "row" in row]
        before = self._run.starting_step or 0 if self._is_online else 0
        # Of W&B's own step, which never falls: what is sent again has new numbers.
        self.num_rows = max([before, *(row["row"] + 1 for row in rows)])
        if self._is_online:  # a run that was offline, or a crash, has kept the others from the server
            rows = [row for row in rows if row["row"] < before]
        elif rows and "is_closed" not in noted[-1]:  # killed
            rows = [row for row in rows if row["at"] <= rows[-1]["at"] - LAG]
        for row in rows:
            self._add(row["step"], row["names"])
        last = {"row": self.num_rows - 1, "step": None, "names": [], "at": 0.0}
        replace_file(file, "".join(json.dumps(row) + "\n" for row in [*rows, last]))
        self._notes = file.open("a", buffering=1, encoding="utf-8")

    def _add(self, step: int | None, names: Iterable[str]) -> None:
        # Most steps hold the same names: one set serves them all, or a long run would need gigabytes.
        joined = self._sent.get(step, frozenset()).union(names)
        self._sent[step] = self._names.setdefault(joined, joined)

    def _on_disk(self) -> Iterator[tuple[int, int | None, dict[str, float], list[Measurement]]]:
        """Yield all that the run's files hold, step by step."""
        self._plain = plain_settings(records.read(self.root / "measurements.jsonl"))
        measured = grouped((m for m in self._measured() if m.step is not None), lambda m: m.step)
        rows = grouped(records.rows(self.root / "metrics.jsonl"), lambda row: int(row["step"]))
        for step in sorted(measured.keys() | rows.keys()):
            measurements = measured.get(step, [])
            scalars: dict[str, Any] = {name: value for row in rows.get(step, ()) for name, value in row.items()}
            tokens = scalars.pop("tokens", next((m.tokens for m in measurements if m.tokens is not None), None))
            scalars.pop("step", None)
            yield step, None if tokens is None else int(tokens), scalars, measurements

    def _measured(self) -> list[Measurement]:
        measurements = latest(records.read(self.root / "measurements.jsonl"))
        return [m for m in measurements if self._allow_suspect or not records.is_suspect(m)]

    def _log(
        self, step: int, tokens: int | None, scalars: Mapping[str, float], measurements: Sequence[Measurement]
    ) -> None:
        """Send the points of one step that W&B does not have."""
        row, sent = dict[str, Any](scalars), self._sent.get(step, frozenset())
        measured = [measurement for measurement in measurements if measurement.error is None]
        for each in measured:
            row |= logged_numbers.values_of(
                each if self.scalars == "all" else logged_numbers.plotted(each), logged_name(each, self._plain)
            )
        if measured and step not in self._steps:
            self._steps.add(step)
            if logged_numbers.are_maps_due(len(self._steps)) and not any(
                name.endswith(logged_numbers.SURFACE) for name in sent
            ):
                until = [m for m in self._measured() if m.step is not None and m.step <= step]
                row |= logged_numbers.images_of(self._wandb, logged_numbers.layer_maps(until, self._plain))
        if new := {name: value for name, value in row.items() if name not in sent}:
            self._table_is_due |= bool(measured)
            self._send(step, new | ({} if tokens is None else {"tokens": tokens}))

    def _log_table(self) -> None:
        """The long form of all measurements, once they are complete, with pictures of layers by steps."""
        is_due = self._table_is_due or logged_numbers.TABLE not in self._sent.get(None, frozenset())
        if is_due and (row := logged_numbers.of_the_whole_run(self._wandb, self._measured(), self._plain)):
            self._send(None, row)

    def _send(self, step: int | None, row: dict[str, Any]) -> None:
        if self._is_off:
            return
        axis = {} if step is None else {logged_numbers.AXIS: step}
        self._run.log({**row, **axis}, step=self.num_rows, commit=True)
        # Afterwards: a row that was sent and not noted is sent twice, the other way round it would be lost.
        self._note(row=self.num_rows, step=step, names=[*row], at=time.time())
        self._add(step, row)
        self.num_rows += 1

    def _note(self, **line: Any) -> None:
        if self._notes is not None:
            self._notes.write(json.dumps(line) + "\n")

    # ------------------------------------------------------------------------------------------- words

    def _adds_later(self) -> str:
        return f"`lit-layers report {shlex.quote(str(self.root))} --wandb` adds what is missing later"

    def _give_up(self, reason: str) -> None:
        """Send nothing more, and say so."""
        if not self._is_off:
            self._is_off = True
            abandoned.append(self)
            self._say(f"W&B: stopped ({reason}); the run goes on, {self._adds_later()}")

    def _say(self, sentence: str) -> None:
        self._message = sentence
        logger.warning("%s", sentence)


def refuse_settings_of_folder() -> None:
    """Refuse a `wandb/settings` of the working directory that sends data, and the key with it, to another server.

    W&B reads it, and a folder that was downloaded with a run may hold one.

    Raises:
        InputError: naming the setting.
    """
    file, content = Path("wandb") / "settings", configparser.ConfigParser(interpolation=None)
    try:
        content.read(file, encoding="utf-8")
    except (configparser.Error, OSError, UnicodeDecodeError):
        return  # nor does W&B read it
    for section in content.values():
        for name, value in section.items():
            is_known = name in _NAMES and (name != "base_url" or value.rstrip("/") == _SERVER)
            if not is_known and not (name == "base_url" and os.environ.get("WANDB_BASE_URL")):
                raise InputError(
                    f"{file} of this folder says {name} = {value[:200]}, and W&B would send the run and your key "
                    "there: say so by WANDB_BASE_URL, or remove that line"
                )


def _has_credentials(wandb: Any) -> bool:
    """Return whether wandb would find a key by itself; asking it would prompt in a terminal."""
    from requests.utils import get_netrc_auth  # which wandb needs, too

    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    settings = wandb.setup().settings
    return bool(settings.api_key) or get_netrc_auth(settings.base_url) is not None


# ------------------------------------------------------------------------------------------------ the workspace


def save_workspace(root: str | Path, place: str) -> str:
    """Make a workspace at ENTITY/PROJECT with the charts that a run has, for all runs there; return its address.

    Raises:
        InputError: another place, nothing was measured, or W&B cannot be reached or refuses it.
    """
    entity, _, project = place.partition("/")
    if not entity or not project or "/" in project:
        raise InputError(f"workspace: expected ENTITY/PROJECT at W&B, got {place!r}")
    refuse_settings_of_folder()
    made = workspace_of(root, entity, project)
    try:
        made.save()
    except Exception as error:  # of wandb, requests, its GraphQL client: each has its own
        raise InputError(f"{place}: W&B did not take it ({first_line(error)[:300]})") from error
    return made.url


def workspace_of(root: str | Path, entity: str, project: str) -> Any:
    """Return a workspace of `wandb_workspaces`: all layers of a metric in one chart, and its picture over the steps."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of its own use of pydantic
            import wandb_workspaces.reports.v2 as wr
            import wandb_workspaces.workspaces as ws
    except ImportError as error:
        raise InputError("wandb_workspaces is not installed: pip install 'lit_layers[wandb]'") from error
    root = Path(root)
    measured = [m for m in latest(records.read(root / "measurements.jsonl")) if m.error is None and m.step is not None]
    if not measured:
        raise InputError(f"{root}: nothing was measured at a step there, so a workspace would have no charts")
    look: dict[str, Any] = {"x": logged_numbers.AXIS, "title_x": "Optimizer step", "log_x": True}
    rows = records.rows(root / "metrics.jsonl")
    scalars = dict.fromkeys(name for row in rows for name in row if name not in ("step", "tokens"))
    shown: dict[str, list[Any]] = {"Training": [wr.LinePlot(title=name, y=[name], **look) for name in scalars]}
    curves, plain = dict[str, tuple[str, str, dict[int | None, str]]](), plain_settings(measured)
    for m in measured:
        name = logged_name(m, plain)
        for point in logged_numbers.points_of(logged_numbers.plotted(m), name):
            curves.setdefault(point.base, (name, point.metric, {}))[2][point.layer] = point.name
    for base, (name, metric, of_layer) in curves.items():
        layers: list[Any] = spread(sorted(layer for layer in of_layer if layer is not None), _LINES)
        lines: list[Any] = [of_layer[layer] for layer in ([None] if None in of_layer else []) + layers]
        title = f"{look_up(metric).with_unit} {base.removeprefix(f'{name}/{metric}').strip('/')}".strip()
        log_y: dict[str, Any] = {"log_y": True} if look_up(metric).log else {}
        shown.setdefault(sentence(name), []).append(wr.LinePlot(title=title, y=lines, **look, **log_y))
    pictures = [*logged_numbers.surfaces_of(measured, plain)]
    gallery = [wr.MediaBrowser(title=key, media_keys=[key], num_columns=1, gallery_axis="step") for key in pictures]
    shown["Layers by steps"] = gallery
    shown["All numbers"] = [wr.WeavePanelSummaryTable(table_name=logged_numbers.TABLE)]
    sections = [ws.Section(name=title, is_open=True, panels=panels) for title, panels in shown.items() if panels]
    settings, name = ws.WorkspaceSettings(x_axis=logged_numbers.AXIS, max_runs=50), "Emergence, layer by layer"
    return ws.Workspace(entity=entity, project=project, name=name, sections=sections, settings=settings)
