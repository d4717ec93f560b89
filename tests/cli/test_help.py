"""Help: what a command needs, ten options first, and the options of a bar file described once."""

import argparse
import re

import pytest

from nca_trader.cli import COMMANDS, build_parser
from nca_trader.cli.options import READING

PARSERS = next(
    action.choices
    for action in build_parser()._actions
    if isinstance(action, argparse._SubParsersAction)
)


def sections(command):
    """The text of each section of a command's help, by title; "" is the usage."""
    title, found = "", {"": ""}
    for line in PARSERS[command].format_help().splitlines():
        head = re.fullmatch(r"(\w[\w ]+):", line)
        title = head[1] if head else title
        found[title] = found.get(title, "") + ("" if head else line + "\n")
    return found


def options_in(text):
    return re.findall(r"^  (?:-h, )?(--[\w-]+)", text, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_every_option_once_and_ten_of_them_first(command):
    found = sections(command)
    listed = [option for text in found.values() for option in options_in(text)]
    shared = re.findall(r"--[\w-]+", found.get("reading a bar file", "").partition(":")[0])
    expected = [
        next(text for text in action.option_strings if text.startswith("--"))
        for action in PARSERS[command]._actions
        if action.option_strings and action.help != argparse.SUPPRESS
    ]
    assert sorted({*listed, *shared}) == sorted(expected)
    assert len(listed) == len({*listed})
    first = options_in(found["options"])
    # What every command has comes after its own.
    own = len({*first} - {"--help", "--json", "--quiet"})
    assert {*first[own:]} <= {"--help", "--json", "--quiet"}
    assert len(first) <= 10 and (len(first) == 10 or not found.get("more options"))


@pytest.mark.parametrize("command", COMMANDS)
def test_usage_names_what_has_to_be_given_and_help_lists_it_first(command):
    found = sections(command)
    needed = [
        a.option_strings[0] for a in PARSERS[command]._actions if a.required and a.option_strings
    ]
    for group in PARSERS[command]._mutually_exclusive_groups:
        needed += [a.option_strings[0] for a in group._group_actions if group.required]
    assert needed == [option for option in needed if option in found[""]]
    assert {*needed} <= {*options_in(found["options"])}


def test_the_options_of_a_bar_file_are_described_by_one_command():
    describing = [
        command for command in COMMANDS if "--timezone TIMEZONE" in PARSERS[command].format_help()
    ]
    assert describing == ["data"]
    assert {f"--{name.replace('_', '-')}" for name in READING} <= {
        *options_in(sections("data")["reading a bar file"])
    }


def test_until_and_stop_are_one_option():
    found = {
        command: action.option_strings
        for command in COMMANDS
        for action in PARSERS[command]._actions
        if {"--until", "--stop"} & {*action.option_strings}
    }
    assert {"train", "backtest", "export", "walkforward", "tune"} <= {*found}
    assert all({"--until", "--stop"} <= {*names} for names in found.values())
    args = build_parser().parse_args("backtest --strategy s --until 2013-01-01".split())
    assert args.stop == "2013-01-01"
