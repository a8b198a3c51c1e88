"""A mirror of a run's numbers at W&B. The files of the run stay the truth: what the mirror lacks, it gets from them."""

import configparser
import contextlib
import json
import logging
import os
import queue
import shlex
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal

from lit_layers import records
from lit_layers.errors import InputError, first_line, refused
from lit_layers.figures.tables import grouped
from lit_layers.identity import latest, logged_name, plain_settings
from lit_layers.records import Measurement
from lit_layers.report.logged_numbers import (
    AXIS,
    SURFACE,
    TABLE,
    Scalars,
    are_maps_due,
    best_of,
    heat_maps,
    images_of,
    layer_maps,
    of_the_whole_run,
    plotted,
    values_of,
)

try:
    import fcntl
except ImportError:  # Windows: two processes that mirror one run at once are the user's care there
    fcntl = None

logger = logging.getLogger(__name__)
NOTES = "lit_layers_sent.jsonl"  # beside W&B's own file of a run: the rows that were sent, in order
_CLOSING = 5.0  # seconds
LAG = 10.0  # seconds: what W&B had received earlier is in its file, which it writes from a queue
_SETTLED = 3.0  # seconds: W&B's own process outlives a killed one by up to two, and writes what it had received
_STEPS = 10_000  # that wait at most: W&B does not keep up then, and the files have them all
_LIMIT_AFTER_SIGTERM, _TERMINATED = 15.0, 143
_SERVER = "https://api.wandb.ai"  # which `wandb init` writes down, too
_NAMES = {"entity", "project", "base_url", "disabled", "mode", "anonymous"}  # settings that reach no address
abandoned: "list[MirrorAside]" = []  # W&B's own end may wait for ever for theirs


class Sent:
    """The points of one run that W&B has: the names sent at each step, and the last row's number."""

    def __init__(self) -> None:
        self.names: dict[int | None, frozenset[str]] = {}
        self.last_row = -1
        self.is_closed = False  # the last file has the end of a run
        self._shared: dict[frozenset[str], frozenset[str]] = {}

    def add(self, step: int | None, names: Iterable[str]) -> None:
        # Most steps hold the same names: one set serves them all, or a long run would need gigabytes.
        joined = self.names.get(step, frozenset()).union(names)
        self.names[step] = self._shared.setdefault(joined, joined)

    def read(self, file: Path, before: int | None = None) -> None:
        """Add what was noted beside a file of W&B; with `before` only rows of lower numbers."""
        notes, rows = file.with_name(NOTES), list[dict[str, Any]]()
        for line in notes.read_text(encoding="utf-8").splitlines() if notes.exists() else ():
            with contextlib.suppress(ValueError):  # torn
                rows.append(json.loads(line))
        self.is_closed = bool(rows) and "is_closed" in rows[-1]
        rows = [row for row in rows if "row" in row]
        if before is None and rows and not self.is_closed:
            # Killed: rows sent up to a lag before W&B last wrote its file may be missing there. They are sent again,
            # under new numbers: W&B's own step never falls.
            self.last_row = max(self.last_row, rows[-1]["row"])
            latest_sure = rows[-1]["at"] - _seconds_behind(file, notes) - LAG
            rows = [row for row in rows if row["at"] <= latest_sure]
        for row in rows:
            if before is None or row["row"] < before:
                self.add(row["step"], row["names"])
                self.last_row = max(self.last_row, row["row"])


def _seconds_behind(file: Path, notes: Path) -> float:
    """Return by how much W&B's file is older than the notes, once W&B's own process has had time to write it."""
    deadline = time.monotonic() + _SETTLED
    while (behind := notes.stat().st_mtime - file.stat().st_mtime) > 0 and time.monotonic() < deadline:
        time.sleep(0.1)
    return max(behind, 0.0)


class WandbMirror:
    """Show a run's scalars and measurements at W&B; a row sent shortly before a kill may be sent twice, unchanged.

    A point is a name at a step. `open` finds out which points W&B has (from what the mirror noted as it sent them, and
    from the server's count of rows) and sends those that `metrics.jsonl` and `measurements.jsonl` hold beyond them;
    `log_step` sends what is new. Each name has `trainer/global_step` as its axis, each row the tokens as a second one.

    The rule of order: write to the files first, then call `log_step` once for each step, in ascending order, when
    nothing more will come for it. Points that come late, or twice, are still sent once; but only rows in this order
    can be told from those that the server got in the seconds before a whole machine went down.

    Nothing is drawn for pairs of layers one by one: they are heat maps, and rows of the table at the end. Numbers of
    other settings than an analysis was first measured with have names of their own, `coupling@1a2b3c4d/...`.

    Args:
        project: the project at W&B.
        mode: auto: online where there is an API key and the server answers, else offline, said in one line; online:
            refuse to start otherwise; offline; disabled. The variable WANDB_MODE decides where mode is auto.
        entity: the team or user; None: the key's own.
        name: the run's name at W&B; None: that of its folder.
        init_timeout: seconds to wait for the server.
        timeout: seconds that a training waits for W&B at its start and at its end; between them it does not wait.
        scalars: plotted: one variant of each metric is a curve, without diagnostics; all: everything but pairs of
            layers.
    """

    def __init__(
        self,
        project: str = "lit_layers",
        mode: Literal["auto", "online", "offline", "disabled"] = "auto",
        *,
        entity: str | None = None,
        name: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        init_timeout: float = 8.0,
        timeout: float = 60.0,
        scalars: Scalars = "plotted",
    ) -> None:
        self.scalars: Scalars = scalars
        self.mode, self.init_timeout, self.timeout = mode, init_timeout, timeout
        self.place = {"project": project, "entity": entity, "group": group, "tags": tuple(tags), "name": name}
        self._message = ""
        self._run: Any = None
        self._wandb: Any = None
        self._sent = Sent()
        self._notes: IO[str] | None = None
        self._defined: set[str] = set()
        self._steps = set[int]()  # that were measured
        self._table_is_due = False
        self._plain: dict[tuple[str, str], str] = {}
        self._lock: IO[str] | None = None

    def open(self, root: str | Path, *, run_id: str, config: Mapping[str, Any], **options: bool) -> None:
        """Start or resumes the run and sends what W&B does not have of it yet: `start`, then `catch_up`."""
        self.start(root, run_id=run_id, config=config, **options)
        self.catch_up()

    def start(
        self,
        root: str | Path,
        *,
        run_id: str,
        config: Mapping[str, Any],
        allow_suspect: bool = False,
    ) -> None:
        """Start or resume the run.

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
        self._wandb, self._errors = wandb, (wandb.Error, OSError)
        if mode == "auto" and not _has_credentials(wandb):
            logger.warning("W&B: no API key, so the run is mirrored offline")
            mode = "offline"
        if mode != "offline":
            refuse_settings_of_folder()
        if not self._take_lock():
            self._say(f"W&B: another process mirrors {self.root} already, so this one does not")
            return
        self._files = run_files(self.root, run_id)
        self._start(mode, run_id, dict(config))

    def catch_up(self) -> None:
        """Send what W&B does not have of the run's files.

        Raises:
            InputError: where one of them is corrupt.
        """
        if self._run is None:
            return
        online = self._run.settings.mode != "offline"
        # What a crash kept from the server is sent again; what only the server has is known by its number alone.
        self._server_rows = (self._run.starting_step or 0) if online else 0
        files = [file for file in self._files if not online or _is_online(file)]
        self._sent, self._plain = Sent(), plain_settings(records.read(self.root / "measurements.jsonl"))
        for file in files:
            self._sent.read(file, before=self._server_rows if online else None)
        self._notes = (Path(self._run.dir).parent / NOTES).open("a", buffering=1, encoding="utf-8")
        for step, tokens, scalars, measurements in self._on_disk():
            self.log_step(step, tokens, scalars, measurements)

    def log_step(
        self, step: int, tokens: int | None, scalars: Mapping[str, float], measurements: Sequence[Measurement]
    ) -> None:
        """Send the points of one closed step that W&B does not have; see the class for the order."""
        if self._run is None:
            return
        new, pictures = self._new(step, scalars, measurements)
        new |= images_of(self._wandb, pictures)
        if new:
            self._table_is_due |= any(measurement.error is None for measurement in measurements)
            self._send(step, new | ({} if tokens is None else {"tokens": tokens}))

    def finish(self, exit_code: int = 0) -> None:
        """Close the run, with the table of all numbers where it ended well; `log_step` does nothing from here on."""
        if self._run is not None and exit_code == 0:  # one that was cut short is gone on with, and sends it at its end
            self._log_table()
        if self._run is None:  # to begin with, or given up over the table
            return
        try:
            self._run.finish(exit_code=exit_code)
        except self._errors as error:
            self.give_up(first_line(error))
        else:
            self._note(is_closed=True)
            self._stop()

    @property
    def num_rows(self) -> int:
        """Rows sent so far, in this and earlier processes."""
        return self._sent.last_row + 1

    def closing_line(self) -> str:
        """Return where to look: the run's address, or how to upload an offline run, and how to get its workspace."""
        return self._message

    # ------------------------------------------------------------------------------------------- start

    def _start(self, mode: str, run_id: str, config: dict[str, Any]) -> None:
        """Set the run, or leaves it None and says why."""
        # Tables and figures are staged before they are logged: inside the run's folder, not in the user's home.
        os.environ["WANDB_DATA_DIR"] = str(self.root.resolve() / "wandb")
        for each in ("online", "offline") if mode in ("auto", "online") else ("offline",):
            try:
                self._run = self._init(each, run_id, config)
                break
            except self._errors as error:
                why = first_line(error)
                if mode == "online":
                    self._stop()
                    raise InputError(f"wandb.mode online: W&B cannot be reached ({why}); try auto") from error
                if each == "offline":
                    self._stop()
                    self._say(f"W&B: cannot start ({why}), so nothing is mirrored; {self._adds_later()}")
                    return
                logger.warning("W&B: cannot be reached (%s), so the run is mirrored offline", why)
                if self._wandb.run is None:
                    self._wandb.teardown()  # its service still holds the id of the run that did not start
            except ValueError as error:  # of its settings, e.g. a variable WANDB_... that it does not understand
                self._stop()
                raise InputError(f"wandb: {' '.join(str(error).split())}") from error
        online = self._run.settings.mode != "offline"
        self._message = f"W&B          {self._run.url}" if online else self._where_offline(self._run.id)
        place = f"{self._run.entity or 'ENTITY'}/{self.place['project']}"
        self._message += f"\nworkspace    lit-layers report {shlex.quote(str(self.root))} --workspace {place}"

    def _init(self, mode: str, run_id: str, config: dict[str, Any]) -> Any:
        settings = {"console": "off", "silent": True, "reinit": "create_new", "init_timeout": self.init_timeout}
        if "x_transaction_log_flush_interval" in self._wandb.Settings.model_fields:
            settings["x_transaction_log_flush_interval"] = 1  # seconds that a kill may cost the mirror; 15 by default
        options = {
            **self.place,
            "name": self.place["name"] or self.root.resolve().name,
            "config": config,
            "mode": mode,
            "dir": str(self.root.resolve()),
            "id": run_id,
            "resume": "allow",
            "settings": self._wandb.Settings(**settings),
        }
        deadline = time.monotonic() + _CLOSING
        while True:
            try:
                return self._wandb.init(**options)
            except self._errors as error:
                # W&B's own process may still be closing the run that this one resumes.
                if "in use" not in str(error) or time.monotonic() > deadline:
                    raise
            time.sleep(0.2)

    def _take_lock(self) -> bool:
        """Two mirrors of one run would double its points; the system frees the lock of a killed process."""
        folder = self.root / "wandb"
        with refused(f"cannot write {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = open(folder / ".mirror.lock", "a")  # noqa: SIM115
        if fcntl is not None:
            try:
                # Unlike flock, not shared with forked children, which may outlive a killed parent.
                fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                self._lock.close()
                self._lock = None
        return self._lock is not None

    # ------------------------------------------------------------------------------------------- points

    def _on_disk(self) -> Iterator[tuple[int, int | None, dict[str, float], list[Measurement]]]:
        """Yield all that the run's files hold, step by step."""
        measured = grouped((m for m in self._measured() if m.step is not None), lambda m: m.step)
        rows = grouped(records.rows(self.root / "metrics.jsonl"), lambda row: int(row["step"]))
        for step in sorted(measured.keys() | rows.keys()):
            measurements = measured.get(step, [])
            scalars: dict[str, Any] = {name: value for row in rows.get(step, ()) for name, value in row.items()}
            tokens = scalars.pop("tokens", next((m.tokens for m in measurements if m.tokens is not None), None))
            scalars.pop("step", None)
            yield step, None if tokens is None else int(tokens), scalars, measurements

    def _new(
        self, step: int, scalars: Mapping[str, float], measurements: Sequence[Measurement]
    ) -> tuple[dict[str, Any], dict[str, bytes]]:
        """The numbers and pictures of one step that W&B does not have."""
        row, pictures = dict(scalars), {}
        sent = self._sent.names.get(step, frozenset())
        measured = [measurement for measurement in measurements if measurement.error is None]
        for measurement in measured:
            name = logged_name(measurement, self._plain)
            shown = measurement if self.scalars == "all" else plotted(measurement)
            row.update(values_of(shown, name))
            pictures.update(heat_maps(shown, name, sent))
        if measured and step not in self._steps:
            self._steps.add(step)
            if are_maps_due(len(self._steps)) and not any(name.endswith(SURFACE) for name in sent):
                pictures.update(layer_maps(self._measured(), self._plain, step))
        return {name: value for name, value in row.items() if name not in sent}, pictures

    def _measured(self) -> list[Measurement]:
        measurements = latest(records.read(self.root / "measurements.jsonl"))
        return [m for m in measurements if self._allow_suspect or not records.is_suspect(m)]

    def _send(self, step: int | None, row: dict[str, Any]) -> None:
        """Log one row under the next number; one that the server has already is only noted."""
        number = self._sent.last_row + 1
        self._sent.last_row = number
        self._sent.add(step, set(row))
        if number < self._server_rows:
            return
        try:
            if not self._defined:
                self._run.define_metric(AXIS)
                self._defined |= {AXIS, TABLE}
            for name in row.keys() - self._defined:  # by exact name: competing globs are resolved in random order
                self._run.define_metric(name, step_metric=AXIS, summary=best_of(name))
            self._defined |= row.keys()
            axis = {} if step is None else {AXIS: step}
            self._run.log({**row, **axis}, step=number, commit=True)
        except self._errors as error:
            self.give_up(first_line(error))
        else:  # afterwards: a row that was sent and not noted is sent twice, the other way round it would be lost
            self._note(row=number, step=step, names=[*row], at=time.time())

    def _note(self, **line: Any) -> None:
        if self._notes is not None:
            self._notes.write(json.dumps(line) + "\n")

    def _log_table(self) -> None:
        """The long form of all measurements, once they are complete, with maps over layers."""
        if not self._table_is_due and TABLE in self._sent.names.get(None, frozenset()):
            return
        if row := of_the_whole_run(self._wandb, self._measured(), self._plain):
            self._send(None, row)

    # ------------------------------------------------------------------------------------------- words

    def _where_offline(self, run_id: str) -> str:
        folders = [file.parent for file in run_files(self.root, run_id) if file.parent.name.startswith("offline-")]
        return f"W&B          offline; upload it with: wandb sync {' '.join(shlex.quote(str(f)) for f in folders)}"

    def _adds_later(self) -> str:
        return f"`lit-layers report {shlex.quote(str(self.root))} --wandb` adds what is missing later"

    def give_up(self, reason: str) -> str:
        """Send nothing more, and returns the sentence that says so."""
        self._say(f"W&B: stopped ({reason}); the run goes on, {self._adds_later()}")
        self._stop()
        return self._message

    def _say(self, sentence: str) -> None:
        self._message = sentence
        logger.warning("%s", sentence)

    def _stop(self) -> None:
        self._run = None
        for file in filter(None, (self._lock, self._notes)):
            file.close()
        self._lock = self._notes = None


def run_files(root: Path, run_id: str) -> list[Path]:
    """Return the files that hold the run's records, oldest first.

    Of one run begun twice in a second W&B numbers the folders: `run-20261127_110659-ID`, then `...-ID-1`.
    """
    files = root.glob(f"wandb/*run-*-{run_id}*/run-{run_id}.wandb")
    names = {file: file.parent.name.removeprefix("offline-") for file in files}
    return sorted(names, key=lambda file: (names[file].split("-")[1], len(names[file]), names[file]))


def _is_online(file: Path) -> bool:
    """Return whether the rows of a local file went to the server: at once, or by `wandb sync`, which leaves a mark."""
    return not file.parent.name.startswith("offline-") or file.with_name(f"{file.name}.synced").exists()


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
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    settings = wandb.setup().settings
    if settings.api_key:
        return True
    from requests.utils import get_netrc_auth  # which wandb needs, too

    return get_netrc_auth(settings.base_url) is not None


class MirrorAside:
    """Hand the calls of a mirror to a thread, in order, and waits for the first and the last one only.

    A mirror that raises, falls behind, or makes no call within its `timeout` is given up with one sentence: what it
    lacks is in the run's files.
    """

    def __init__(self, mirror: WandbMirror) -> None:
        self.mirror = mirror
        self._calls: queue.Queue[tuple[Callable[[], None], threading.Event] | None] = queue.Queue(_STEPS)
        self._is_off, self._last_words = False, ""

    def open(self, root: str | Path, *, run_id: str, config: Mapping[str, Any]) -> None:
        """Start the mirror; what W&B lacks of the run is sent meanwhile.

        Raises:
            InputError: what the mirror refuses to start with.
        """
        refusals = list[InputError]()

        def start() -> None:
            try:
                self.mirror.start(root, run_id=run_id, config=config)
            except InputError as error:
                self._is_off = True
                refusals.append(error)

        self.mirror.root = Path(root)
        threading.Thread(target=self._work, name="wandb", daemon=True).start()
        self._later(start, self.mirror.timeout)
        if refusals:
            raise refusals[0]
        self._later(self.mirror.catch_up)

    def log_step(
        self, step: int, tokens: int | None, scalars: Mapping[str, float], measurements: Sequence[Measurement]
    ) -> None:
        """Return at once."""
        values, measured = dict(scalars), list(measurements)
        self._later(lambda: self.mirror.log_step(step, tokens, values, measured))

    def finish(self, exit_code: int = 0) -> None:
        """Return when all is sent, or when nothing more was within the limit."""
        limit, is_killed = self.mirror.timeout, exit_code == _TERMINATED
        limit = min(limit, _LIMIT_AFTER_SIGTERM) if is_killed else limit
        self._later(lambda: self.mirror.finish(exit_code), limit, renewed=not is_killed)
        self._end()

    def closing_line(self) -> str:
        return self._last_words or self.mirror.closing_line()

    def _later(self, call: Callable[[], None], limit: float | None = None, *, renewed: bool = False) -> None:
        """Queue a call. Wait until it is done if there is a limit, which each row may renew."""
        done, seen = threading.Event(), -1
        if self._is_off:
            return
        try:
            self._calls.put_nowait((call, done))
        except queue.Full:
            self._give_up("it does not keep up")
        else:
            while limit is not None and not done.wait(limit):
                before, seen = seen, self.mirror.num_rows
                if not renewed or seen == before:
                    self._give_up(f"no answer within {limit:.0f} s")
                    break

    def _end(self) -> None:
        """End the thread, once it has made the calls that wait."""
        with contextlib.suppress(queue.Full):
            self._calls.put_nowait(None)

    def _work(self) -> None:
        for call, done in iter(self._calls.get, None):
            try:
                if not self._is_off:
                    call()
            except BaseException as error:  # whatever it is: no training ends for it
                if not self._is_off:
                    self._give_up(first_line(error))
            finally:
                done.set()

    def _give_up(self, reason: str) -> None:
        """No call is made from here on, and what waits for one goes on."""
        self._is_off = True
        abandoned.append(self)
        try:
            self._last_words = self.mirror.give_up(reason)
        finally:  # last: who waits asks for these words
            with contextlib.suppress(queue.Empty):
                while (waiting := self._calls.get_nowait()) is not None:
                    waiting[1].set()
                self._end()
