"""What a run tells: one self-contained HTML page, and a mirror of its numbers at W&B."""

from lit_layers.report.html import write_report
from lit_layers.report.wandb_aside import MirrorAside
from lit_layers.report.wandb_mirror import WandbMirror

__all__ = ["MirrorAside", "WandbMirror", "write_report"]
