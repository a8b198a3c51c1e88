"""`lit-layers prepare`: a corpus becomes token shards."""

import argparse
import os
import sys
import textwrap
from pathlib import Path
from typing import NoReturn

from lit_layers.errors import InputError

INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see `{self.prog} --help`")


def main(argv: list[str]) -> int:
    """Prepares what the options say and prints what came out; 130 where Ctrl-C cut it short."""
    options = _parser().parse_args(argv)
    # Hub progress bars would write over ours; read at import, so set before.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from lit_layers.data.preparing import prepare

    try:
        shards = prepare(progress=True, **vars(options))
    except KeyboardInterrupt:
        print(f"interrupted: run the same command again to continue in {options.out}", file=sys.stderr)
        return INTERRUPTED
    header = shards.header
    for split in ("train", "validation"):
        counts = header["splits"][split]
        print(
            f"{split:10} {counts['documents']:>12,} documents {counts['tokens']:>15,} tokens "
            f"{counts['bytes'] / 1e6:>10,.1f} MB of text"
        )
    left_out = header["left_out"]
    print(f"left out: {left_out['empty']} empty, {left_out['duplicate']} training documents that validation has too")
    print(
        f"tokenizer {header['tokenizer']['spec']} ({shards.vocab_size:,} tokens, {header['dtype']}) -> {shards.folder}"
    )
    print(f"checksum  sha256 {shards.checksum}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="lit-layers prepare",
        description="Tokenize a corpus into memory-mapped shards. Interrupted, it continues when run again.",
        epilog=textwrap.dedent("""\
            A .txt file is one document, or several divided by lines that say <|endoftext|> (or --separator).
            A row of a .parquet file and a line of a .jsonl file is one document, its text in --column."""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--source",
        required=True,
        help="openwebtext, wikitext, python (the standard library's source), a Hub data set ORG/NAME[:CONFIG], or a "
        ".txt, .jsonl or .parquet file or a folder of them",
    )
    parser.add_argument(
        "--tokenizer", required=True, help="a name on the Hub (gpt2), a local path, or bpe:SIZE to train one"
    )
    parser.add_argument("--out", required=True, type=Path, help="folder to write to")
    parser.add_argument("--workers", type=int, help="processes (default: all cores; one for a small corpus)")
    parser.add_argument("--max-documents", type=int, help="read at most so many (of each split the source brings)")
    parser.add_argument("--column", help="column of the text (default: text)")
    parser.add_argument("--separator", help='line that ends a document of a .txt file, "" for a blank one')
    parser.add_argument("--validation", type=float, help="share of documents to hold out (default: 0.01; python: 0.1)")
    return parser
