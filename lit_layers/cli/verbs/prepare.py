"""`lit-layers prepare`: tokenize a corpus into shards."""

from pathlib import Path

SEPARATOR = "<|endoftext|>"


def prepare(
    *,
    source: str,
    tokenizer: str,
    root: Path,
    max_documents: int | None = None,
    column: str | None = None,
    separator: str = SEPARATOR,
    validation: float | None = None,
) -> int:
    """Tokenize a corpus into memory-mapped shards.

    A .txt file is one document, or several if lines with <|endoftext|> (or --separator) divide it. In .parquet and
    .jsonl files each row or line is one document, with its text in --column.

    Args:
        source: openwebtext, wikitext, python (source code of the standard library), a Hub data set as
            ORG/NAME[@REVISION][:CONFIG], or a .txt, .jsonl or .parquet file, or a folder of these
        tokenizer: a name on the Hub (gpt2), a local path, or bpe:SIZE to train one
        root: folder to write to
        max_documents: read at most this many documents of each split
        column: the column with the text (default: text)
        separator: the line that ends a document of a .txt file; "" for an empty line
        validation: share of the documents to hold out (default: 0.01; for python: 0.1)
    """
    from lit_layers.data import preparing

    shards = preparing.prepare(
        source,
        tokenizer,
        root,
        column=column,
        separator=None if separator == SEPARATOR else separator,
        validation=validation,
        max_documents=max_documents,
        progress=True,
    )
    for split, counts in shards.header["splits"].items():
        print(f"{split}: {counts['documents']:,} documents, {counts['tokens']:,} tokens")
    left_out = shards.header["left_out"]
    print(f"left out: {left_out['empty']} empty, {left_out['duplicate']} training documents that validation has too")
    print(f"{shards.folder}: sha256 {shards.checksum}")
    return 0
