"""Checkpoint series: from folders or the Hub, in step order, audited before a curve is drawn through them."""

from lit_layers.series.auditing import Audit, audit
from lit_layers.series.checkpoint import Checkpoint, Series
from lit_layers.series.findings import Finding
from lit_layers.series.hub import HubRevisions
from lit_layers.series.lightning_files import LightningCheckpoints
from lit_layers.series.local import StepFolders
from lit_layers.series.opening import open_series, read_steps
from lit_layers.series.pretrained import Models, OneModel
from lit_layers.series.retrying import Retry

__all__ = [
    "Audit",
    "Checkpoint",
    "Finding",
    "HubRevisions",
    "LightningCheckpoints",
    "Models",
    "OneModel",
    "Retry",
    "Series",
    "StepFolders",
    "audit",
    "open_series",
    "read_steps",
]
