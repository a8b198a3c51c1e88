"""Padded vocabularies: rows that make a matrix product faster and belong to no token."""

from torch import Tensor, nn

from lit_layers.models.families import Network

TRUE_SIZE = "unpadded_vocab_size"  # the field of a padded model's config that holds the number of real tokens


def true_vocab_size(model: Network) -> int:
    """Number of real tokens, without padding rows."""
    return getattr(model.config, TRUE_SIZE, None) or model.config.vocab_size


def pad_vocabulary_(model: Network, multiple: int) -> None:
    """Adds zero rows to the embedding and the head up to the next multiple; logits of real tokens stay as they are.

    The model stays a plain transformers model: `config.vocab_size` counts all rows, `config.unpadded_vocab_size` the
    real tokens.

    Raises:
        ValueError: the vocabulary is padded already, or `multiple` is not positive.
    """
    if multiple < 1:
        raise ValueError(f"a vocabulary is padded to a positive multiple, got {multiple}")
    if hasattr(model.config, TRUE_SIZE):
        raise ValueError(
            f"the vocabulary is padded already, from {true_vocab_size(model)} to {model.config.vocab_size}"
        )
    size = model.config.vocab_size
    model.resize_token_embeddings(-(-size // multiple) * multiple, mean_resizing=False)
    setattr(model.config, TRUE_SIZE, size)
    for parameter in _vocabulary_parameters(model):
        parameter.data[size:] = 0


def unpadded_state(model: Network) -> dict[str, Tensor]:
    """The state dict without padding rows: views of the model's own tensors, nothing is copied."""
    state = model.state_dict(keep_vars=True)
    padded = {id(parameter) for parameter in _vocabulary_parameters(model)} if is_padded(model) else set()
    return {
        name: tensor.detach()[: true_vocab_size(model)] if id(tensor) in padded else tensor.detach()
        for name, tensor in state.items()
    }


def is_padded(model: Network) -> bool:
    """Whether the model carries padding rows."""
    return hasattr(getattr(model, "config", None), TRUE_SIZE)


def _vocabulary_parameters(model: Network) -> list[nn.Parameter]:
    """Parameters with a row for each token: embedding, head and its bias."""
    parts = [part for part in (model.get_input_embeddings(), model.get_output_embeddings()) if part is not None]
    return [parameter for part in parts for parameter in part.parameters(recurse=False)]
