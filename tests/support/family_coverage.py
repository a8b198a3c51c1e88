"""Which classes of transformers and timm are taken apart, each built tiny from its config.

python -m tests.support.family_coverage   # writes docs/families_table.md
"""

import collections
import inspect
import logging
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lit_layers.errors import InputError
from lit_layers.models.view import LayeredModel
from tests.support.tiny_configs import config_for, scale_up_, tiny_config

TABLE = Path(__file__).parents[2] / "docs" / "families_table.md"
MOST_PARAMETERS = 20_000_000  # of a config that is tiny
GROUPS = {
    "Causal language models": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "Masked language models": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "Image classification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
}
TIMM_CLASSES = ("VisionTransformer", "Eva", "Beit")
HIERARCHICAL = ("samvit_base_patch16", "swin_tiny_patch4_window7_224", "mvitv2_tiny", "pvt_v2_b0", "resnet18")


@dataclass(frozen=True)
class Outcome:
    """Of a class: taken apart by "row" or "structure", "refused" with the reason, or "not tiny": not built."""

    kind: str
    how: str
    reason: str = ""

    @property
    def is_taken_apart(self) -> bool:
        return self.how in ("row", "structure")


def classes(group: str) -> dict[str, str]:
    """Model type of each class that an Auto class of transformers opens; of a class of several types the first."""
    import transformers.models.auto.modeling_auto as auto

    found: dict[str, str] = {}
    for model_type, names in sorted(getattr(auto, GROUPS[group]).items()):
        found.setdefault(names if isinstance(names, str) else names[0], model_type)
    return found


def outcome(kind: str, model_type: str, *, causal: bool = False) -> Outcome:
    """Of one class, built tiny from its config, with weights scaled up."""
    import transformers

    network: Any = getattr(transformers, kind)
    try:
        config = config_for(network, tiny_config(model_type))
        if causal and hasattr(config, "is_decoder"):
            config.is_decoder = True
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in network._from_config(config).parameters())
        if size > MOST_PARAMETERS:
            return Outcome(kind, "not tiny", f"{size:,} parameters")
        torch.manual_seed(0)
        model = network._from_config(config).eval()
    except Exception as error:
        return Outcome(kind, "not tiny", f"{type(error).__name__}: {' '.join(str(error).split())}")
    return of_model(kind, model)


def of_model(kind: str, model: nn.Module) -> Outcome:
    scale_up_(model)
    try:
        return Outcome(kind, LayeredModel(model).origin)
    except InputError as refusal:
        sentence = str(refusal).removeprefix(f"no layered view of {type(model).__name__}: ")
        return Outcome(kind, "refused", sentence.split("; nor has its class")[0].split("; known families")[0])


def of_group(group: str, only: tuple[str, ...] = ()) -> list[Outcome]:
    """Of every class of a group, or of some model types."""
    causal = group.startswith("Causal")
    wanted = {kind: mt for kind, mt in classes(group).items() if not only or mt in only}
    with quiet():
        return [outcome(kind, model_type, causal=causal) for kind, model_type in wanted.items()]


def timm_names() -> dict[str, list[str]]:
    """Names of timm by the class that they build, for the classes of blocks of one shape."""
    import timm
    from timm.models import _registry

    found = collections.defaultdict(list)
    for name in timm.list_models():
        source = inspect.getsource(_registry._model_entrypoints[name])
        made = re.search(r"_create_(vision_transformer|eva|beit)\(", source)
        if made and "sam" not in name:
            found[{"vision_transformer": "VisionTransformer", "eva": "Eva", "beit": "Beit"}[made[1]]].append(name)
    return dict(found)


def of_timm(name: str, **options: Any) -> Outcome:
    """Of a name of timm, built with 3 narrow blocks where it is one of the classes above."""
    import timm

    torch.manual_seed(0)
    try:
        model = timm.create_model(name, pretrained=False, **options).eval()
    except (AssertionError, TypeError, ValueError, RuntimeError) as error:
        return Outcome(name, "not tiny", f"{type(error).__name__}: {error}")
    return of_model(name, model)


def narrow(name: str) -> dict[str, Any]:
    """Options that make a model of timm tiny: three narrow blocks on an image of four patches."""
    return {"depth": 3, "embed_dim": 64, "num_heads": 4, "img_size": 28 if "14" in name else 32, "num_classes": 7}


class quiet(warnings.catch_warnings):
    """No warnings of configs that nobody would use."""

    def __enter__(self) -> Any:
        import transformers

        self.level = logging.getLogger("transformers").level
        transformers.logging.set_verbosity(logging.CRITICAL)
        entered = super().__enter__()
        warnings.simplefilter("ignore")
        return entered

    def __exit__(self, *failure: Any) -> None:
        logging.getLogger("transformers").setLevel(self.level)
        super().__exit__(*failure)


def table(groups: dict[str, list[Outcome]]) -> str:
    """The page of docs."""
    import timm
    import transformers

    lines = [
        "# Classes that are taken apart",
        "",
        f"Of transformers {transformers.__version__} and timm {timm.__version__}, each class built tiny and random",
        "from its config by `python -m tests.support.family_coverage`, which writes this page. What rows and structure",
        "are stands in [families.md](families.md).",
        "",
        "| | classes | built tiny | by row | by structure | refused |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for group, outcomes in groups.items():
        count = collections.Counter(each.how for each in outcomes)
        built = len(outcomes) - count["not tiny"]
        counts = f"{built} | {count['row']} | {count['structure']} | {count['refused']}"
        lines.append(f"| {group} | {len(outcomes)} | {counts} |")
    for group, outcomes in groups.items():
        lines += [*([""] if lines[-1] else []), f"## {group}", ""]
        for how, title in (("row", "By row"), ("structure", "By structure")):
            names = [f"`{each.kind}`" for each in outcomes if each.how == how]
            lines += [f"{title}: {', '.join(names)}.", ""] if names else []
        for how, title in (("refused", "Refused"), ("not tiny", "Not built tiny, so not known")):
            rows = [each for each in outcomes if each.how == how]
            if rows:
                lines += [f"| {title} | why |", "| --- | --- |"]
                lines += [f"| `{each.kind}` | {_cell(each.reason)} |" for each in rows]
                lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")[:220]


def sweep() -> Iterator[tuple[str, list[Outcome]]]:
    for group in GROUPS:
        yield group, of_group(group)
    with quiet():
        for kind, names in timm_names().items():
            yield f"timm, {kind}", [of_timm(name, **narrow(name)) for name in names]
        yield "timm, others", [of_timm(name) for name in HIERARCHICAL]


if __name__ == "__main__":
    TABLE.write_text(table(dict(sweep())), encoding="utf-8")
