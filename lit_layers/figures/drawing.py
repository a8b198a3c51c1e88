"""Rendering with vl-convert: pictures of Vega-Lite specifications, and the JavaScript source of Vega for pages.

This file runs as a separate process and is never imported. vl-convert draws in a thread of its own while it holds
Python's GIL. In the training process, it would therefore stall training. A forked process lacks that thread, so
drawing would hang there.
"""

import base64
import json
import os
import sys
import traceback
from typing import Any


def main() -> None:
    """Read file suffixes and specifications from standard input, and write the pictures or an error to standard output.

    If there are no suffixes, the output is the JavaScript source of Vega, Vega-Lite and vega-embed.
    """
    import vl_convert  # imported nowhere else in the package

    formats: dict[str, Any] = {".svg": str.encode, ".png": lambda svg: vl_convert.svg_to_png(svg, scale=2)}
    formats[".pdf"] = vl_convert.svg_to_pdf
    suffixes, specs = json.load(sys.stdin.buffer)
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # send everything else that is printed to stderr
    drawn: Any = []
    try:
        for spec in specs:
            svg = vl_convert.vegalite_to_svg(spec)
            drawn.append([base64.b64encode(formats[suffix](svg)).decode() for suffix in suffixes])
        answer = {"drawn": drawn if suffixes else vl_convert.javascript_bundle()}  # pyright: ignore[reportCallIssue]
    except Exception as error:
        answer = {"error": traceback.format_exception_only(error)[0].splitlines()[0]}
    output.write(json.dumps(answer))


if __name__ == "__main__":
    main()
