"""`lit-layers prepare`: a corpus becomes token shards."""

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

    A .txt file is one document, or several divided by lines that say <|endoftext|> (or --separator). A row of a
    .parquet file and a line of a .jsonl file is one document, its text in --column.

    Args:
        source: openwebtext, wikitext, python (the standard library's source), a Hub data set as
            ORG/NAME[@REVISION][:CONFIG], or a .txt, .jsonl or .parquet file or a folder of them
        tokenizer: a name on the Hub (gpt2), a local path, or bpe:SIZE to train one
        root: folder to write to
        max_documents: read at most so many documents (of each split of the source)
        column: the column with the text (default: text)
        separator: the line that ends a document of a .txt file, "" for a blank one
        validation: share of the documents to hold out (default: 0.01; python: 0.1)
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
