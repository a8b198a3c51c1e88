"""How a sentence encoder makes a vector of a text, as its own files say: those of sentence-transformers.

They are data; nothing in them is run. What a `type` of modules.json names decides only what is expected beside it.
"""

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import with_config
from typing_extensions import TypedDict

from lit_layers import schema
from lit_layers.analyses.probes.task_features import TextPooling
from lit_layers.errors import InputError

MODULES = "modules.json"
_ADVICE = "with --modules none pooled states are taken as they are"
_REMEDY = f"download or save the model again; {_ADVICE}"
_POOLINGS: Mapping[str, TextPooling] = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
# The switches of older files, by the mode that each stands for; without any of them it is the mean.
_SWITCHES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_UNLIMITED = 10**9  # how a tokenizer says that it has no limit: int(1e30)


@with_config(schema.OPEN)
class _Module(TypedDict):
    path: str
    type: str


@dataclass(frozen=True)
class SentenceEncoder:
    """What modules.json and the files beside it say.

    Args:
        pooling: of the states after the last block and the final norm.
        normalizes: whether a vector has length 1.
        similarity: what vectors are compared by.
        max_tokens: of a text, the tokenizer's special ones included; None: as many as the model takes.
        lowercases: texts before they are read.
        prompts: what stands before a text, by the name of a task, of a kind of tasks, or query and document.
        default_prompt: the name of the one before a text for which there is no other.
    """

    pooling: TextPooling
    normalizes: bool = False
    similarity: Literal["cosine", "dot"] = "cosine"
    max_tokens: int | None = None
    lowercases: bool = False
    prompts: tuple[tuple[str, str], ...] = ()
    default_prompt: str | None = None

    def __str__(self) -> str:
        parts = {"normalized": self.normalizes, "dot product": self.similarity == "dot", "prompts": self.prompts}
        return " + ".join([self.pooling, *(name for name, holds in parts.items() if holds)])

    @property
    def named(self) -> dict[str, str]:
        """The prompts by name: of questions and documents there always is one, if an empty one."""
        return {"query": "", "document": "", **dict(self.prompts)}

    def text(self, text: str, prompt_name: str | None) -> str:
        """What the model reads of a text with the prompt of a name; None: with the default one."""
        whole = self.named.get(prompt_name or self.default_prompt or "", "") + text
        return whole.lower() if self.lowercases else whole

    def facts(self, follows: bool) -> dict[str, Any]:
        """What a result says of a layer at which pooling, normalisation and similarity hold, or do not."""
        pooled = {"pooling": self.pooling} if follows else {}
        how = {"normalized": follows and self.normalizes, "similarity": self.similarity if follows else "cosine"}
        return pooled | how | {"prompts": dict(self.prompts)}


def sentence_encoder(read: Callable[[str], bytes]) -> SentenceEncoder | None:
    """What a model says of itself as an encoder of sentences; None where it has no modules.json.

    Args:
        read: the content of a file of the model; one that is not there is a FileNotFoundError, a KeyError, or an
            InputError because of one.

    Raises:
        InputError: a module that is not Transformer, Pooling or Normalize, a way of pooling that is not by the mean,
            the first or the last token, files that are damaged.
    """
    modules = _read(read, MODULES, list[_Module])
    if modules is None:
        return None
    kinds = [module["type"].rpartition(".")[2] for module in modules]
    usual = all(module["type"].startswith("sentence_transformers.") for module in modules)
    if not usual or kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]):
        types = ", ".join(module["type"] for module in modules) or "nothing"
        raise _unlike(MODULES, "sentence_transformers' Transformer, Pooling, and perhaps Normalize", types)
    about = _read(read, "config_sentence_transformers.json") or {}
    prompts = {name: prompt for name, prompt in about.get("prompts", {}).items() if prompt}
    similarity = about.get("similarity_fn_name") or "cosine"
    if similarity not in ("cosine", "dot"):
        raise _unlike("similarity_fn_name", "cosine or dot", similarity)
    for module in modules[2:]:
        _expect(read, f"{module['path']}/config.json", module_input_name="sentence_embedding")
    pooling = f"{modules[1]['path']}/config.json"
    if prompts:
        _expect(read, pooling, include_prompt=True)
    return SentenceEncoder(
        pooling=_pooling(read, pooling),
        normalizes=len(kinds) == 3,
        similarity=similarity,
        **_transformer(read),
        prompts=tuple(sorted(prompts.items())),
        default_prompt=about.get("default_prompt_name"),
    )


def save_sentence_encoder(folder: Path, pooling: TextPooling, dim: int, max_tokens: int | None) -> None:
    """Write the files by which sentence-transformers gives pooled states of the model in a folder as its vectors."""
    switches = {name: _POOLINGS.get(mode) == pooling for name, mode in _SWITCHES.items()}
    kinds = {"Transformer": "", "Pooling": "1_Pooling"}
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (kind, path) in enumerate(kinds.items())
    ]
    contents = {
        MODULES: modules,
        "sentence_bert_config.json": {"max_seq_length": max_tokens, "do_lower_case": False},
        "1_Pooling/config.json": {"word_embedding_dimension": dim, **switches},
    }
    for name, content in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _pooling(read: Callable[[str], bytes], place: str) -> TextPooling:
    """The one way of pooling that its file names."""
    config = _read(read, place)
    if config is None:
        raise InputError(f"{MODULES} names {place}, which is not there: {_REMEDY}")
    switched = [_SWITCHES.get(name, name) for name, on in config.items() if name.startswith("pooling_mode_") and on]
    modes = config.get("pooling_mode", switched or "mean")
    modes = [modes] if isinstance(modes, str) else modes
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise _unlike(place, f"pooling by one of {', '.join(_POOLINGS)}", " and ".join(modes) or "nothing")
    return _POOLINGS[modes[0]]


def _transformer(read: Callable[[str], bytes]) -> dict[str, Any]:
    """The limit of tokens and whether texts are lower case. Without a limit of its own the tokenizer's counts."""
    place = "sentence_bert_config.json"
    usual = {"transformer_task": "feature-extraction", "module_output_name": "token_embeddings"}
    _expect(read, place, **usual, query_expansion=None)
    config = _read(read, place) or {}
    limit = config.get("max_seq_length")
    if limit is None:
        limit = (_read(read, "tokenizer_config.json") or {}).get("model_max_length")
    limited = isinstance(limit, int) and 0 < limit < _UNLIMITED
    return {"max_tokens": limit if limited else None, "lowercases": config.get("do_lower_case", False)}


def _expect(read: Callable[[str], bytes], place: str, **usual: Any) -> None:
    """Refuses a field of a file that is there and has another value."""
    config = _read(read, place) or {}
    for name, value in usual.items():
        if config.get(name) not in (None, value):
            raise _unlike(f"{place}: {name}", value, config[name])


def _read(read: Callable[[str], bytes], path: str, kind: Any = dict[str, Any]) -> Any:
    """The content of a file; None where there is none."""
    try:
        return schema.parse(read(path), kind, path, _REMEDY)
    except (FileNotFoundError, KeyError):
        return None
    except InputError as error:
        if type(error.__cause__) is FileNotFoundError:  # what the Hub's client raises without a network is one, too
            return None
        if not _is_offline(error):
            raise
        if path == MODULES:  # a snapshot of a model that has none does not say so, and most models have none
            warnings.warn(f"{path} is not in the cache, and the Hub is not asked: taken as not there", stacklevel=4)
        return None


def _is_offline(error: BaseException | None) -> bool:
    """Whether a file is missing because HF_HUB_OFFLINE is set."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    while error is not None and not isinstance(error, OfflineModeIsEnabled):
        error = error.__cause__
    return error is not None


def _unlike(place: str, expected: Any, got: Any) -> InputError:
    return InputError(f"{place}: expected {expected}, got {got}: {_ADVICE}")
