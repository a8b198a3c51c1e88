"""Shared code of all benchmarks: rounds, ratios with quartiles, files of results, and the tables of the docs.

A benchmark runs the ways that it compares in turn, for at least five rounds, and passes one `Row` per ratio to
`finish`. `finish` prints the rows. With `--save` it writes them to results/NAME.json, one run for each machine and
command.

    python benchmarks/rounds.py            writes the tables of the docs from results/*.json
    python benchmarks/rounds.py --check    exits with 1 if they differ
"""

import argparse
import json
import os
import platform
import re
import shlex
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PAGES = ("docs/performance.md", "docs/emergence_accuracy.md", "benchmarks/README.md")
DOCS = tuple(Path(__file__).parents[1] / name for name in PAGES)
# Each variable makes BLAS or torch use other kernels than the processor's best, which can slow one side of a
# comparison.
PINS = ("ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "OPENBLAS_CORETYPE")
LEAST_ROUNDS = 5  # quartiles of fewer rounds are meaningless
# `results` inserts the whole table of a benchmark. `medians` inserts only the medians: the text of a row before its
# last colon names the line, the text after it the column.
TABLE = re.compile(
    r"(?P<mark><!-- (?P<form>results|medians): (?P<name>\w+) -->\n).*?(?P<end>\n<!-- end of results -->)", re.DOTALL
)


@dataclass(frozen=True)
class Row:
    """One ratio, or another number, with a value from each round.

    Attributes:
        what: what is compared, the first cell of the table.
        values: one value per round.
        target: the wanted median, if there is a target.
        at_most: whether the target is an upper bound instead of a lower bound.
        others: further cells, by the title of their column.
        unit: text after the number; empty for ratios.
    """

    what: str
    values: list[float]
    target: float | None = None
    at_most: bool = False
    others: dict[str, str] = field(default_factory=dict)
    unit: str = ""

    @property
    def quartiles(self) -> tuple[float, float, float]:
        if len(self.values) == 1:
            return self.values[0], self.values[0], self.values[0]
        low, middle, high = statistics.quantiles(self.values, method="inclusive")
        return low, middle, high

    @property
    def missed(self) -> bool:
        if self.target is None:
            return False
        middle = self.quartiles[1]
        return middle > self.target if self.at_most else middle < self.target

    def cells(self) -> dict[str, str]:
        low, middle, high = map(_digits, self.quartiles)
        spread = f" ({low}-{high})" if len(self.values) > 1 else ""
        wanted = "" if self.target is None else f"{'at most' if self.at_most else 'at least'} {_digits(self.target)}"
        verdict = f"{wanted}: **missed**" if self.missed else wanted
        return {
            "": self.what,
            **self.others,
            "median (quartiles)": f"**{middle}**{self.unit}{spread}",
            "wanted": verdict,
        }


def ratios(numerators: Iterable[float], denominators: Iterable[float]) -> list[float]:
    """Return one ratio per round, because both sides of a round ran on the machine at about the same time."""
    return [one / other for one, other in zip(numerators, denominators, strict=True)]


def add_options(parser: argparse.ArgumentParser, *, rounds: int = 5) -> None:
    """Add the options of all benchmarks."""
    parser.add_argument("--rounds", type=int, default=rounds, help=f"number of timed rounds (default: {rounds})")
    parser.add_argument("--save", action="store_true", help="save the result in benchmarks/results")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")


def finish(
    name: str,
    rows: Sequence[Row],
    options: argparse.Namespace,
    *,
    device: str = "cpu",
    least_rounds: int = LEAST_ROUNDS,
) -> int:
    """Print the table of a run, save it with `--save`, and return the exit code.

    `least_rounds` is the fewest rounds that may be saved: 1 if the numbers are the same in every round.
    """
    run = {"command": command(), "machine": machine(device), "rows": [asdict(row) for row in rows]}
    print(f"\n{_machine_line(run['machine'])}\n{table(rows)}")
    if options.save:
        if min(len(row.values) for row in rows) < least_rounds:
            raise SystemExit(f"a saved result needs at least {least_rounds} rounds: nothing was saved")
        path = RESULTS / f"{name}.json"
        runs = json.loads(path.read_text())["runs"] if path.exists() else []
        same = [run["command"], run["machine"]["processor"]]
        runs = [each for each in runs if [each["command"], each["machine"]["processor"]] != same]
        RESULTS.mkdir(exist_ok=True)
        path.write_text(json.dumps({"runs": [*runs, run]}, indent=1) + "\n")
        print(f"saved in {path}; python benchmarks/rounds.py updates the tables of the docs")
    for row in rows:
        if row.missed:
            print(f"MISSED: {row.what}: {_digits(row.quartiles[1])}, wanted {row.cells()['wanted']}".replace("*", ""))
    return int(options.check and any(row.missed for row in rows))


def command() -> str:
    """Return the command line without `--save` and `--check`, with "DATA" for each local path."""
    words = [word for word in sys.argv[1:] if word not in ("--save", "--check")]
    # The path of a data folder is private.
    places = [os.path.sep in word and Path(word).exists() for word in words]
    shown = ["DATA" if place else shlex.quote(word) for word, place in zip(words, places, strict=True)]
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *shown])


def clock(device: str | Any = "cpu") -> float:
    """Return process seconds for a CPU, so that other work does not count, or wall seconds once the GPU is idle."""
    if not str(device).startswith("cuda"):
        return time.process_time()
    import torch

    torch.cuda.synchronize()
    return time.perf_counter()


def machine(device: str = "cpu") -> dict[str, Any]:
    """Return processor, threads, versions, and the BLAS kernels of torch and of numpy and scipy."""
    import torch
    from threadpoolctl import threadpool_info

    pools = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
    mkl = re.search(r"Math Kernel Library Version ([\d.]+)", torch.__config__.show())
    kernels = [f"torch {torch.backends.cpu.get_cpu_capability()}{f', MKL {mkl[1]}' if mkl else ''}"]
    kernels += sorted({f"{pool['internal_api']} {pool['version']} {pool.get('architecture', '')}" for pool in pools})
    return {
        "processor": torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else _cpu(),
        "num_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "kernels": kernels,
        "pinned": {name: os.environ[name] for name in PINS if name in os.environ},
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def table(rows: Sequence[Row]) -> str:
    """Return a Markdown table without columns that are empty in all rows."""
    lines = [row.cells() for row in rows]
    columns = list(dict.fromkeys(column for line in lines for column in line))
    columns = [column for column in columns if any(line.get(column) for line in lines)]
    return _markdown([columns, *([line.get(column, "") for column in columns] for line in lines)])


def _markdown(cells: Sequence[Sequence[str]]) -> str:
    head, *rows = ("| " + " | ".join(row).replace("|  |", "| |") + " |" for row in cells)
    return "\n".join([head, "|---" * len(cells[0]) + "|", *rows])


def section(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the results of a benchmark for the docs: each command with its machine, its rounds and its table."""
    parts = []
    for run in runs:
        rows = [Row(**row) for row in run["rows"]]
        counts = sorted({len(row.values) for row in rows})
        rounds = f"{' to '.join(map(str, counts))} rounds" if counts != [1] else "one round"
        parts.append(f"`{run['command']}`, {_short_machine_line(run['machine'])}, {rounds}:\n\n{table(rows)}")
    return "\n\n".join(parts)


def _short_machine_line(machine: Mapping[str, Any]) -> str:
    """Name processor, threads, torch and its kernels; the file of results has all versions."""
    kernels = machine["kernels"][0].partition(",")[0].removeprefix("torch ")
    short = {**machine, "torch": machine["torch"].partition("+")[0], "kernels": [kernels]}
    return _machine_line(short)


def medians(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the medians of a benchmark for the docs. The row `CASE: WHAT` fills line CASE and column WHAT."""
    lines: dict[str, dict[str, str]] = {}
    wanted: dict[str, set[str]] = {}
    for row in (Row(**row) for run in runs for row in run["rows"]):
        case, _, what = row.what.rpartition(": ")
        lines.setdefault(case, {})[what] = _digits(row.quartiles[1]) + " (**missed**)" * row.missed
        wanted.setdefault(what, set()).add(row.cells()["wanted"].partition(":")[0])
    heads = {
        what: f"{what} ({''.join(found)})" if len(found) == 1 and found != {""} else what
        for what, found in wanted.items()
    }
    rows = [[case, *(line.get(what, "") for what in wanted)] for case, line in lines.items()]
    commands = ", ".join(f"`{run['command']}`" for run in runs)
    return f"{commands}:\n\n{_markdown([['median share', *heads.values()], *rows])}"


def fill_tables(*texts: str) -> list[str]:
    """Return the pages with the tables of all results after their markers.

    Raises:
        ValueError: a marker without results, or results without a marker.
    """
    names = [found["name"] for text in texts for found in TABLE.finditer(text)]
    files = [path.stem for path in sorted(RESULTS.glob("*.json"))]
    if sorted(names) != files:
        raise ValueError(f"the pages have markers for {sorted(names)}, but there are results for {files}")

    def filled(place: re.Match[str]) -> str:
        runs = json.loads((RESULTS / f"{place['name']}.json").read_text())["runs"]
        made = section(runs) if place["form"] == "results" else medians(runs)
        return f"{place['mark']}\n{made}\n{place['end']}"

    return [TABLE.sub(filled, text) for text in texts]


def _machine_line(machine: Mapping[str, Any]) -> str:
    threads = f"{machine['num_threads']} thread{'s' if machine['num_threads'] > 1 else ''}"
    pinned = [f"{name}={value}" for name, value in machine["pinned"].items()]
    return ", ".join([machine["processor"], threads, f"torch {machine['torch']}", *machine["kernels"], *pinned])


def _digits(value: float) -> str:
    """Format with three digits: rounds do not agree on more."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    before = [page.read_text() for page in DOCS]
    after = fill_tables(*before)
    if parser.parse_args().check:
        return int(before != after)
    for page, text in zip(DOCS, after, strict=True):
        page.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
