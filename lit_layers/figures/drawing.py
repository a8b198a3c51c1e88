"""Pictures of Vega-Lite, and Vega's script for pages, made by vl-convert: run as a process, never imported.

vl-convert draws in a thread of its own and keeps Python's lock meanwhile: training in the same process would stand
still, and in a forked process, which lacks that thread, drawing would never end.
"""

import base64
import json
import os
import sys
import traceback
from typing import Any


def main() -> None:
    """Answer the standard input, formats and specifications, by a line: pictures, or why there are none.

    Without a format the answer is the script.
    """
    import vl_convert  # the only import of it in the package

    formats: dict[str, Any] = {".svg": str.encode, ".png": lambda svg: vl_convert.svg_to_png(svg, scale=2)}
    formats[".pdf"] = vl_convert.svg_to_pdf
    suffixes, specs = json.load(sys.stdin.buffer)
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed is no answer
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
