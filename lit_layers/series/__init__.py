"""Series of checkpoints in folders or on the Hub, in the order of their steps, and the audit of a series."""

from lit_layers.series.audit_weights import Finding
from lit_layers.series.auditing import Audit, audit
from lit_layers.series.checkpoint import Checkpoint, Series
from lit_layers.series.local_series import LightningCheckpoints, StepFolders
from lit_layers.series.opening import HubRevisions, Models, OneModel, open_series

__all__ = [
    "Audit",
    "Checkpoint",
    "Finding",
    "HubRevisions",
    "LightningCheckpoints",
    "Models",
    "OneModel",
    "Series",
    "StepFolders",
    "audit",
    "open_series",
]
