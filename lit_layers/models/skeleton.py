"""The modules of a checkpoint without their memory, and how its tensors are called."""

import json
import os
from collections.abc import Callable

import torch

from lit_layers.errors import InputError
from lit_layers.models.families import Network, class_named
from lit_layers.models.pixel_statistics import PREPROCESSOR, keep_pixel_statistics_, keep_preprocessor_
from lit_layers.models.shard_files import ShardFiles

META = torch.device("meta")


def skeleton(files: ShardFiles, *, device: torch.device, dtype: torch.dtype) -> Network:
    """The model in evaluation mode, every parameter without memory; what no file holds, rotary frequencies, is real.

    Raises:
        InputError: a config.json that neither transformers nor timm knows, or of a quantized model.
    """
    settings = files.config
    timm = settings.get("model_type") in (None, "timm_wrapper") and "architecture" in settings
    network = _timm_skeleton(files, dtype) if timm else _transformers_skeleton(files, dtype)
    for module in network.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != META:
                module._buffers[name] = buffer.to(device)
    return network.requires_grad_(False).eval()


def _transformers_skeleton(files: ShardFiles, dtype: torch.dtype) -> Network:
    settings = files.config
    if not settings.get("model_type"):
        raise InputError(
            f"the config.json of {files.model} names neither a model_type (transformers) nor an architecture (timm)"
        )
    import transformers

    architecture = (settings.get("architectures") or ["AutoModelForCausalLM"])[0]
    if settings.get("quantization_config"):
        raise InputError(f"{files.model} is quantized, and only plain weights are read: use the model it was made from")
    try:
        config = transformers.AutoConfig.from_pretrained(files.fetch("config.json").parent, trust_remote_code=False)
    except ValueError as error:
        reason = " ".join(str(error).split()).split(". ")[0]
        raise InputError(f"the config.json of {files.model} is none that transformers reads: {reason}") from error
    kind = class_named(architecture)
    if kind is None:
        raise InputError(f"transformers {transformers.__version__} has no {architecture}, which {files.model} asks for")
    build = kind.from_config if architecture.startswith("Auto") else kind._from_config
    with META:
        network = build(config, dtype=dtype)
    for module in network.modules():
        if module._non_persistent_buffers_set:
            for name in module._non_persistent_buffers_set:
                module._buffers[name] = torch.empty_like(module._buffers[name], device="cpu")
            network._init_weights(module)  # which is how from_pretrained gives these their values
    if kind.main_input_name == "pixel_values" and files.has(PREPROCESSOR):
        keep_preprocessor_(network, json.loads(files.fetch(PREPROCESSOR).read_text(encoding="utf-8")))
    return network


def _timm_skeleton(files: ShardFiles, dtype: torch.dtype) -> Network:
    import timm

    folder = os.fspath(files.fetch("config.json").parent)
    with META:
        model = timm.create_model(f"local-dir:{folder}", pretrained=False).to(dtype)
    keep_pixel_statistics_(model, files.config)
    return model


def name_finder(network: Network) -> Callable[[str], str]:
    """What transformers calls a tensor of a checkpoint: the trunk's name added or taken away, older names renewed."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(network)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    names, prefix = network.state_dict(), network.base_model_prefix
    return lambda stored: rename_source_key(stored, renamings, converters, prefix, names)[0]
