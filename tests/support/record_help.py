"""Records what the parsers of some verbs say of themselves: `python -m tests.support.record_help` after a change.

With `--check` it says where the record is behind. In its own process: a parser lists all classes that are loaded.
"""

import argparse
import contextlib
import io
import itertools
import json
import os
import sys
from typing import Any

from jsonargparse._actions import filter_non_parsing_actions

from lit_layers.cli import command_line, quick_help
from lit_layers.cli.recipes import RecipeParser

VERBS = tuple(quick_help._OUTLINED)
WIDTHS = ("50", "80", "160")


def live(verb: str) -> str:
    """What a verb's own parser prints."""
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
        command_line.run_verb(verb, ["--help", "--"])  # which is not answered from the record
    return shown.getvalue()


def record(verb: str) -> tuple[dict[str, Any], dict[tuple[str, str], str]]:
    """The calls by which a verb's parser lays out its help with the names of its options, and its help by width.

    Of all its options but those of classes (""), and of those of each class.
    """
    content: dict[str, Any] = {
        "made_from": quick_help.made_from(verb),
        "versions": quick_help.versions(),
        "layouts": {},
    }
    shown_at: dict[tuple[str, str], str] = {}

    def listening(parser: Any) -> str:
        for name, width in itertools.product(("", *parser.classes), WIDTHS):
            parser.shown, os.environ["COLUMNS"] = name, width  # of one parser, which takes seconds to make
            shown_at[name, width] = format_help(parser)
        content["prog"] = parser.prog
        content["options"] = [option for option in parser._option_string_actions if option.startswith("--")]
        content["keys"] = list(parser.get_defaults(skip_validation=True).keys(branches=True))

        class Listening(parser.formatter_class):
            def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any = None) -> None:
                super().add_usage(usage, actions, groups, prefix)
                shown = [each for each in filter_non_parsing_actions(actions) if each.help != argparse.SUPPRESS]
                content["layouts"][parser.shown].append(["add_usage", usage, [self.usage(each) for each in shown], []])

            def start_section(self, heading: Any) -> None:
                super().start_section(heading)
                content["layouts"][parser.shown].append(["start_section", heading])

            def end_section(self) -> None:
                super().end_section()
                content["layouts"][parser.shown].append(["end_section"])

            def add_text(self, text: Any) -> None:
                super().add_text(text)
                content["layouts"][parser.shown].append(["add_text", text])

            def add_arguments(self, actions: Any) -> None:
                super().add_arguments(actions)
                shown = [action for action in actions if action.help != argparse.SUPPRESS]
                rows = [
                    {"invocation": self._format_action_invocation(each), "help": self._expand_help(each)}
                    for each in shown
                ]
                content["layouts"][parser.shown].append(["add_arguments", rows])

            def usage(self, action: Any) -> dict[str, Any]:
                kind = "optional" if action.option_strings else "positional"
                default = getattr(self, f"_get_default_metavar_for_{kind}")(action)
                value = {"nargs": 0} if action.nargs == 0 else {"metavar": self._format_args(action, default)}
                return {"option_strings": action.option_strings[:1], "required": action.required, **value}

        parser._get_formatter = lambda: Listening(prog=parser.prog)
        for name in ("", *parser.classes):
            parser.shown, content["layouts"][name] = name, []
            format_help(parser)
        return shown_at["", WIDTHS[0]]

    format_help, RecipeParser.format_help = RecipeParser.format_help, listening  # pyright: ignore
    try:
        live(verb)
    finally:
        RecipeParser.format_help = format_help
    return content, shown_at


def check() -> str:
    """How the record differs from the parsers; an empty text where it does not."""
    records = json.loads(quick_help.RECORDS.read_text(encoding="utf-8"))
    for verb in VERBS:
        new, shown_at = record(verb)
        if new != records[verb]:
            return f"{verb}: {', '.join(name for name in new if new[name] != records[verb].get(name))} changed"
        for (name, width), shown in shown_at.items():
            os.environ["COLUMNS"] = width
            if shown != quick_help.answer(verb, ["--help", *name.split()]):
                return f"{verb} {name}: laid out otherwise at {width} columns"
    return ""


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(check() or None)
    text = json.dumps({verb: record(verb)[0] for verb in VERBS}, indent=1)
    quick_help.RECORDS.write_text(text + "\n", encoding="utf-8")
