"""Build models from a name, initialize them again, save them as folders, hash them, pad their vocabulary."""

import copy
import hashlib
import inspect
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn

from lit_layers.errors import InputError, did_you_mean, first_sentence
from lit_layers.files.durable import naming, write_json
from lit_layers.files.hub import refuse_foreign_code
from lit_layers.models.families import Network, text_config
from lit_layers.models.offload import weight
from lit_layers.models.own_networks import known_inside
from lit_layers.models.pixels import PREPROCESSOR, copy_pixel_statistics_, pixel_statistics, preprocessor
from lit_layers.models.proof import is_timm
from lit_layers.models.structure import family_of

# Config fields that describe the saved file, not the function of the model; `architecture_hash` ignores them.
_FILE_FIELDS = ("architectures", "dtype", "torch_dtype", "transformers_version")

# mode of saved files. safetensors writes files with mode 600, which other users of a shared disk cannot read.
READABLE = 0o644
_WRAPPERS = ("DataParallel", "DistributedDataParallel")
TIMM_OPTIONS = "build_options"  # attribute of a timm model that holds its constructor arguments, for its config.json


def causal_lm(
    name: str | Path,
    *,
    seed: int = 0,
    pad_vocab_to: int | None = None,
    attention_implementation: str = "sdpa",
    weights: nn.Module | None = None,
    **overrides: Any,
) -> nn.Module:
    """Build a causal language model on the CPU, in training mode, always in float32.

    The weights depend only on the config and `seed`. The global random state does not change. GPT-2 uses the fused form
    of its activation by default: the same function, several times faster.

    Args:
        name: a model type of transformers ("gpt2", "gpt_neox", "llama") or a folder with a config.json.
        seed: seed of the weights.
        pad_vocab_to: pad the vocabulary to the next multiple of this number, such as 64. Logits of real tokens do not
            change.
        attention_implementation: "sdpa", "eager" or another one of transformers.
        weights: a model of the same class and shape, whose weights are copied.
        overrides: fields of the config.

    Raises:
        InputError: if the type or an override is unknown, values do not fit together, or the model is not a sequence
            of blocks.
    """
    import transformers

    if weights is not None:
        overrides = {"tie_word_embeddings": has_tied_head(weights)} | overrides
    plain = _config(name)
    fields = (set(plain.to_dict()) | set(plain.attribute_map)) - {"model_type", "architectures", TRUE_SIZE}
    _refuse_unknown(overrides, fields, f"option of {plain.model_type}")
    fused = {"activation_function": "gelu_pytorch_tanh"} if name == "gpt2" else {}
    try:
        options = fused | _drop_tokens(plain, overrides.get("vocab_size", plain.vocab_size)) | overrides
        config = _config(name, **options)
        with seeded(seed):
            model = transformers.AutoModelForCausalLM.from_config(
                config, attn_implementation=attention_implementation, dtype=torch.float32
            )
    except (StrictDataclassError, ValueError, TypeError, RuntimeError, ZeroDivisionError) as error:
        raise InputError(f"cannot build {name} with {overrides}: {first_sentence(error)}") from error
    family_of(model)
    if weights is not None:
        try:
            model.load_state_dict(weights.state_dict())
        except RuntimeError as error:
            kind = type(model).__name__
            raise InputError(f"the weights do not fit a {kind} of these options: {first_sentence(error)}") from error
    if pad_vocab_to is not None:
        with seeded(seed):
            pad_vocabulary_(model, pad_vocab_to)
    return model.train()


def vit(name: str, *, seed: int = 0, **overrides: Any) -> nn.Module:
    """Build a timm vision transformer on the CPU, in training mode.

    Args:
        name: a model name of timm, such as "vit_small_patch16_224".
        seed: seed of the weights.
        overrides: arguments of its constructor.

    Raises:
        InputError: if the name or an override is unknown, an override does not fit, or the model is not a sequence of
            blocks.
    """
    import timm
    from timm.models.vision_transformer import VisionTransformer

    if not timm.is_model(name):
        near = did_you_mean(name, timm.list_models(), "timm.list_models() has them all")
        raise InputError(f"no model named {name!r} in timm; {near}")
    arguments = set(inspect.signature(VisionTransformer).parameters) | {"num_classes", "drop_rate"}
    _refuse_unknown(overrides, arguments, "option of a vision transformer")
    try:
        with seeded(seed):
            model = timm.create_model(name, pretrained=False, **overrides)
    except (ValueError, TypeError, AssertionError, RuntimeError, ZeroDivisionError) as error:
        raise InputError(f"cannot build {name} with {overrides}: {first_sentence(error)}") from error
    family_of(model)
    setattr(model, TIMM_OPTIONS, overrides)
    return model.train()


def untrained(model: Network, *, seed: int = 0) -> nn.Module:
    """Return a model of the same architecture with new weights, in evaluation mode.

    The weights depend only on the config and `seed`. They have the dtype and device of `model`, but are on the CPU if
    `model` is on the meta device. The global random state and `model` do not change.

    Raises:
        InputError: if the constructor arguments are unknown. This is the case for a user's own network, and for a timm
            model that was made by neither `vit` nor `load`.
    """
    model = plain_model(model)
    if hasattr(model, "config"):
        # Draw the random weights without padding rows of the vocabulary, then add these rows. A saved model has no
        # padding rows. So the function draws the same weights for it as for the padded model in training.
        with seeded(seed):
            fresh = type(model)._from_config(_unpadded_config(model), dtype=torch.float32)
            if is_padded(model):
                pad_vocabulary_(fresh, model.config.vocab_size)
        copy_pixel_statistics_(model, fresh)
    else:
        import timm

        options = getattr(model, TIMM_OPTIONS, None)
        if options is None or not hasattr(model, "pretrained_cfg"):
            raise InputError(f"cannot build this {type(model).__name__} anew: build it with vit(name, ...)")
        with seeded(seed):
            fresh = timm.create_model(model.pretrained_cfg["architecture"], pretrained=False, **options)
        setattr(fresh, TIMM_OPTIONS, options)
    like = next(model.parameters())
    for parameter in fresh.parameters():  # buffers such as rotary frequencies keep float32, as in a loaded model
        parameter.data = parameter.data.to(like.dtype)
    return fresh.to("cpu" if like.is_meta else like.device).eval()


def save(model: Network, folder: str | Path, tokenizer: Any = None) -> None:
    """Write a folder that `from_pretrained` loads: config.json, model.safetensors and the tokenizer, in mode 644.

    For an image model, the mean and standard deviation that normalize its images are written too, if they are known.
    Padding rows of the vocabulary are left out. Neither the model nor the random state changes. The write is not
    atomic.

    Args:
        tokenizer: an object with `save_pretrained`, or a folder whose files are copied.

    Raises:
        InputError: if the model is of neither transformers nor timm, has adapters of peft, or is quantized.
    """
    model, folder = plain_model(model), Path(folder)
    if any(type(module).__module__.partition(".")[0] == "peft" for module in model.modules()):
        raise InputError(
            "cannot save a model with adapters of peft as a Hugging Face folder of a whole model: leave the saving to "
            "peft, or merge them first (merge_and_unload)"
        )
    folder.mkdir(parents=True, exist_ok=True)
    if hasattr(model, "save_pretrained"):
        with quiet(), naming(folder):
            _shell(model).save_pretrained(folder, state_dict=unpadded_state(model))
        if (settings := preprocessor(model)) is not None:
            write_json(folder / PREPROCESSOR, settings)
    else:
        with naming(folder):
            _save_timm(model, folder)
    if hasattr(tokenizer, "save_pretrained"):
        tokenizer.save_pretrained(folder)
    elif tokenizer is not None:
        for file in Path(tokenizer).iterdir():
            if file.is_file():
                shutil.copyfile(file, folder / file.name)
    for file in folder.iterdir():
        if file.is_file():
            os.chmod(file, READABLE)


def submodule(model: nn.Module, name: str) -> nn.Module:
    """Return the submodule at a path.

    Raises:
        InputError: if there is no such submodule.
    """
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        raise InputError(
            f"model: {type(model).__name__} has no submodule {name!r}; name the one that holds the network"
        ) from error


def plain_model(model: nn.Module) -> nn.Module:
    """Return the network inside wrappers of torch.compile, DistributedDataParallel, peft or sentence-transformers.

    Adapters of peft that are modules of the network (LoRA) remain in it. A model with learned prompts stays wrapped.
    """
    while True:
        if (inner := getattr(model, "_orig_mod", None)) is not None:
            model = inner
        elif type(model).__name__ in _WRAPPERS:
            model = model.get_submodule("module")
        elif hasattr(model, "get_base_model") and not getattr(model.active_peft_config, "is_prompt_learning", True):
            model = model.get_base_model()  # pyright: ignore
        elif _is_sentence_encoder(model) and len(inside := known_inside(model)) == 1:
            (model,) = inside.values()
        else:
            return model


def _is_sentence_encoder(model: nn.Module) -> bool:
    return any(kind.__module__.startswith("sentence_transformers.") for kind in type(model).__mro__)


def weights_hash(model: nn.Module) -> str:
    """Return a hash (16 hex digits) of the model as saved: names, dtypes, shapes and bytes of its state dict.

    Padding rows of the vocabulary are left out, so that the hash is the same in training and after reloading.
    """
    digest = hashlib.blake2b(digest_size=8)
    network = plain_model(model)
    for name, tensor in sorted(unpadded_state(network).items()):
        tensor = weight(network, name, tensor)
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def architecture_hash(model: nn.Module) -> str:
    """Return a hash (16 hex digits) of the config of a transformers model.

    Unlike the shapes of the weights, it also covers config fields such as `rope_theta`. It ignores the path, class and
    dtype of the model and the library version.
    """
    network: Network = plain_model(model)
    fields = network.config.to_dict()
    options = {name: value for name, value in fields.items() if not name.startswith("_") and name not in _FILE_FIELDS}
    return hashlib.sha256(json.dumps(options, sort_keys=True, default=str).encode()).hexdigest()[:16]


def fill_defaults(settings: dict[str, Any]) -> dict[str, Any]:
    """Fill the missing fields of a transformers config.json with defaults; return any other config unchanged."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = settings.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        return settings
    try:
        return CONFIG_MAPPING[kind].from_dict(settings).to_dict()
    except (StrictDataclassError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError):
        # Catch many kinds of errors, because config classes compute with their fields, which may have damaged values.
        return settings


def _config(name: str | Path, **options: Any) -> Any:
    from transformers import AutoConfig, PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    refuse_foreign_code(options, name)
    if os.path.isfile(os.path.join(name, "config.json")):
        refuse_foreign_code(PreTrainedConfig.get_config_dict(name)[0], name)
        return AutoConfig.from_pretrained(name, trust_remote_code=False, **options)
    if name not in CONFIG_MAPPING:
        near = did_you_mean(str(name), CONFIG_MAPPING.keys(), "transformers has none of a like name")
        raise InputError(f"expected a model type or a folder with a config.json, got {str(name)!r}; {near}")
    return AutoConfig.for_model(str(name), **options)


def _drop_tokens(config: Any, vocab_size: int) -> dict[str, None]:
    """Return overrides of a config with a smaller vocabulary: None for each special token whose id is outside it."""
    tokens = {field: getattr(config, field, None) for field in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {field: None for field, token in tokens.items() if isinstance(token, int) and token >= vocab_size}


def _shell(model: Network) -> Network:
    """Return a model of the same class without weights (meta device), to call its `save_pretrained`.

    Its config has no padding rows of the vocabulary. `save_pretrained` of the model itself would write into the config
    that training uses.
    """
    with torch.device("meta"):
        shell = type(model)._from_config(_unpadded_config(model), dtype=model.dtype)
    if model.can_generate():
        shell.generation_config = copy.deepcopy(model.generation_config)
    return shell


def _save_timm(model: nn.Module, folder: Path) -> None:
    from timm.models import save_for_hf

    if not hasattr(model, "pretrained_cfg"):
        kind = type(model).__name__
        reason = "build it with vit(name, ...)" if is_timm(model) else "it is neither of transformers nor of timm"
        raise InputError(
            f"cannot save this {kind} as a Hugging Face folder, as nothing names its architecture: {reason}"
        )
    save_for_hf(model, str(folder), model_args=getattr(model, TIMM_OPTIONS, None), safe_serialization=True)
    # For a model without pixel statistics, timm writes those of ImageNet: remove them.
    if pixel_statistics(model) is None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        for name in ("mean", "std"):
            config["pretrained_cfg"].pop(name, None)
        write_json(folder / "config.json", config)


def _refuse_unknown(given: Iterable[str], names: Iterable[str], kind: str) -> None:
    for name in given:
        if name not in names:
            raise InputError(f"{name!r} is no {kind}; {did_you_mean(name, names, 'there is none of a like name')}")


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the initialization of weights inside the context, and restore the global random state afterwards.

    New weights are created on the CPU, or on the meta device if the caller is inside `torch.device("meta")`.
    """
    device = "meta" if torch.empty(0).device.type == "meta" else "cpu"
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also seed the GPUs
        yield


@contextmanager
def quiet(seed: int = 0, *, reports: bool = True) -> Iterator[None]:
    """Seed weights as in `seeded`, and hide the progress bars of transformers inside the context.

    If `reports` is False, the load reports of transformers are hidden too.
    """
    from transformers.utils import logging

    # Keep transformers from asking the Hub, in a background thread, to convert each pickle that it opens.
    os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "1")
    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    if not reports:
        logging.set_verbosity_error()
    try:
        with seeded(seed):
            yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()


# Padded vocabularies: embedding and head get rows that belong to no token, so that matrix products are faster.

TRUE_SIZE = "unpadded_vocab_size"  # field of a padded model's config: size of its vocabulary without padding


def true_vocab_size(model: Network) -> int:
    """Return the number of real tokens in the vocabulary, without padding rows."""
    return getattr(model.config, TRUE_SIZE, None) or text_config(model.config).vocab_size


def pad_vocabulary_(model: Network, multiple: int) -> None:
    """Add zero rows to the embedding and the head until their number of rows is a multiple of `multiple`.

    Logits of real tokens do not change. The model remains an ordinary transformers model. `config.vocab_size` counts
    all rows, `config.unpadded_vocab_size` the real tokens.
    """
    size = model.config.vocab_size
    model.resize_token_embeddings(-(-size // multiple) * multiple, mean_resizing=False)
    setattr(model.config, TRUE_SIZE, size)
    for parameter in _vocab_weights(model):
        parameter.data[size:] = 0


def unpadded_state(model: Network) -> dict[str, Tensor]:
    """Return the state dict without padding rows of the vocabulary, as views of the model's tensors.

    Raises:
        InputError: if the model is quantized, so that some of its weights are not tensors.
    """
    state = model.state_dict(keep_vars=True)
    if packed := [name for name, value in state.items() if not isinstance(value, Tensor)]:
        raise InputError(
            f"{type(model).__name__} has weights that are no tensors ({packed[0]}): measure it unquantized"
        )
    padded = {id(parameter) for parameter in _vocab_weights(model)} if is_padded(model) else set()
    return {
        name: tensor.detach()[: true_vocab_size(model)] if id(tensor) in padded else tensor.detach()
        for name, tensor in state.items()
    }


def has_tied_head(model: Network) -> bool:
    """Return whether the head and the embedding share one weight tensor, whatever the config says."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def is_padded(model: Network) -> bool:
    """Return whether the vocabulary has padding rows."""
    return hasattr(getattr(model, "config", None), TRUE_SIZE)


def _unpadded_config(model: Network) -> Any:
    """Return a copy of the model's config that counts no padding rows of the vocabulary."""
    config = copy.deepcopy(model.config)
    if is_padded(model):
        config.vocab_size = getattr(config, TRUE_SIZE)
        delattr(config, TRUE_SIZE)
    return config


def _vocab_weights(model: Network) -> list[nn.Parameter]:
    """Return the parameters with one row per token of the vocabulary: embedding, head and bias of the head."""
    parts = [part for part in (model.get_input_embeddings(), model.get_output_embeddings()) if part is not None]
    return [parameter for part in parts for parameter in part.parameters(recurse=False)]
