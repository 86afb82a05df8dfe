"""The two recipes of docs/async.md: the same run but for the user's two constants."""

import tomllib
from pathlib import Path

import pytest

from pipeline.commands.make_run_config import parse

RECIPES = Path(__file__).parent.parent.parent / "recipes"
CONSTANTS = {"sync": {"max_staleness": 0, "concurrency": 64}, "async": {"max_staleness": 2, "concurrency": 192}}


def path_of(mode):
    return RECIPES / f"guess-{mode}.toml"


def test_recipes_differ_in_the_two_constants_and_nothing_else():
    values = {mode: tomllib.loads(path_of(mode).read_text(encoding="utf-8")) for mode in CONSTANTS}
    for mode, constants in CONSTANTS.items():
        assert {name: values[mode].pop(name) for name in constants} == constants
    assert values["sync"] == values["async"]


@pytest.mark.parametrize("mode", CONSTANTS)
def test_recipe_is_the_mode_of_its_name(mode):
    config = parse(["--config", str(path_of(mode)), "--device", "cpu"])
    assert config.mode == mode
    assert config == parse(["--mode", mode, "--tool-latency", "lognormal:50:1.0", "--device", "cpu"])
