"""Pictures of Vega-Lite, and Vega's script for pages, made by vl-convert: run as a process, never imported.

vl-convert draws in a thread of its own and keeps Python's lock meanwhile: training in the same process would stand
still, and in a forked process, which lacks that thread, drawing would never end.
"""

import base64
import json
import os
import re
import sys
import traceback
from typing import Any

_UNPRINTABLE = re.compile("[^\\t\\n\\r\\x20-\\x7e\\x80-\\ud7ff\\ue000-\\ufffd\\U00010000-\\U0010ffff]")


def main() -> None:
    """Answer the standard input, formats and specifications, by a line: pictures, or why there are none.

    Without a format the answer is the script.
    """
    import vl_convert  # the only import of it in the package

    formats: dict[str, Any] = {".svg": str.encode, ".png": lambda svg: vl_convert.svg_to_png(svg, scale=2)}
    formats[".pdf"] = vl_convert.svg_to_pdf
    suffixes, specs = json.load(sys.stdin)
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed is no answer
    drawn: Any = []
    try:
        for spec in _printable(specs):
            svg = _renumbered(vl_convert.vegalite_to_svg(spec))
            drawn.append([base64.b64encode(formats[suffix](svg)).decode() for suffix in suffixes])
        answer = {"drawn": drawn if suffixes else vl_convert.javascript_bundle()}  # pyright: ignore[reportCallIssue]
    except Exception as error:
        answer = {"error": traceback.format_exception_only(error)[0].splitlines()[0]}
    output.write(json.dumps(answer))


def _printable(part: Any) -> Any:
    """With a replacement character for those that SVG cannot hold, of which vl-convert dies."""
    if isinstance(part, str):
        return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", part)
    if isinstance(part, dict):
        return {name: _printable(each) for name, each in part.items()}
    return [_printable(each) for each in part] if isinstance(part, list) else part


def _renumbered(svg: str) -> str:
    """Number clips and gradients from 0, as they count on from picture to picture, so that equal charts stay equal."""
    numbers: dict[str, dict[str, int]] = {"clip": {}, "gradient_": {}}  # each kind has a count of its own

    def numbered(at: re.Match[str]) -> str:
        of_kind = numbers[at[2]]
        return f"{at[1]}{at[2]}{of_kind.setdefault(at[3], len(of_kind))}"

    return re.sub(r'(id="|url\(#)(clip|gradient_)(\d+)', numbered, svg)


if __name__ == "__main__":
    main()
