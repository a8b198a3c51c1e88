"""What was found, as tables that read well in a terminal and on a page: Markdown."""

from collections.abc import Mapping, Sequence

from lit_layers.models.costs import Cost

KB, MB, GB = 1e3, 1e6, 1e9


def score_table(scores: Mapping[int, float], metric: str, *, chosen: int) -> str:
    """A row for each layer with its score; the chosen one is marked."""
    rows = [
        (str(layer), f"{score:.4f}", "chosen" if layer == chosen else "") for layer, score in sorted(scores.items())
    ]
    return markdown(("layer", metric, ""), rows)


def cost_table(costs: Sequence[Cost]) -> str:
    """A row for each model, with its share of the first one's costs."""
    rows = [_row(cost, costs[0]) for cost in costs]
    thing = "text" if costs[0].num_tokens is not None else "image"
    header = ("model", "parameters", "on disk", "peak memory", f"one {thing}", "quartiles", f"{thing}s a second")
    return markdown(header, rows)


def measured_on(costs: Sequence[Cost]) -> str:
    """A sentence on how the costs were measured."""
    cost, machine = costs[0], costs[0].machine
    thing = "texts" if cost.num_tokens is not None else "images"
    length = f" of {cost.num_tokens} tokens" if cost.num_tokens is not None else ""
    return (
        f"Medians of {cost.num_rounds} rounds in which the models took turns, {thing}{length}, one alone or in batches "
        f"of {cost.batch_size}, on {machine.processor} ({_threads(machine.num_threads)}, {machine.system}, torch "
        f"{machine.torch}); peak memory is that of opening the model and running one batch, without the libraries."
    )


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose columns stand under each other, the first to the left and the others to the right."""
    cells = [[_escaped(cell) for cell in row] for row in (header, *rows)]
    widths = [max(3, *(len(row[column]) for row in cells)) for column in range(len(header))]
    rule = [("-" * (width - 1) + ":") if column else "-" * width for column, width in enumerate(widths)]
    lines = [
        [cell.rjust(width) if column else cell.ljust(width) for column, (cell, width) in enumerate(pairs)]
        for pairs in (list(zip(row, widths, strict=True)) for row in (cells[0], rule, *cells[1:]))
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _row(cost: Cost, first: Cost) -> tuple[str, ...]:
    low, high = cost.latency_quartiles
    return (
        cost.name,
        f"{cost.parameters:,}{_share(cost.parameters, first.parameters)}",
        f"{_bytes(cost.bytes_on_disk)}{_share(cost.bytes_on_disk, first.bytes_on_disk)}",
        f"{_bytes(cost.peak_memory)}{_share(cost.peak_memory, first.peak_memory)}",
        f"{cost.latency * 1e3:.3g} ms{_share(cost.latency, first.latency)}",
        f"{low * 1e3:.3g} to {high * 1e3:.3g} ms",
        f"{cost.throughput:.3g}{_share(cost.throughput, first.throughput)}",
    )


def _share(value: float, of: float) -> str:
    return f" ({value / of:.0%})" if of > 0 else ""


def _bytes(count: int) -> str:
    unit, name = (GB, "GB") if count >= GB else (MB, "MB") if count >= MB else (KB, "kB")
    return f"{count / unit:.3g} {name}"


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def _escaped(cell: str) -> str:
    return " ".join(cell.split()).replace("|", "\\|")
