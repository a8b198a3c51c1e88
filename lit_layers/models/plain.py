"""A saved model opened as anybody opens it, without this package, or as an encoder with a new head for a task."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from lit_layers.errors import InputError
from lit_layers.models.families import Network, family_of, trunk_of
from lit_layers.models.shard_files import refuse_shards_elsewhere

# Tried in this order for the class that a config.json names.
_AUTO = (
    "AutoModel",
    "AutoModelForCausalLM",
    "AutoModelForMaskedLM",
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
    "AutoModelForImageClassification",
    "AutoModelForPreTraining",
)


def open_plainly(
    folder: str | Path, *, head: bool = True, attention: str | None = None, safetensors_only: bool = False
) -> nn.Module:
    """The model in a local folder, on the CPU, in evaluation mode and in the precision it is saved in.

    `AutoModel.from_pretrained`, or the Auto class with the head that its config.json names;
    `timm.create_model("local-dir:...")` for a timm model. With `head=False` the trunk alone is opened, whatever the
    folder holds. A pickle is read with `weights_only=True`, or not at all with `safetensors_only`; code of the folder
    is never run. The global random state is as before afterwards.

    Raises:
        InputError: no config.json there, or one that names no class an Auto class opens.
    """
    folder = Path(folder)
    if safetensors_only and not weight_files(folder, "safetensors"):
        raise InputError(f"expected weights in safetensors in {folder}, found none")
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), _quiet():
        if is_timm(settings := read_config(folder)):
            return _open_timm(folder, head).eval()
        options: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
        kind = _auto_class(folder, settings, head)
        refuse_shards_elsewhere(str(folder))
        return kind.from_pretrained(
            folder,
            trust_remote_code=False,
            weights_only=True,
            use_safetensors=True if safetensors_only else None,
            **options,
        ).eval()


def import_code_of(folder: str | Path, *, head: bool = True) -> None:
    """Imports all code that opening the folder needs; no weight is read and no memory taken for one."""
    folder = Path(folder)
    if is_timm(settings := read_config(folder)):
        import timm  # noqa: F401

        return
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    with torch.device("meta"), _quiet():
        _auto_class(folder, settings, head).from_config(config)


def has_head(folder: str | Path) -> bool:
    """Whether the model in a folder is more than a trunk."""
    folder = Path(folder)
    if is_timm(settings := read_config(folder)):
        return settings.get("num_classes", 0) > 0
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    mapping: Any = transformers.AutoModel._model_mapping
    trunk = mapping[type(config)].__name__
    return (settings.get("architectures") or [trunk])[0].lower() != trunk.lower()


def bytes_of_weights(folder: str | Path) -> int:
    """Size of the weight files in a folder: its safetensors, or else its pickles."""
    folder = Path(folder)
    files = weight_files(folder, "safetensors") or weight_files(folder, "bin")
    return sum(file.stat().st_size for file in files)


def weight_files(folder: Path, kind: Literal["safetensors", "bin"]) -> list[Path]:
    """The model's own: a probe beside it is none of them."""
    return list(folder.glob("model*.safetensors" if kind == "safetensors" else "pytorch_model*.bin"))


def read_config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    if not file.is_file():
        raise InputError(f"expected a model in {folder}, found no config.json there")
    return json.loads(file.read_text(encoding="utf-8"))


def is_timm(settings: dict[str, Any]) -> bool:
    return settings.get("model_type") in (None, "timm_wrapper") and "architecture" in settings


def _open_timm(folder: Path, head: bool) -> Network:
    import timm

    options: dict[str, Any] = {} if head else {"num_classes": 0}
    return timm.create_model(f"local-dir:{folder}", pretrained=True, **options)


def _auto_class(folder: Path, settings: dict[str, Any], head: bool) -> Any:
    import transformers

    named = (settings.get("architectures") or ["AutoModel"])[0].lower()
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    for auto in (getattr(transformers, name) for name in _AUTO):
        opens = auto._model_mapping.get(type(config), ())  # a class, or several
        names = {kind.__name__.lower() for kind in (opens if isinstance(opens, tuple) else (opens,))}
        if names and (not head or named in names | {"automodel"}):
            return auto
    raise InputError(f"no Auto class of transformers opens the {named} in {folder}: open it with its own class")


@contextmanager
def _quiet() -> Iterator[None]:
    """Neither a bar nor a report of the weights that a trunk has no use for."""
    from transformers.utils import logging

    os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "1")  # else a pickle starts a thread that asks the Hub
    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()


# An encoder with a new head for texts or pairs of texts: what is fine-tuned on a task.

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
