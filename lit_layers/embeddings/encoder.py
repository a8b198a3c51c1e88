"""One layer of a model as an encoder that mteb can evaluate."""

from typing import TYPE_CHECKING, Any

import numpy as np

from lit_layers.embeddings.store import TaskEmbeddings

if TYPE_CHECKING:
    from mteb.models.model_meta import ModelMeta


class LayerEncoder:
    """What mteb's `EncoderProtocol` asks for: the embeddings of one layer, compared by their cosine.

    No instruction and no normalisation: the text goes in as it is, and float32 comes out.
    """

    def __init__(self, embeddings: TaskEmbeddings, layer: int) -> None:
        self.embeddings, self.layer = embeddings, layer

    def encode(self, inputs: Any, **_: Any) -> np.ndarray:
        """The embeddings (texts, dim) of the texts that mteb hands over in batches."""
        texts = [text for batch in inputs for text in batch["text"]]
        return self.embeddings.of(texts, self.layer)

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Any:
        """Cosines (first, second)."""
        from mteb.similarity_functions import cos_sim

        return cos_sim(embeddings1, embeddings2)

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Any:
        """Cosines (pairs,)."""
        from mteb.similarity_functions import pairwise_cos_sim

        return pairwise_cos_sim(embeddings1, embeddings2)

    @property
    def mteb_model_meta(self) -> "ModelMeta":
        from mteb.models.model_meta import ModelMeta

        return ModelMeta.create_empty({"name": f"lit_layers/layer_{self.layer:03d}", "revision": "no_revision"})
