"""What `--help` of a verb shows: its most used options, then the others, each by one spelling."""

import re
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from jsonargparse import SUPPRESS, DefaultHelpFormatter

MOST_USED = {  # at most ten a verb, in this order; the others stand under "more"
    "analyze": ("root", "steps", "metrics", "analyses", "corpus", "tokenizer", "revision", "device", "plan", "config"),
    "audit": ("steps", "level", "json", "grammar", "stage", "ingredient", "submodule", "config"),
    "correlate": ("root", "metric", "score", "metrics", "scores", "data", "layer", "given", "group", "config"),
    "emerge": ("root", "metrics", "where", "seeds", "axis", "confidence", "settings", "allow_suspect", "config"),
    "fit": ("root", "config", "if_exists", "resume", "steps", "analyses", "corpus", "budget", "plan", "wandb"),
    "intervene": ("root", "steps", "variants", "schedule", "tasks", "corpus", "finetune", "glue", "plan", "config"),
    "mteb": ("root", "tasks", "steps", "layers", "folder", "pooling", "states", "metrics", "device", "plan"),
    "prepare": ("source", "tokenizer", "root", "validation", "column", "separator", "workers", "config"),
    "report": ("root", "seeds", "group", "export", "pictures", "settings", "provenance", "wandb", "config"),
    "reproduce": ("root", "reduced", "plan", "compare", "engine", "config"),
    "select": ("root", "task", "text", "label", "regression", "by", "rule", "tolerance", "folder", "export"),
}


def usage(start: str, actions: Iterable[Any]) -> str:
    """Return the line of usage: what a command needs, and a word for its options."""
    shown = [start]
    for action in actions:
        if not action.option_strings:
            shown.append(
                {"?": f"[{action.dest}]", "*": f"[{action.dest} ...]"}.get(str(action.nargs), str(action.dest))
            )
        elif getattr(action, "is_needed", False):
            shown.append(f"--{action.dest} {action.dest.upper()}")
    return " ".join([*shown, "[options]"])


def sections(actions: list[Any], most_used: Iterable[str]) -> list[Any]:
    """Return the sections of a help, as argparse lays out its groups of arguments."""
    by_name = {action.dest: action for action in actions}
    first = [by_name[name] for name in most_used]
    named = [action for action in actions if not action.option_strings]
    others = [action for action in actions if action not in first and action not in named]
    parts = {"arguments": named, "options": first or others, "more": others if first else []}
    return [SimpleNamespace(title=title, description=None, _group_actions=part) for title, part in parts.items()]


class HelpFormatter(DefaultHelpFormatter):
    """Shows the default of an option where the signature has one, and no types: the words say what is meant."""

    def _format_action_invocation(self, action: Any) -> str:
        value = self._format_args(action, self._get_default_metavar_for_optional(action)) if action.nargs != 0 else ""
        spellings = {each.replace("-", "_").rstrip("+"): each for each in reversed(action.option_strings)}
        options = ", ".join(reversed(spellings.values()))
        if value.startswith("\b"):  # jsonargparse would have a terminal take the blank before it back
            return options + value.removeprefix("\b")
        return f"{options} {value}".rstrip() if options else super()._format_action_invocation(action)

    def _get_help_string(self, action: Any) -> str:
        if "." in action.dest:  # of a class of a library, whose words leave that to the type
            return super()._get_help_string(action) or ""
        words = (super()._get_help_string(action) if action.help is None else action.help) or ""
        if extra := getattr(action, "extra_help", str)():
            words = f"{words.removesuffix('.')} ({_class_names(extra.lstrip(', '))})"
        default = action.default
        if default in (None, [], SUPPRESS) or action.nargs == 0 or not str(default) or "(default" in words:
            return words
        return f"{words} (default: %(default)s)"


def _class_names(extra: str) -> str:
    """Return the classes of the package by the names that recipes may call them by, without those that are private."""
    _, is_list, paths = extra.partition("known subclasses: ")
    if not is_list:
        return extra
    public = [path for path in paths.split(", ") if not path.startswith("lit_layers.") or path.count(".") == 2]
    return f"classes: {', '.join(sorted(re.sub(r'^lit_layers[.].*[.]', '', path) for path in public))}"
