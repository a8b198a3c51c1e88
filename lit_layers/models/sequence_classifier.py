"""An encoder with a new head for texts or pairs of texts: what is fine-tuned on a task."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lit_layers.errors import InputError
from lit_layers.models.families import Network, family_of, trunk_of
from lit_layers.models.plain import _quiet
from lit_layers.models.shard_files import refuse_shards_elsewhere

ENCODERS = ("bert", "roberta", "distilbert", "modernbert")  # families


def sequence_classifier(
    name: str | Path, num_outputs: int, *, seed: int = 0, revision: str | None = None
) -> tuple[Network, Network]:
    """A model of `AutoModelForSequenceClassification` with a head of `num_outputs`, and its trunk; on the CPU, in
    float32, in evaluation mode.

    The trunk's weights are those of the folder or Hub repository, whatever head it is saved with. What that has not got
    (the head, and BERT's pooler where the model was saved for masked words) is new, from `seed` alone; a head that is
    there and has as many outputs is taken. The global random state stays as it is.

    Raises:
        InputError: no such model, another family than BERT, RoBERTa, DistilBERT and ModernBERT, or weights that do not
            fill the trunk.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification

    if isinstance(name, Path) or str(name).startswith((".", "/", "~")) or os.path.isdir(name):
        name = os.fspath(Path(name).expanduser())
        if not os.path.isfile(os.path.join(name, "config.json")):
            raise InputError(f"model: expected a folder with an encoder, found no config.json in {name}")
    try:
        config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise InputError(f"model: cannot open {name}: {' '.join(str(error).split()).split('. ')[0]}") from error
    if config.model_type not in ENCODERS:
        raise InputError(
            f"model: expected an encoder ({', '.join(ENCODERS)}), {name} is of the type {config.model_type}"
        )
    refuse_shards_elsewhere(str(name), revision)
    options: dict[str, Any] = {"num_labels": num_outputs, "ignore_mismatched_sizes": True, "weights_only": True}
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), _quiet():
        torch.default_generator.manual_seed(seed)
        model, report = AutoModelForSequenceClassification.from_pretrained(
            name,
            revision=revision,
            dtype=torch.float32,
            trust_remote_code=False,
            output_loading_info=True,
            **options,
        )
    prefix = f"{model.base_model_prefix}."
    wrong = [*report["missing_keys"], *(key[0] if isinstance(key, tuple) else key for key in report["mismatched_keys"])]
    if lost := sorted(key for key in wrong if key.startswith(prefix) and ".pooler." not in key):
        raise InputError(f"model: the weights of {name} do not fill its trunk: {', '.join(lost[:3])} are not there")
    trunk = trunk_of(model)
    family_of(trunk)
    return model.eval(), trunk


def classifier_parameters(model: Network, trunk: nn.Module) -> list[nn.Parameter]:
    """The parameters that are not the trunk's."""
    of_trunk = {id(parameter) for parameter in trunk.parameters()}
    return [parameter for parameter in model.parameters() if id(parameter) not in of_trunk]
