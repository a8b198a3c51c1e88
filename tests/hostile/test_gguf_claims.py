"""GGUF files whose counts, lengths and values are lies: each is damaged, in a sentence."""

import struct
from pathlib import Path

import pytest

from lit_layers.errors import InputError
from lit_layers.files.gguf_files import GgufFile
from lit_layers.models.saved import load

pytest.importorskip("gguf")
U32, F32, TEXT, ARRAY, U64, I64 = 4, 6, 8, 9, 10, 11


def text(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


def field(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def file(*fields: bytes, num_fields: int | None = None, num_tensors: int = 0, rest: bytes = b"") -> bytes:
    number = len(fields) if num_fields is None else num_fields
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, number) + b"".join(fields) + rest


LLAMA = field(b"general.architecture", TEXT, text(b"llama"))
NESTED = struct.pack("<IQ", ARRAY, 1) * 5000
SIZES = {b"block_count": 2, b"embedding_length": 16, b"attention.head_count": 2, b"context_length": 32}


def llama(name: bytes, kind: int, value: bytes) -> bytes:
    """A file of a Llama of which one size is another value."""
    sizes = [field(b"llama." + each, U32, struct.pack("<I", size)) for each, size in SIZES.items() if each != name]
    return file(LLAMA, *sizes, field(b"llama." + name, kind, value))


LIES = {
    "more fields than bytes": file(LLAMA, num_fields=2**62),
    "more tensors than bytes": file(LLAMA, num_tensors=2**62),
    "a name of 2^63 bytes": file(struct.pack("<Q", 2**63) + b"x" * 64),
    "a text of 2^63 bytes": file(text(b"general.architecture") + struct.pack("<IQ", TEXT, 2**63)),
    "an array of 2^60 numbers": file(LLAMA, field(b"a.b", ARRAY, struct.pack("<IQ", U32, 2**60))),
    "an array of 2^40 texts": file(LLAMA, field(b"tokenizer.ggml.tokens", ARRAY, struct.pack("<IQ", TEXT, 2**40))),
    "arrays without end": file(LLAMA, field(b"a.b", ARRAY, NESTED)),
    "a kind that is none": file(LLAMA, field(b"a.b", 77, bytes(64))),
    "2^31 dimensions": file(LLAMA, num_tensors=1, rest=text(b"t") + struct.pack("<I", 2**31) + bytes(64)),
    "an architecture that is a number": file(field(b"general.architecture", U32, struct.pack("<I", 5))),
    "an architecture that is no text": file(field(b"general.architecture", TEXT, text(b"\xff\xfe"))),
    "nothing behind its first bytes": b"GGUF",
    "blocks that are text": llama(b"block_count", TEXT, text(b"x")),
    "a fraction of a width": llama(b"embedding_length", F32, struct.pack("<f", 2.5)),
    "heads that are a list": llama(b"attention.head_count", ARRAY, struct.pack("<IQ", TEXT, 1) + text(b"x")),
    "a length that is NaN": llama(b"context_length", F32, struct.pack("<f", float("nan"))),
}


@pytest.mark.parametrize("name", LIES)
def test_a_file_that_lies_is_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(LIES[name])
    with pytest.raises(InputError, match=r"^\S+model\.gguf cannot be read as a GGUF file: \w*[Ee]rror: [^\n]+$"):
        load(path)
    with pytest.raises(InputError, match="cannot be read as a GGUF file"):
        assert GgufFile(path).quantization


WRONG = [(0, U32, "<I"), (-1, I64, "<q"), (2**31, U32, "<I"), (2**62, U64, "<Q")]


@pytest.mark.parametrize(
    ("name", "value", "kind", "form"),
    [(name, *wrong) for name in SIZES for wrong in WRONG if name != b"context_length" or wrong[0] <= 0],
)
def test_sizes_that_no_model_has_are_refused_before_it_is_built(name, value, kind, form, tmp_path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(llama(name, kind, struct.pack(form, value)))
    with pytest.raises(InputError, match="cannot be (read|loaded)"):  # not for the weights that it does not hold
        load(path)
