"""Skip drawing in tests that do not check figures: a process of vl-convert costs half a second."""

import base64
import json
from collections.abc import Sequence
from typing import Any

import pytest

from lit_layers.figures import vega
from lit_layers.report import template

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="


def _drawing(*suffixes: str, specs: Sequence[Any] = ()) -> Any:
    json.dumps(specs)
    return [[PNG] * len(suffixes)] * len(specs) if suffixes else ""


def leave_undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace every picture with one grey pixel, and leave the script out of pages."""
    assert base64.b64decode(PNG).startswith(b"\x89PNG")
    monkeypatch.setattr(vega, "_drawing", _drawing)
    monkeypatch.setattr(template, "script", str)
