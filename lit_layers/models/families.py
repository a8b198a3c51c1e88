"""A row for each model family: where its blocks are, how it is called, how a state is read out.

The only file that knows architectures. A new family is a row here and a tiny model in the replay test.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from lit_layers.errors import InputError

# A module of transformers or timm: it has attributes that nn.Module does not declare.
Network = Any

TEXT = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
IMAGES = ("pixel_values",)


def trunk_of(model: Network) -> Network:
    """The model without its head: itself where it has none (`base_model` is transformers' name for it)."""
    return getattr(model, "base_model", model)


def as_they_are(config: Any, logits: Tensor) -> Tensor:
    return logits


def soft_capped(config: Any, logits: Tensor) -> Tensor:
    cap = config.final_logit_softcapping
    return logits if cap is None else (logits / cap).tanh() * cap


def scaled(config: Any, logits: Tensor) -> Tensor:
    return logits / config.logits_scaling


def language_head(model: Network, normed: Tensor, finish: Callable[[Any, Tensor], Tensor] = as_they_are) -> Tensor:
    """Scores of the next token; without a head the normed state itself, as the bare model returns it."""
    head = model.get_output_embeddings()
    return normed if head is None else finish(model.config, head(normed))


def bert_head(model: Network, hidden: Tensor) -> Tensor:
    """What each BERT class makes of its last state: itself, words, one class per text or one per token."""
    if hasattr(model, "cls"):
        return model.cls(hidden)
    if hasattr(model, "classifier"):
        pooler = trunk_of(model).pooler
        return model.classifier(hidden if pooler is None else pooler(hidden))
    return hidden


def vit_head(model: Network, normed: Tensor) -> Tensor:
    """Pooling, the norm after it where there is one, and the classifier."""
    return model.forward_head(normed)


@dataclass(frozen=True, kw_only=True)
class Family:
    """How one family of classes is taken apart. Paths are attribute paths below the trunk."""

    name: str
    classes: tuple[str, ...]
    blocks: str
    norm: str | None
    head: Callable[[Network, Tensor], Tensor] = language_head
    package: str = "transformers"
    inputs: tuple[str, ...] = TEXT
    options: tuple[tuple[str, bool], ...] = (("use_cache", False),)  # a repeated block with a cache is silently wrong
    residual: bool = True  # a block is x + f(x); False where its norm comes after the addition
    longest: str = "max_position_embeddings"  # field of the config: how many tokens a text may have

    @property
    def sees_images(self) -> bool:
        return self.inputs == IMAGES

    def block_list(self, model: Network) -> tuple[nn.Module, ...]:
        """The blocks in the order in which they run."""
        return tuple(trunk_of(model).get_submodule(self.blocks).children())

    def read_out(self, model: Network, hidden: Tensor) -> Tensor:
        """Final norm and head of states (batch, tokens, dim), as the model itself ends."""
        normed = hidden if self.norm is None else trunk_of(model).get_submodule(self.norm)(hidden)
        return self.head(model, normed)


def _decoder(name: str, prefix: str, blocks: str = "layers", norm: str = "norm", head=language_head) -> Family:
    classes = (f"{prefix}ForCausalLM", f"{prefix}Model")
    return Family(name=name, classes=classes, blocks=blocks, norm=norm, head=head)


FAMILIES = (
    Family(name="gpt2", classes=("GPT2LMHeadModel", "GPT2Model"), blocks="h", norm="ln_f"),
    _decoder("gpt_neox", "GPTNeoX", norm="final_layer_norm"),
    _decoder("llama", "Llama"),
    _decoder("mistral", "Mistral"),
    _decoder("qwen2", "Qwen2"),
    _decoder("qwen3", "Qwen3"),
    _decoder("olmo", "Olmo"),
    _decoder("olmo2", "Olmo2"),
    _decoder("gemma", "Gemma"),
    _decoder("gemma2", "Gemma2", head=partial(language_head, finish=soft_capped)),
    _decoder("granite", "Granite", head=partial(language_head, finish=scaled)),
    _decoder("phi", "Phi", norm="final_layernorm"),
    _decoder("gpt_neo", "GPTNeo", blocks="h", norm="ln_f"),
    _decoder("falcon", "Falcon", blocks="h", norm="ln_f"),
    Family(name="mpt", classes=("MptForCausalLM", "MptModel"), blocks="blocks", norm="norm_f", longest="max_seq_len"),
    Family(
        name="bert",
        classes=("BertForMaskedLM", "BertForSequenceClassification", "BertForTokenClassification", "BertModel"),
        blocks="encoder.layer",
        norm=None,
        head=bert_head,
        options=(),
        residual=False,
    ),
    Family(
        name="vit",
        classes=("VisionTransformer",),
        blocks="blocks",
        norm="norm",
        head=vit_head,
        package="timm",
        inputs=IMAGES,
        options=(),
    ),
)


def family_of(model: nn.Module) -> Family:
    """The row of a model, by the names of its class and of the classes it derives from.

    Raises:
        InputError: no row knows the class; the sentence names the known ones and proposes a block list.
    """
    for ancestor in type(model).__mro__:
        for family in FAMILIES:
            if ancestor.__name__ in family.classes and ancestor.__module__.split(".")[0] == family.package:
                return family
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise InputError(
            f"no layered view of {type(model).__name__}: an encoder and a decoder are two rows of blocks, of which the "
            "second looks at the first one's end, and no one path leads through both"
        )
    known = ", ".join(name for family in FAMILIES for name in family.classes)
    proposal = propose_blocks(model)
    hint = f" (its blocks are probably {proposal!r})" if proposal else ""
    raise InputError(
        f"no layered view of {type(model).__name__}; known families: {known}; "
        f"add a row to lit_layers/models/families.py{hint}"
    )


def class_named(architecture: str) -> Any:
    """The class of transformers that a config.json names, in any capitals (MPT's say MPTForCausalLM); None without one.

    The repositories' own code, where that name comes from, is never run.
    """
    import transformers

    if (found := getattr(transformers, architecture, None)) is not None:
        return found
    same = [name for name in dir(transformers) if name.lower() == architecture.lower()]
    return getattr(transformers, same[0]) if same else None


def propose_blocks(model: nn.Module) -> str | None:
    """Path of the one ModuleList that holds nothing but transformers' checkpointing layers, where there is just one.

    That list is the block list of every text model of transformers 5 it was tried on (30 types).
    """
    found = [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) > 0 and all(map(_is_checkpointing_layer, module))
    ]
    return found[0] if len(found) == 1 else None


def _is_checkpointing_layer(module: nn.Module) -> bool:
    # By name: a model of this kind has transformers loaded already, any other model need not load it.
    return any(base.__name__ == "GradientCheckpointingLayer" for base in type(module).__mro__)
