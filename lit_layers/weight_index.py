"""The index of a model in several files: `model.safetensors.index.json`, as somebody else may have written it."""

import json
from pathlib import PurePosixPath


def named_shards(content: str | bytes) -> dict[str, str]:
    """The file of every tensor.

    Raises:
        ValueError: no such index, or one that names a file outside its folder.
    """
    try:
        shards = json.loads(content)["weight_map"]
        names = [PurePosixPath(shard) for shard in shards.values()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError("is damaged") from error
    for name in names:  # links are followed: in a cache of the Hub every file is one
        if name.is_absolute() or ".." in name.parts or "\\" in str(name):
            raise ValueError(f"names {name}, a file outside its folder")
    return shards
