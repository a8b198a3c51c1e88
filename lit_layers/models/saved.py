"""Load saved models and check their weights; load an encoder with a new head for a task."""

import functools
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn

from lit_layers.errors import InputError, first_sentence, no_folder, refuse_odd_files
from lit_layers.files.hub import ADAPTER, MERGE_IT, named_shards, refuse_foreign_code, would_run_code
from lit_layers.models import pixels
from lit_layers.models.build import TIMM_OPTIONS, has_tied_head, quiet, untrained
from lit_layers.models.families import Network, class_named, trunk_of
from lit_layers.models.offload import Offload, free_memory
from lit_layers.models.structure import family_of

_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
# Files that say which file of a model holds which weight, for safetensors and for pickles.
INDEX, PICKLED = "model.safetensors.index.json", "pytorch_model.bin.index.json"
# Errors of transformers, timm and their file readers for a wrong config or wrong weights.
_CANNOT_LOAD = (
    *(ArithmeticError, AssertionError, AttributeError, EOFError, ImportError, LookupError, OSError, RuntimeError),
    *(TypeError, ValueError, UnpicklingError, SafetensorError, StrictDataclassError),
)


def load(
    folder_or_repo: str | Path,
    *,
    revision: str | None = None,
    dtype: torch.dtype = torch.float32,
    offload: Offload | None = None,
) -> nn.Module:
    """Load a saved transformers or timm model in evaluation mode.

    The weights are read from safetensors, or else from a pickle with `weights_only=True`. Code of the repository never
    runs.

    Args:
        folder_or_repo: a local folder, or a repository of the Hub.
        revision: branch, tag or commit of the repository.
        dtype: dtype of the weights.
        offload: if given, the blocks remain on the disk, and embedding, final norm and head are loaded to
            `offload.device`. By default, the whole model is loaded to the CPU.

    Raises:
        InputError: if the folder or its model does not exist, or the weights do not fit the model or the memory.
    """
    name = os.fspath(folder_or_repo)
    # Make the path absolute, so that transformers never mistakes it for a repository, even if the folder disappears.
    if os.path.isdir(name):
        name = os.path.abspath(name)
        refuse_odd_files(name)
        read_config(Path(name))
    elif os.path.isfile(name):
        raise no_folder(name)
    elif isinstance(folder_or_repo, Path) or name.startswith((".", "/", "~")):
        raise InputError(f"expected a folder with a model, {name} does not exist")
    try:
        # `quiet` restores the random state, because transformers may draw weights before it reads the saved ones.
        with quiet():
            return _load(name, revision, dtype, offload)
    except InputError:
        raise
    except _CANNOT_LOAD as error:
        cause = error.__cause__ if isinstance(error, RuntimeError) else error  # timm wraps the error of torch
        if isinstance(cause, UnpicklingError):
            raise would_run_code(name, cause) from cause
        # The message of transformers refers to a report that `quiet` hides, so raise another one.
        if "ignore_mismatched_sizes" in str(error):
            raise InputError(
                f"{name} cannot be loaded: its weights have other shapes than its config.json says"
            ) from error
        raise InputError(f"{name} cannot be loaded: {type(error).__name__}: {first_sentence(error)}") from error


def _load(name: str, revision: str | None, dtype: torch.dtype, offload: Offload | None) -> nn.Module:
    from transformers import PreTrainedConfig

    settings, _ = PreTrainedConfig.get_config_dict(name, revision=revision)
    refuse_foreign_code(settings, name)
    if offload is None:
        _check_memory(settings | settings.get("model_args", {}))
    if is_timm(settings):
        if offload is not None:
            raise InputError(f"offload: {name} is a model of timm, which is only read whole: leave --offload out")
        model = _open_timm(name, settings, revision)
        setattr(model, TIMM_OPTIONS, settings.get("model_args", {}))
        pixels.keep_pixel_statistics_(model, settings)
        return model.to(dtype).eval()
    return _load_transformers(name, settings, revision, dtype, offload)


def _check_memory(settings: dict[str, Any]) -> None:
    """Refuse a model whose weights cannot fit into memory, by an estimate from its config.json.

    The estimate counts four square float32 matrices per block, and one embedding. Almost every model needs more.

    Raises:
        ValueError: if the memory is too small.
    """

    def size(*names: str) -> int:
        return next((settings[name] for name in names if isinstance(settings.get(name), int)), 0)

    layers = size("n_layer", "num_hidden_layers", "num_layers", "depth")
    width = size("n_embd", "hidden_size", "embed_dim")
    least, free = 4 * (4 * layers * width**2 + size("vocab_size") * width), free_memory(torch.device("cpu"))
    if free is not None and least > free:
        raise ValueError(
            f"its weights take at least {least / 1e9:,.0f} GB, and {free / 1e9:,.0f} GB of memory are free"
        )


def check_weights(model: str, revision: str | None = None) -> None:
    """Refuse a model (in a folder or on the Hub) with an adapter, or whose index of weights does not match its files.

    Raises:
        InputError: if an index of weights is damaged, names files outside the folder, or leaves out files in it. Also
            if there is an adapter: transformers would silently add it only on machines where peft is installed.
    """
    from transformers.utils import cached_file

    if cached_file(model, ADAPTER, revision=revision, _raise_exceptions_for_missing_entries=False) is not None:
        raise InputError(f"{model}: expected a model alone, found an adapter beside it ({ADAPTER}): {MERGE_IT}")

    for index in (INDEX, PICKLED):
        file = cached_file(model, index, revision=revision, _raise_exceptions_for_missing_entries=False)
        if file is None:
            continue
        try:
            shards = named_shards(Path(file).read_bytes())
        except ValueError as error:
            raise InputError(f"{model}: {index} {error}; download or save the model again") from error
        present = {path.name for path in Path(model).glob("model*.safetensors")} if index == INDEX else set()
        if unread := sorted(path for path in present - set(shards.values()) if _WEIGHTS.fullmatch(path)):
            raise InputError(f"{model}: {index} does not name {unread[0]}: delete the weights of the other model")


def _load_transformers(
    name: str, settings: dict[str, Any], revision: str | None, dtype: torch.dtype, offload: Offload | None
) -> nn.Module:
    from transformers.utils import cached_file

    kind = class_of(settings, name)
    check_weights(name, revision)
    options: dict[str, Any] = {"trust_remote_code": False, "weights_only": True, "output_loading_info": True}
    read = functools.partial(kind.from_pretrained, name, revision=revision, dtype=dtype, **options)
    if offload is None:
        model, report = read()
    else:
        model, report = offload.open(read, outline(settings, name, dtype))
    for problem in ("missing_keys", "mismatched_keys"):
        if report.get(problem):
            keys = sorted(report[problem])[:3]
            raise InputError(f"the weights of {name} do not fill {kind.__name__}: {problem} {keys}")
    _check_unused(model, report["unexpected_keys"], name)
    if model.main_input_name == "pixel_values":
        file = cached_file(name, pixels.PREPROCESSOR, revision=revision, _raise_exceptions_for_missing_entries=False)
        if file is not None:
            pixels.keep_preprocessor_(model, json.loads(Path(file).read_text(encoding="utf-8")))
    return model.eval()


# Names of modules that are heads or poolers. They only read states and change none, so the saved weights of a head that
# the loaded class does not have may be ignored.
_HEADS = re.compile(
    r"cls|decoder|pooler|score|qa_outputs|seq_relationship|logit_scale|vocab_\w+|.*(head|classifier|projection)s?|.*predictions?"
)


def _check_unused(model: Network, leftovers: Iterable[str], name: str) -> None:
    """Refuse saved weights that the class does not use, unless they belong to a head that the model does not have.

    Raises:
        InputError: if unused weights belong to the trunk, or to a head that the model has.
    """
    trunk, held = f"{model.base_model_prefix}.", {path for path, _ in model.named_modules() if path}

    def is_head(key: str) -> bool:
        module = key.rpartition(".")[0]
        part = key.removeprefix(trunk).partition(".")[0]
        return not {module, module.removeprefix(trunk)} & held and _HEADS.fullmatch(part) is not None

    if lost := sorted(key for key in leftovers if not is_head(key)):
        raise InputError(
            f"{name} holds {len(lost)} weights that {type(model).__name__} with its config.json has no place for "
            f"({', '.join(lost[:3])}): it would be measured as another model; mend the config.json or the weights"
        )


def class_of(settings: dict[str, Any], name: str) -> Any:
    """Return the class of transformers that the config.json of a model names; AutoModelForCausalLM if it names none.

    Raises:
        InputError: if the config.json has no `model_type`, or this version of transformers does not have the type or
            the class.
    """
    import transformers

    if not settings.get("model_type"):
        raise InputError(
            f"the config.json of {name} names neither a model_type (transformers) nor an architecture (timm)"
        )
    if (known := settings["model_type"]) not in transformers.CONFIG_MAPPING:
        raise InputError(f"the config.json of {name}: expected model_type that this transformers knows, got {known}")
    architecture = (settings.get("architectures") or ["AutoModelForCausalLM"])[0]
    if (kind := class_named(architecture)) is None:
        raise InputError(f"transformers {transformers.__version__} has no {architecture}, which {name} asks for")
    return kind


def outline(settings: dict[str, Any], name: str, dtype: torch.dtype | None = None) -> nn.Module:
    """Build the model that a config.json describes, on the meta device, where weights take no memory.

    Args:
        settings: the content of the config.json.
        name: name of the model in error messages.
        dtype: dtype of the weights; by default that of the config.json.

    Raises:
        InputError: if neither transformers nor timm knows the model.
    """
    with quiet(reports=False), torch.device("meta"):
        try:
            if is_timm(settings):
                import timm

                options = settings.get("model_args", {})
                model = timm.create_model(settings["architecture"], pretrained=False, **options)
                setattr(model, TIMM_OPTIONS, options)
                pixels.keep_pixel_statistics_(model, settings)
                return model if dtype is None else model.to(dtype)
            from transformers import AutoConfig

            refuse_foreign_code(settings, name)
            kind = class_of(settings, name)
            config = AutoConfig.for_model(**json.loads(json.dumps(settings), object_hook=_parse_infinity))
            build = kind.from_config if kind.__name__.startswith("Auto") else kind._from_config
            return build(config) if dtype is None else build(config, dtype=dtype)
        except InputError:
            raise
        except _CANNOT_LOAD as error:
            kind = f"{type(error).__name__}: " if isinstance(error, KeyError | AttributeError) else ""
            raise InputError(f"the config.json of {name} describes no model: {kind}{first_sentence(error)}") from error


def initialise(
    settings: dict[str, Any], name: str, *, seed: int, dtype: torch.dtype, preprocessor: dict[str, Any] | None = None
) -> nn.Module:
    """Build the model that a config.json describes, on the CPU, with weights that its library initializes.

    Args:
        settings: the content of the config.json.
        name: name of the model in error messages.
        seed: seed of the weights.
        dtype: dtype of the weights.
        preprocessor: the content of the preprocessor_config.json of an image model, which has its pixel statistics.

    Raises:
        InputError: if neither transformers nor timm knows the model.
    """
    model: Network = outline(settings, name, dtype)
    if preprocessor is not None and not is_timm(settings) and model.main_input_name == "pixel_values":
        pixels.keep_preprocessor_(model, preprocessor)
    fresh = untrained(model, seed=seed)
    pixels.copy_pixel_statistics_(model, fresh)
    return fresh


def _parse_infinity(part: dict[str, Any]) -> Any:
    """Convert {"__float__": "Infinity"}, as transformers writes infinity, to a float; return other dicts unchanged."""
    return float(part["__float__"]) if part.keys() == {"__float__"} else part


def describe(model: Network) -> dict[str, Any]:
    """Return the config.json of a model as a dict of JSON values, from which `outline` can build the model again.

    The vocabulary size in it includes padding rows.
    """
    if not hasattr(model, "config"):
        config: Any = model.pretrained_cfg
        facts = {"architecture": config["architecture"], "model_args": getattr(model, TIMM_OPTIONS, {})}
        statistics = pixels.pixel_statistics(model)
        return facts if statistics is None else facts | {"mean": list(statistics[0]), "std": list(statistics[1])}
    settings = json.loads(model.config.to_json_string(use_diff=False))
    if model.get_output_embeddings() is not None:
        settings["tie_word_embeddings"] = has_tied_head(model)
    return settings | {"architectures": [type(model).__name__.removeprefix("FSDP")]}  # fully_shard adds the prefix


def rebuild(settings: dict[str, Any]) -> nn.Module:
    """Build the model from the result of `describe`, with new weights, on the CPU, in training mode.

    Raises:
        InputError: if `settings` describes no model.
    """
    source = outline(settings, "the checkpoint")
    model = untrained(source)
    pixels.copy_pixel_statistics_(source, model)
    return model.train()


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of the config.json of a model folder.

    Raises:
        InputError: if the folder has none.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise InputError(f"expected a model in {folder}, found no config.json there")
    return json.loads(file.read_text(encoding="utf-8"))


def is_timm(settings: dict[str, Any]) -> bool:
    return settings.get("model_type") in (None, "timm_wrapper") and "architecture" in settings


def _open_timm(name: str, settings: dict[str, Any], revision: str | None) -> Network:
    import timm

    source = f"local-dir:{name}" if os.path.isdir(name) else f"hf-hub:{name}" + (f"@{revision}" if revision else "")
    return timm.create_model(source, pretrained=True)


# An encoder with a new head for texts or pairs of texts, to be fine-tuned on a task.

ENCODERS = ("bert", "roberta", "distilbert", "modernbert")  # model types


def sequence_classifier(name: str | Path, num_outputs: int, *, seed: int = 0) -> tuple[Network, Network]:
    """Load an encoder with a classification head; return the model and its trunk, in float32, in evaluation mode.

    The weights of the trunk are the saved ones. The saved head is used if it has `num_outputs` outputs. Weights that
    were not saved are initialized from `seed`: a new head, and the pooler of a BERT saved for masked language modeling.
    The global random state does not change.

    Args:
        name: a local folder or a repository of the Hub, saved with any head.
        num_outputs: number of classes, or 1 for regression.
        seed: seed of new weights.

    Raises:
        InputError: if the model does not exist, is not a BERT, RoBERTa, DistilBERT or ModernBERT, or its weights do not
            fill the trunk.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedConfig

    if isinstance(name, Path) or str(name).startswith((".", "/", "~")):
        name = os.fspath(Path(name).expanduser().absolute())  # a relative path could be taken for a repository's name
    try:
        refuse_foreign_code(PreTrainedConfig.get_config_dict(name)[0], name)
        kind = AutoConfig.from_pretrained(name, trust_remote_code=False).model_type
    except (OSError, ValueError) as error:
        raise InputError(f"model: cannot open {name}: {first_sentence(error)}") from error
    if kind not in ENCODERS:
        raise InputError(f"model: expected an encoder ({', '.join(ENCODERS)}), {name} is of the type {kind}")
    check_weights(str(name), None)
    options: dict[str, Any] = {"num_labels": num_outputs, "ignore_mismatched_sizes": True, "weights_only": True}
    with quiet(seed, reports=False):
        model, report = AutoModelForSequenceClassification.from_pretrained(
            name,
            dtype=torch.float32,
            trust_remote_code=False,
            output_loading_info=True,
            **options,
        )
    prefix = f"{model.base_model_prefix}."
    wrong = [*report["missing_keys"], *(key[0] if isinstance(key, tuple) else key for key in report["mismatched_keys"])]
    if lost := sorted(key for key in wrong if key.startswith(prefix) and ".pooler." not in key):
        raise InputError(f"model: the weights of {name} do not fill its trunk: {', '.join(lost[:3])} are not there")
    _check_unused(model, report["unexpected_keys"], str(name))
    trunk = trunk_of(model)
    family_of(trunk)
    return model.eval(), trunk
