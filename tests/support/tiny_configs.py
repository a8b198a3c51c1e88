"""Build a tiny config and model of any model type of transformers, by one rule and a table of exceptions."""

import inspect
from typing import Any

import torch
from torch import nn

DIM, LAYERS, HEADS, VOCAB = 32, 3, 4, 128
KEPT = object()  # value of an exception: the field keeps its default

# Values of fields, in every config that has the field.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "word_embed_proj_dim"), DIM),
    **dict.fromkeys(("attention_hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size"), DIM),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim"), 64),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "decoder_layers", "encoder_layers", "num_decoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "decoder_attention_heads", "encoder_attention_heads"), HEADS),
    **dict.fromkeys(("mamba_n_heads", "n_mamba_heads", "linear_num_key_heads", "linear_num_value_heads"), HEADS),
    **dict.fromkeys(("image_size", "mamba_d_head", "q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("head_dim", "attention_head_dim", "kv_channels", "qk_rope_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("v_head_dim", "linear_key_head_dim", "linear_value_head_dim", "state_size", "mamba_d_state"), 8),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("patch_size", "rotary_dim", "sliding_window"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "eos_token_id", "sep_token_id"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "mamba_n_groups", "mamba_ngroups"), 1),
    **dict.fromkeys(("bos_token_id", "decoder_start_token_id"), 1),
    "pad_token_id": 0,
}
LAYERWISE = ("layer_types", "layers_block_type")

# Fields that the rule gets wrong, by model type.
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "falcon_h1": {"mamba_d_ssm": 64},
    "zamba2": {
        "num_hidden_layers": 4,
        "layer_types": KEPT,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "hybrid_layer_ids": [1, 3],
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "n_mamba_heads": 4,
        "mamba_headdim": 16,
        "kv_channels": 16,
        "num_query_groups": 4,
        "num_key_value_heads": 4,
    },
}


def tiny_config(model_type: str, **more: Any) -> Any:
    """Return a config of three blocks of width 32."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return _shrunk(CONFIG_MAPPING[model_type], more)


def _shrunk(kind: Any, more: dict[str, Any]) -> Any:
    plain = kind()
    fields = set(plain.to_dict()) | set(inspect.signature(kind.__init__).parameters)
    options = {name: size for name, size in SIZES.items() if name in fields and _is_set(plain, name)}
    if "kv_lora_rank" in fields:  # latent attention expands keys and values to every head
        options["num_key_value_heads"] = HEADS
    for name, value in list(vars(plain).items()):
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            options[name] = _shrunk(type(value), {}).to_dict()
    for name in LAYERWISE:
        kinds = _value(plain, name)
        if isinstance(kinds, list | tuple) and kinds and not _is_computed(kind, name):
            options[name] = (list(dict.fromkeys(kinds)) * LAYERS)[:LAYERS]
    exceptions = EXCEPTIONS.get(kind.model_type, {}) | more
    return kind(**{name: size for name, size in (options | exceptions).items() if size is not KEPT})


def _is_computed(kind: Any, name: str) -> bool:
    return any(isinstance(getattr(kind, each, None), property) for each in (name, kind.attribute_map.get(name, name)))


def _is_set(config: Any, name: str) -> bool:
    return name == "head_dim" or _value(config, name) is not None


def _value(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception as error:
        if type(error).__name__ != "AmbiguousGlobalPerLayerAttributeError":
            raise
        return None


def config_for(kind: Any, config: Any) -> Any:
    """Return the config that a class expects, which may be a sub-config such as the text config."""
    wanted = kind.config_class
    if wanted is None or isinstance(config, wanted):
        return config
    found = [value for value in vars(config).values() if isinstance(value, wanted)]
    return found[0] if found else config


def tiny_model(
    kind: str, model_type: str, dtype: torch.dtype = torch.float32, *, seed: int = 0, **more: Any
) -> nn.Module:
    """Return a random model of a class in evaluation mode, with weights so large that a wrong structure shows."""
    import transformers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network: Any = getattr(transformers, kind)
        model = network._from_config(config_for(network, tiny_config(model_type, **more)))
        scale_up_(model)
    return model.to(dtype).eval()


def scale_up_(model: nn.Module) -> None:
    """Multiply matrices by 3 and add noise to biases and norms, so that a wrong structure changes the output."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
            else:
                parameter.add_(0.3 * torch.randn_like(parameter))
