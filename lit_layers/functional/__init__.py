"""Metrics: pure functions from tensors to tensors. Each can be imported by its name from here."""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_layers.functional.block_schedules import *
    from lit_layers.functional.context import *
    from lit_layers.functional.correlation import *
    from lit_layers.functional.coupling import *
    from lit_layers.functional.curves import *
    from lit_layers.functional.emergence.curve_times import *
    from lit_layers.functional.entropy import *
    from lit_layers.functional.geometry import *
    from lit_layers.functional.jacobian.block_jacobians import *
    from lit_layers.functional.probes.logistic import *
    from lit_layers.functional.probes.regression import *
    from lit_layers.functional.singular import *
    from lit_layers.functional.state_geometry import *
    from lit_layers.functional.trajectory import *

# These modules only hold helpers. All other modules of this package define metrics.
_HELPERS = ("_checks", "emergence.drawn_curves", "jacobian.block_call", "jacobian.linear_cut")
_HERE = Path(__file__).parent
_BELOW = (".".join(path.relative_to(_HERE).with_suffix("").parts) for path in sorted(_HERE.rglob("*.py")))
_FILES = tuple(name for name in _BELOW if name.rpartition(".")[2] != "__init__" and name not in _HELPERS)


def __getattr__(name: str) -> Any:
    # Import on first use: the help of a command needs only block_schedules and should not wait for torch.
    if not name.startswith("_") and name not in (*_FILES, "jacobian", "emergence", "probes"):
        for file in _FILES:
            defined = getattr(importlib.import_module(f"{__name__}.{file}"), name, None)
            if getattr(defined, "__module__", None) == f"{__name__}.{file}":
                return defined
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
