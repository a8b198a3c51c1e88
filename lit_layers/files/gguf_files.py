"""GGUF files, the format of llama.cpp: config, tokenizer and weights in one file, as transformers reads them.

Weights are computed back from their quantized blocks to floats: these are the numbers that are measured, and they are
those that were quantized, rounded. The package gguf is optional.
"""

import functools
import importlib.util
import re
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from lit_layers.errors import InputError
from lit_layers.files.durable import on_disk
from lit_layers.files.hub import has_kernels

SUFFIX = ".gguf"
OF_WEIGHTS_ALONE = (".pt", ".pth", ".bin", ".safetensors", ".tar")  # the last of timm: checkpoint-9.pth.tar
LOAD_THEM = "a file of weights alone is loaded in Python, into the network that it is of, and measured by watch"
_CANNOT_READ = (
    *(OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError),
    *(ArithmeticError, MemoryError, struct.error, StrictDataclassError),  # of counts and values that a file claims
)
_NOT_READ = "which is not read from a GGUF file: take the model as a folder with config.json and safetensors"
_SCALED = "rope_freqs.weight"  # what rotary frequencies are divided by, in files of Llama 3.1 and later
_SCALINGS = (8.0, 32.0)  # of Llama 3.1 and of the small models of 3.2
_LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Keys that decide the shapes of weights, which are counted, or no number of a forward pass.
_HARMLESS = re.compile(r".*(_length|_count)|vocab_size|tensor_data_layout|pooling_type|rope\.(scaling\..*|freq_base.*)")
# Names of GPT-2's way to split a text, and of the ways that differ from it only in that each digit is apart.
_SPLITS_OF_GPT2 = ("gpt-2", "gpt2", "mpt", "olmo", "jais", "phi-2", "trillion", "granite-docling", "modern-bert")
_DIGITS_APART = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")


def is_gguf(name: str | Path) -> bool:
    """Whether a model is named as such a file."""
    return Path(name).suffix == SUFFIX


def no_folder(name: str | Path) -> InputError:
    """What is said of a file in the place of a folder with a model: what to name instead."""
    path = Path(name)
    if path.suffix in (*OF_WEIGHTS_ALONE, ".json") and (path.parent / "config.json").is_file():
        advice = f"name its folder, {path.parent}"
    elif path.suffix == ".ckpt":
        advice = "name its folder, with the config.json of the model in it"
    elif path.suffix in OF_WEIGHTS_ALONE:
        advice = LOAD_THEM
    else:
        advice = "a GGUF file is read as a whole, by analyze, intervene and mteb without --offload or --untrained"
    return InputError(f"expected a folder with a model, {name} is a file: {advice}")


def refuse_unreadable(path: Path) -> None:
    """Refuses what cannot be read as such a file.

    Raises:
        InputError: there is no such file, or a package is not installed that reading it takes.
    """
    if not path.is_file():
        raise InputError(f"expected a GGUF file, {path} does not exist")
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise InputError(f"{path}: {package}, which reads it, is not installed: pip install lit_layers[gguf]")


class GgufFile:
    """One file, of which nothing is read before it is asked for.

    Raises:
        InputError: see `refuse_unreadable`; on use, a file that is damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        refuse_unreadable(self.path)

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        """The content of a config.json.

        Raises:
            InputError: an architecture that transformers does not read from GGUF.
        """
        settings = dict(self._claims)
        settings.pop("_model_name_or_path", None)
        if settings.get("model_type") == "gpt2":  # transformers leaves both under names that GPT2Config does not know
            settings["n_positions"] = settings.pop("n_ctx", 1024)
            settings["n_inner"] = settings.pop("feed_forward_length", None)
        if _SCALED in self._tensors:
            settings["rope_parameters"] = self._scaling(settings)
        self._refuse_unread_keys(settings)
        scaling = self._field("rope.scaling.type")
        if scaling not in (None, "none") and not {"rope_scaling", "rope_parameters"} & settings.keys():
            raise InputError(f"{self.path}: its rotary frequencies are scaled ({scaling}), {_NOT_READ}")
        return settings

    def _refuse_unread_keys(self, settings: dict[str, Any]) -> None:
        """Refuse keys that transformers does not read and that may change the model's numbers.

        Raises:
            InputError: such a key, whose value is not that of the field of this name in the config either.
        """
        from transformers import AutoConfig
        from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

        config = AutoConfig.for_model(**settings)
        fields = GGUF_CONFIG_MAPPING.get(config.model_type) or GGUF_CONFIG_MAPPING.get(self._field(""))
        if fields is None:  # transformers then reads this architecture by a function of its own
            return
        read = {name for name, field in fields.items() if field is not None}
        heads = getattr(config, "num_attention_heads", None)  # Mamba has none
        head = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
        rotary = getattr(config, "partial_rotary_factor", None) or 1.0
        rotary = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", rotary)
        meant = {"attention.causal": True, "rope.dimension_count": int(head * rotary)}
        prefix = f"{self._field('')}."
        for key in self._reader.fields:
            name = key.removeprefix(prefix)
            if name == key or name in read or (_HARMLESS.fullmatch(name) and name not in meant):
                continue
            value = self._field(name)
            if name not in meant and not value:  # switched off
                continue
            if value != meant.get(name, getattr(config, name.rpartition(".")[2], None)):
                raise InputError(f"{self.path}: {key} is {str(value)[:80]}, {_NOT_READ}")

    @functools.cached_property
    def _claims(self) -> dict[str, Any]:
        """The settings as transformers reads them, which believes no count beyond the end of the file."""
        from transformers import AutoConfig, PreTrainedConfig

        with self._reading():
            settings, _ = PreTrainedConfig.get_config_dict(self.path.parent, gguf_file=self.path.name)
            AutoConfig.for_model(**settings)  # values of other kinds than the model's
        return settings

    @functools.cached_property
    def quantization(self) -> str:
        """How most of the weights are stored, such as Q4_K."""
        sizes: Counter[str] = Counter()
        for tensor in self._tensors.values():
            sizes[tensor.tensor_type.name] += int(tensor.n_elements)
        return sizes.most_common(1)[0][0]

    def tokenizer(self) -> tuple[str, str | None]:
        """The tokenizer as the JSON of the library tokenizers, and the token that ends a text.

        Raises:
            InputError: a way to split texts that transformers does not know.
        """
        self._refuse_unknown_split()
        return _tokenizer(self.path, *on_disk(self.path))

    def wrapped_tokenizer(self) -> Any:
        """The tokenizer as transformers wraps it."""
        from transformers import AutoTokenizer

        self._refuse_unknown_split()
        with self._reading():
            return AutoTokenizer.from_pretrained(self.path.parent, gguf_file=self.path.name)

    def _refuse_unknown_split(self) -> None:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

        fields = {name: self._reader.fields.get(f"tokenizer.ggml.{name}") for name in ("model", "pre", "merges")}
        if fields["model"] is None or fields["model"].contents() != "gpt2":
            return
        split = fields["pre"].contents() if fields["pre"] else {"gpt2": "gpt-2"}.get(self._field(""), "no name")
        merges = fields["merges"].contents() if fields["merges"] and split in _DIGITS_APART else ()
        is_known = split in (*GGUF_PRE_TOKENIZER_SPLITS, *_SPLITS_OF_GPT2, *_DIGITS_APART)
        if not is_known or any(re.search(r"\d \d|Ġ \d", merge) for merge in merges):
            raise InputError(
                f"{self.path}: its tokenizer splits texts by the rule {split!r} (tokenizer.ggml.pre), {_NOT_READ}"
            )

    def load(self, kind: Any, dtype: Any) -> Any:
        """The model, of a class of transformers, on the CPU; it remembers nothing of having been quantized.

        Raises:
            InputError: a file that holds more or fewer numbers than the model.
        """
        import transformers

        self._refuse_code()
        plain = getattr(transformers, "GgufConfig", None)  # before 5.20 nothing stays packed
        options: dict[str, Any] = {} if plain is None else {"quantization_config": plain(dequantize=True)}
        options |= {"config": transformers.AutoConfig.for_model(**self.settings), "dtype": dtype}
        options |= {"trust_remote_code": False, "output_loading_info": True}
        with self._reading():
            model, report = kind.from_pretrained(self.path.parent, gguf_file=self.path.name, **options)
        self._refuse_other_weights(model, report)
        for owner, name in ((model.config, "quantization_config"), (model, "hf_quantizer")):
            if hasattr(owner, name):  # what has been quantized cannot be saved
                delattr(owner, name)
        model.is_quantized = False
        return model

    def _refuse_other_weights(self, model: Any, report: dict[str, Any]) -> None:
        """transformers leaves out, without a word, what it has no place for, and draws at random what is not there."""
        if lost := sorted(report.get("missing_keys", ())):
            raise InputError(f"the weights of {self.path} do not fill {type(model).__name__}: missing_keys {lost[:3]}")
        tied = {"output.weight"} if model.config.tie_word_embeddings else set()
        read = {name for name in self._tensors if name not in tied | {_SCALED}}
        stored = sum(int(self._tensors[name].n_elements) for name in read)
        if (held := sum(tensor.numel() for tensor in model.parameters())) != stored:
            raise InputError(
                f"{self.path} holds {stored:,} weights, and {type(model).__name__} as transformers reads it {held:,}: "
                f"it would not be the same model, {_NOT_READ}"
            )

    def _scaling(self, settings: dict[str, Any]) -> dict[str, Any]:
        """The scaling of rotary frequencies in Llama 3 that a file stores as factors.

        Raises:
            InputError: factors of another scaling.
        """
        import numpy as np

        base = settings.get("rope_theta", 10000.0)
        dim = settings.get("head_dim") or settings["hidden_size"] // settings["num_attention_heads"]
        stored = np.asarray(self._tensors[_SCALED].data, dtype=np.float64).reshape(-1)
        wavelengths = 2 * np.pi * base ** (np.arange(0, dim, 2) / dim)
        for factor in _SCALINGS if len(stored) == len(wavelengths) else ():
            long, high, low = 8192, _LLAMA3["high_freq_factor"], _LLAMA3["low_freq_factor"]
            smooth = np.clip((long / wavelengths - low) / (high - low), 0.0, 1.0)
            if np.allclose(1 / ((1 - smooth) / factor + smooth), stored, rtol=1e-3):
                return {**_LLAMA3, "factor": factor, "rope_theta": base}
        raise InputError(
            f"{self.path}: its rotary frequencies are scaled ({_SCALED}) in no way that is known, {_NOT_READ}"
        )

    def _refuse_code(self) -> None:
        """Of some architectures transformers would unpack weights by a program that it downloads."""
        try:
            from transformers.integrations.gguf import is_gguf_arch_supported
        except ImportError:
            return
        architecture = self._field("")
        if is_gguf_arch_supported(architecture) and has_kernels():
            raise InputError(
                f"{self.path}: transformers would download a program of the Hub to read a GGUF file of {architecture}, "
                "as the package kernels is installed: uninstall it"
            )

    @functools.cached_property
    def _reader(self) -> Any:
        from gguf import GGUFReader

        _ = self._claims  # this reader would count to 2^60
        with self._reading():
            return GGUFReader(self.path)

    def _field(self, name: str) -> Any:
        """The architecture, or what the file says of it under a name; None where it says nothing."""
        with self._reading():
            architecture = self._reader.fields["general.architecture"].contents()
        field = self._reader.fields.get(f"{architecture}.{name}")
        return (field and field.contents()) if name else architecture

    @functools.cached_property
    def _tensors(self) -> dict[str, Any]:
        return {tensor.name: tensor for tensor in self._reader.tensors}

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except _CANNOT_READ as error:
            why = " ".join(str(error).split())[:300]
            raise InputError(f"{self.path} cannot be read as a GGUF file: {type(error).__name__}: {why}") from error


@functools.lru_cache(maxsize=4)  # a vocabulary of 100,000 tokens takes seconds
def _tokenizer(path: Path, *_: int) -> tuple[str, str | None]:
    made = GgufFile(path).wrapped_tokenizer()
    return made.backend_tokenizer.to_str(), made.eos_token
