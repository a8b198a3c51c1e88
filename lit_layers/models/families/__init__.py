"""How models are taken apart: by a row for each known family (`rows`), others by structure and proof (`structure`)."""

from lit_layers.models.families.rows import (
    FAMILIES,
    Family,
    Network,
    causal_by_flag,
    class_named,
    propose_blocks,
    short_length,
    side_length,
    text_config,
    trunk_of,
)
from lit_layers.models.families.structure import family_of

__all__ = [
    "FAMILIES",
    "Family",
    "Network",
    "causal_by_flag",
    "class_named",
    "family_of",
    "propose_blocks",
    "short_length",
    "side_length",
    "text_config",
    "trunk_of",
]
