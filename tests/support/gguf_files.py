"""Tiny models written as GGUF files by gguf's own writer, with the changes of layout that llama.cpp makes."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from torch import nn

TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # of GPT-2, whose matrices are (in, out)


def write_gguf(
    model: nn.Module,
    folder: Path,
    file: Path,
    *,
    quantization: Type = Type.F32,
    factors: Any = None,
    scaling: str = "none",
    split: str = "gpt-2",
    keys: dict[str, Any] | None = None,
) -> Path:
    """A GPT-2 or Llama of a folder with tokenizer.json as a GGUF file; matrices are quantized, vectors are not."""
    config: Any = model.config
    is_llama = config.model_type == "llama"
    arch = gguf.MODEL_ARCH.LLAMA if is_llama else gguf.MODEL_ARCH.GPT2
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    if is_llama:
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_vocab_size(config.vocab_size)
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling))
    else:
        writer.add_feed_forward_length(4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    _add_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text()), split)
    for key, value in (keys or {}).items():
        kind = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        kind(key, value)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.detach().float().numpy()
        if is_llama and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            halves = values.reshape(heads, 2, len(values) // heads // 2, -1)
            values = halves.swapaxes(1, 2).reshape(values.shape)
        elif not is_llama and name.endswith(TRANSPOSED):
            values = values.T
        kind = quantization if values.ndim > 1 else Type.F32
        stored = gguf.quantize(np.ascontiguousarray(values), kind)
        writer.add_tensor(str(names.get_name(name, (".weight", ".bias"))), stored, raw_dtype=kind)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_tokenizer(writer: gguf.GGUFWriter, parts: dict, split: str) -> None:
    vocabulary = {**parts["model"]["vocab"], **{each["content"]: each["id"] for each in parts["added_tokens"]}}
    special = {each["id"] for each in parts["added_tokens"]}
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control if number in special else normal for number in range(len(tokens))])
    pairs = parts["model"]["merges"]
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in pairs])
    for add in (writer.add_eos_token_id, writer.add_bos_token_id):
        add(vocabulary["<|endoftext|>"])
