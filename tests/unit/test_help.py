"""Every command tells how it is used, and that is no error."""

import re

import pytest

from pipeline.commands.cli import COMMANDS, USAGE, main


@pytest.mark.parametrize("word", ["--help", "-h"])
@pytest.mark.parametrize("command", [*(command for command in COMMANDS if not command.startswith("-")), None])
def test_every_command_prints_its_usage(capsys, command, word):
    assert main([command, word] if command is not None else [word]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    first = output.out.partition("\n")[0]
    assert first.startswith("Usage: ") and (command is None or re.search(rf"headway {command}|run\\.py", first))


def test_the_usage_names_every_command():
    assert set(re.findall(r"^  headway (\S+)", USAGE, re.MULTILINE)) == set(COMMANDS) - {"--help"}
