"""What cutting a model saves: the whole beside its first blocks."""

from pathlib import Path
from typing import Any

from lit_layers.models.costs import Cost, measure_costs
from lit_layers.models.plain import has_head


def compare_costs(whole: str | Path, cut: str | Path, *, layer: int, num_layers: int, **options: Any) -> list[Cost]:
    """Costs of a saved model as it is, of its trunk (without the head, where it has one), and of its first blocks.

    `whole` and `cut` are folders, of `num_layers` and `layer` blocks; `options` are those of `measure_costs`.
    """
    all_blocks, kept = f"all {num_layers} blocks", f"first {layer} blocks" if layer > 1 else "first block"
    if not has_head(whole):
        return measure_costs({all_blocks: whole, kept: cut}, trunks=[kept], **options)
    variants = {f"{all_blocks} and head": whole, all_blocks: whole, kept: cut}
    return measure_costs(variants, trunks=[all_blocks, kept], **options)
