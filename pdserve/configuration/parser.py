"""The parser behind `flags`: its errors, and a help in parts.

`--help` shows the everyday flags and the groups of all others, `--help=GROUP` one group,
`--help=all` everything. Commands are shown in groups too.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from pdserve.configuration.config_file import suggestion
from pdserve.configuration.help_text import HelpFormatter, group_list, section_title
from pdserve.configuration.options import SECTIONS
from pdserve.configuration.other_words import command_hint

ALL = "all"


class FlagError(Exception):
    """The parser cannot make sense of the command line."""


class Parser(argparse.ArgumentParser):
    """A parser that raises `FlagError` instead of exiting.

    `--help` takes the name of a part, such as a group of settings, where `part` is what that is
    called.
    """

    def __init__(self, *, part: str = "", **settings: Any) -> None:
        super().__init__(
            formatter_class=HelpFormatter, allow_abbrev=False, add_help=False, **settings
        )
        self.everyday_keys: tuple[str, ...] = ()
        self.command_groups: Mapping[str, Sequence[str]] = {}
        """The names of commands, by the title of their group; empty: one list of all."""
        takes_name: dict[str, Any] = {"nargs": "?", "const": "", "metavar": part}
        self.add_argument(
            *("-h", "--help"),
            action=_Help,
            default=argparse.SUPPRESS,
            help="show this help" + (f", or that of a {part.lower()}" if part else ""),
            **(takes_name if part else {"nargs": 0}),
        )

    def error(self, message: str) -> NoReturn:
        """Raise `FlagError`, in the words of settings."""
        message = re.sub(r"^argument (\S+): expected one argument$", r"\1 has no value", message)
        message = re.sub(
            r"^argument (\S+): invalid int value: (.*)$",
            r"\1 is \2: wanted a whole number",
            message,
        )
        raise FlagError(message)

    def flags_of(self, *commands: str) -> list[str]:
        """Return the flags of a command, or of a command of that one."""
        parser = self
        for name in commands:
            parser = parser.commands()[name]
        return [flag for action in parser._actions for flag in action.option_strings]

    def shown_help(self, name: str) -> str:
        """Return the help of a group of settings or of a command; `ALL`, or for "" the short one.

        Raises `FlagError` for a name that there is not.
        """
        titles = {section_title(section): section for section in SECTIONS}
        groups = {titles[str(one.title)]: one for one in self._action_groups if one.title in titles}
        commands = self.commands()
        if name not in ("", ALL, *groups, *commands):
            offered = [*groups, *commands, ALL]
            hint = suggestion(name, offered)
            raise FlagError(f"--help={name}: wanted {', '.join(offered)}{hint}")
        if name in commands:
            return commands[name].shown_help("")
        if name == ALL or not groups:
            return self.format_help()
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        if name:
            _add_section(formatter, groups[name].title, groups[name]._group_actions)
            return formatter.format_help()
        formatter.add_text(self.description)
        for one in self._action_groups:
            if one.title not in titles:
                _add_section(formatter, one.title, one._group_actions)
        by_key = {action.dest: action for action in self._actions}
        everyday = [by_key[key] for key in self.everyday_keys if key in by_key]
        _add_section(formatter, "everyday settings", everyday)
        counts = {section: len(one._group_actions) for section, one in groups.items()}
        formatter.add_text(group_list(counts))
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def format_help(self) -> str:
        """Return the whole help, with the commands in their groups."""
        if not self.command_groups:
            return super().format_help()
        lines = {line.dest: line for one in self._of_commands() for line in one._choices_actions}
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        for title, names in self.command_groups.items():
            _add_section(formatter, title, [lines[name] for name in names])
        _add_section(formatter, "options", [one for one in self._actions if one.option_strings])
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def commands(self) -> dict[str, Parser]:
        """Return the parser of each command, by its name; empty for a parser of one command."""
        return {name: one for found in self._of_commands() for name, one in found.choices.items()}

    def _of_commands(self) -> list[Any]:
        """Return the action that has the commands, if there are any."""
        return [one for one in self._actions if isinstance(one, argparse._SubParsersAction)]

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            hint = command_hint(value, action.choices, self.prog)
            raise FlagError(
                f"there is no command {value!r}: wanted {', '.join(action.choices)}{hint}"
            )
        super()._check_value(action, value)


class _Help(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        parser._print_message(parser.shown_help(values or ""), sys.stdout)
        parser.exit()


def _add_section(
    formatter: argparse.HelpFormatter, title: str | None, actions: Iterable[argparse.Action]
) -> None:
    formatter.start_section(title)
    formatter.add_arguments(actions)
    formatter.end_section()
