"""Lightning modules, data modules, and callbacks that save and measure a run."""

from lit_layers.training.callbacks import EmergenceCallback, SeriesCheckpoint
from lit_layers.training.datamodules import LitImageData, LitTextData
from lit_layers.training.image_classifier import LitImageClassifier
from lit_layers.training.modules import LitCausalLM

__all__ = [
    "EmergenceCallback",
    "LitCausalLM",
    "LitImageClassifier",
    "LitImageData",
    "LitTextData",
    "SeriesCheckpoint",
]
