"""Build tiny random models of every family, with weights so large that every non-linearity and norm has an effect."""

import copy

import torch
from torch import Tensor, nn

VOCAB, DIM, LAYERS, HEADS, POSITIONS, IMAGE = 61, 32, 3, 4, 64, 16
SCALE = 8  # matrices start with std 0.02; at width 32, times 8 is about unit gain, so that attention is not uniform

_PLAIN = {
    "vocab_size": VOCAB,
    "hidden_size": DIM,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 64,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_PLAIN, "num_key_value_heads": 2}
_GEMMA = {**_GROUPED, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4, "final_logit_softcapping": 2.0}
_GPT2 = {"vocab_size": VOCAB, "n_embd": DIM, "n_layer": LAYERS, "n_head": HEADS, "n_positions": POSITIONS}
# every other block attends to the last 4 tokens
_NEO = {**_PLAIN, "attention_types": [[["global", "local", "global"], 1]], "window_size": 4}
_FALCON = {name: value for name, value in _PLAIN.items() if name != "intermediate_size"}
_MPT = {"vocab_size": VOCAB, "d_model": DIM, "n_layers": LAYERS, "n_heads": HEADS, "max_seq_len": POSITIONS}
_DISTILBERT = {
    "vocab_size": VOCAB,
    "dim": DIM,
    "n_layers": LAYERS,
    "n_heads": HEADS,
    "hidden_dim": 64,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": 0,
}
# the second and third block attend to 2 tokens on either side
_MODERNBERT = {
    **_PLAIN,
    "local_attention": 4,
    "global_attn_every_n_layers": 3,
    "cls_token_id": 1,
    "sep_token_id": 2,
    "bos_token_id": None,
    "eos_token_id": None,
}
_MAMBA = {
    "vocab_size": VOCAB,
    "hidden_size": DIM,
    "num_hidden_layers": LAYERS,
    "state_size": 8,
    "initializer_range": 0.02,
    "pad_token_id": 0,
}
_MAMBA2 = {**_MAMBA, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4}
_PICTURE = {
    "hidden_size": DIM,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 64,
    "image_size": IMAGE,
    "patch_size": 4,
}
_DINOV2 = {**{name: value for name, value in _PICTURE.items() if name != "intermediate_size"}, "layerscale_value": 0.5}
_DECODER = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
_MAE = {**_PICTURE, **{f"decoder_{name}": value for name, value in _DECODER.items()}}
_BEIT = {**_PICTURE, "use_relative_position_bias": True, "layer_scale_init_value": 0.5}

# Mamba: the logarithm of the decay rate, and weights that do not start with std 0.02
_NOT_SMALL = ("A_log", "conv1d", "dt_proj", "mixer.out_proj")

# name -> (class of transformers, model type, options)
_TEXT = {
    "gpt2": ("GPT2LMHeadModel", "gpt2", {**_GPT2, "bos_token_id": 1, "eos_token_id": 2}),
    "gpt2_trunk": ("GPT2Model", "gpt2", {**_GPT2, "bos_token_id": 1, "eos_token_id": 2}),
    "gpt_neox": ("GPTNeoXForCausalLM", "gpt_neox", _PLAIN),
    "llama": ("LlamaForCausalLM", "llama", _GROUPED),
    "llama_trunk": ("LlamaModel", "llama", _GROUPED),
    "mistral": ("MistralForCausalLM", "mistral", {**_GROUPED, "sliding_window": 4}),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", _GROUPED),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", {**_GROUPED, "head_dim": 8}),
    "olmo": ("OlmoForCausalLM", "olmo", _GROUPED),
    "olmo2": ("Olmo2ForCausalLM", "olmo2", _GROUPED),
    "gemma2": ("Gemma2ForCausalLM", "gemma2", _GEMMA),
    "granite": ("GraniteForCausalLM", "granite", {**_GROUPED, "logits_scaling": 3.0, "residual_multiplier": 0.5}),
    "phi": ("PhiForCausalLM", "phi", _GROUPED),
    "gemma": ("GemmaForCausalLM", "gemma", {**_GROUPED, "head_dim": 8}),
    "gpt_neo": ("GPTNeoForCausalLM", "gpt_neo", _NEO),
    "falcon": ("FalconForCausalLM", "falcon", _FALCON),
    "falcon_grouped": ("FalconForCausalLM", "falcon", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon_alibi": ("FalconForCausalLM", "falcon", {**_FALCON, "alibi": True, "multi_query": False, "bias": True}),
    "mpt": ("MptForCausalLM", "mpt", _MPT),
    "bert": ("BertForMaskedLM", "bert", _PLAIN),
    "bert_trunk": ("BertModel", "bert", _PLAIN),
    "bert_classifier": ("BertForSequenceClassification", "bert", {**_PLAIN, "num_labels": 5}),
    "bert_tagger": ("BertForTokenClassification", "bert", {**_PLAIN, "num_labels": 5}),
    "roberta": ("RobertaForMaskedLM", "roberta", _PLAIN),
    "distilbert": ("DistilBertForMaskedLM", "distilbert", _DISTILBERT),
    "modernbert": ("ModernBertForMaskedLM", "modernbert", _MODERNBERT),
}
# The same networks with other heads.
_HEADS = {
    "roberta_trunk": ("RobertaModel", "roberta", _PLAIN),
    "roberta_classifier": ("RobertaForSequenceClassification", "roberta", {**_PLAIN, "num_labels": 5}),
    "roberta_tagger": ("RobertaForTokenClassification", "roberta", {**_PLAIN, "num_labels": 5}),
    "distilbert_classifier": ("DistilBertForSequenceClassification", "distilbert", {**_DISTILBERT, "num_labels": 5}),
    "distilbert_tagger": ("DistilBertForTokenClassification", "distilbert", {**_DISTILBERT, "num_labels": 5}),
    "modernbert_trunk": ("ModernBertModel", "modernbert", _MODERNBERT),
}
# State-space models: they have no attention, so tests of attention in every family leave them out.
_RECURRENT = {
    "mamba_lm": ("MambaForCausalLM", "mamba", _MAMBA),
    "mamba_trunk": ("MambaModel", "mamba", _MAMBA),
    "mamba2_lm": ("Mamba2ForCausalLM", "mamba2", _MAMBA2),
}
# Vision models of transformers.
_PICTURES = {
    "picture_vit": ("ViTForImageClassification", "vit", {**_PICTURE, "num_labels": 7}),
    "picture_vit_trunk": ("ViTModel", "vit", _PICTURE),
    "picture_dinov2": ("Dinov2ForImageClassification", "dinov2", {**_DINOV2, "num_labels": 7}),
    "picture_dinov2_trunk": ("Dinov2Model", "dinov2", _DINOV2),
    "picture_registers": (
        "Dinov2WithRegistersForImageClassification",
        "dinov2_with_registers",
        {**_DINOV2, "num_labels": 7},
    ),
    "picture_mae": ("ViTMAEForPreTraining", "vit_mae", _MAE),
    "picture_mae_trunk": ("ViTMAEModel", "vit_mae", _MAE),
    "picture_beit": ("BeitForImageClassification", "beit", {**_BEIT, "num_labels": 7}),
    "picture_beit_trunk": (
        "BeitModel",
        "beit",
        {**_BEIT, "use_shared_relative_position_bias": True, "use_mean_pooling": False},
    ),
    "picture_clip": ("CLIPVisionModel", "clip_vision_model", _PICTURE),
    "picture_clip_projected": (
        "CLIPVisionModelWithProjection",
        "clip_vision_model",
        {**_PICTURE, "projection_dim": 24},
    ),
}
_IMAGES = {
    "vit": {},
    "vit_average": {"global_pool": "avg", "class_token": False, "init_values": 0.5},
    "vit_headless": {"num_classes": 0},
}
FAMILIES = (*_TEXT, *_IMAGES)  # enough for most tests; EVERY has all
RECURRENT, PICTURES = tuple(_RECURRENT), tuple(_PICTURES)
EVERY = (*FAMILIES, *_HEADS, *RECURRENT, *PICTURES)
_TRANSFORMERS = {**_TEXT, **_HEADS, **_RECURRENT, **_PICTURES}


_made: dict[str, nn.Module] = {}


def sees_images(name: str) -> bool:
    return name in _IMAGES or name in _PICTURES


def tiny(
    name: str, dtype: torch.dtype = torch.float32, *, attention: str | None = None, seed: int = 0, **options
) -> nn.Module:
    """Return a model of 3 blocks of width 32 in evaluation mode; `options` go to its config or constructor.

    Attention is sdpa by default, except in families without it (Gemma 2). Models are cached: each call returns a copy,
    with the weights of `seed`.
    """
    key = repr((name, dtype, attention, seed, sorted(options.items())))
    if key not in _made:
        _made[key] = _tiny(name, dtype, attention, seed, options)
    return copy.deepcopy(_made[key])


def _tiny(name: str, dtype: torch.dtype, attention: str | None, seed: int, options: dict) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _vit(attention, **(_IMAGES[name] | options)) if name in _IMAGES else _plain(name, attention, options)
        with torch.no_grad():
            for path, parameter in model.named_parameters():  # biases and norms away from 0 and 1
                if parameter.ndim == 1 or any(each in path for each in _NOT_SMALL):
                    parameter.add_(0.3 * torch.randn_like(parameter))
                else:
                    parameter.mul_(SCALE)
    return model.to(dtype).eval()


def tiny_batch(
    name: str, batch: int = 3, tokens: int = 10, padding: str | None = None, *, seed: int = 1
) -> dict[str, Tensor]:
    """Return random inputs.

    With padding "left" or "right", prompt i has tokens - 2 i real tokens (at least 2), and random ids as padding.
    """
    generator = torch.Generator().manual_seed(seed)
    if sees_images(name):
        return {"pixel_values": torch.randn(batch, 3, IMAGE, IMAGE, generator=generator)}
    ids = torch.randint(3, VOCAB, (batch, tokens), generator=generator)
    lengths = [max(2, tokens - 2 * index) if padding else tokens for index in range(batch)]
    mask = torch.tensor([[position < length for position in range(tokens)] for length in lengths]).long()
    return {"input_ids": ids, "attention_mask": mask.flip(-1) if padding == "left" else mask}


def _plain(name: str, attention: str | None, options: dict) -> nn.Module:
    import transformers

    kind, model_type, defaults = _TRANSFORMERS[name]
    config = transformers.AutoConfig.for_model(model_type, **(defaults | options))
    return getattr(transformers, kind)._from_config(config, attn_implementation=attention)


def _vit(attention: str | None, **options) -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    defaults = {"img_size": IMAGE, "patch_size": 4, "embed_dim": DIM, "depth": LAYERS, "num_heads": HEADS}
    model = VisionTransformer(**(defaults | {"num_classes": 7} | options))
    for block in model.blocks:
        block.attn.fused_attn = attention != "eager"
    return model
