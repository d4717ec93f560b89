"""The reference that the site writes from the code says all of it."""

import argparse
import dataclasses
import re

import pytest
import reference
import website

import nca_trader as nca
from nca_trader import cli
from nca_trader.config import AgentConfig, EnvConfig
from nca_trader.config.toml import preset_names
from nca_trader.data.features import FEATURES
from nca_trader.envs.rewards import SCHEMES


@pytest.fixture(scope="module")
def page():
    return reference.page()


def first_cells(text):
    return {line.split("`")[1] for line in text.splitlines() if line.startswith("| `")}


def test_every_public_name_has_a_docstring_and_is_in_the_python_api():
    pages = "".join(website.api().values())
    assert {*nca.__all__} <= {*re.findall(r"^::: nca_trader\.\S+\.(\w+)$", pages, re.M)}
    assert [name for name in nca.__all__ if not getattr(nca, name).__doc__] == []


def test_a_language_model_finds_every_page(root):
    text = (root / "llms.txt").read_text()
    assert text == website.llms()  # `make docs` writes it
    assert text.startswith("# nca_trader\n\n> Backtest") and "nca-trader backtest" in text
    named = {root / link for link in re.findall(r"\]\(([^)]+)\)", text)}
    assert all(path.exists() for path in named)
    assert {*(root / "docs" / "guides").glob("*.md")} <= named


def test_every_feature_reward_key_and_preset_is_there(page):
    tables = [type(f.default) for f in dataclasses.fields(AgentConfig)]
    configs = [EnvConfig, AgentConfig, *filter(dataclasses.is_dataclass, tables)]
    keys = {f.name for config in configs for f in dataclasses.fields(config)}
    keys -= {f.name for f in dataclasses.fields(AgentConfig)} - {"num_seeds"}
    keys -= {"costs"}
    names = {*FEATURES, *SCHEMES, *preset_names("envs"), *preset_names("agents")}
    assert first_cells(page) >= names | keys


def test_every_option_of_every_command_is_there(page):
    parser = cli.build_parser()
    commands = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    shared = page.partition("### Options of bar files")[2].partition("### ")[0]
    for name, command in commands.choices.items():
        own = page.partition(f"### nca-trader {name}\n")[2].partition("\n### ")[0]
        found = {word for cell in first_cells(own + shared) for word in cell.split()}
        wanted = {option for action in command._actions for option in action.option_strings}
        assert wanted - {"-h", "--help", "--json", "--"} <= found, name


def test_every_code_is_there(page):
    assert {f"D{number:03}" for number in range(1, 36) if number not in (28, 29)} <= first_cells(
        page
    )
    codes = first_cells(page.partition("## Exit codes")[2])
    assert codes == {"0", "1", "2", "3", "4", "130"}


def test_ranges_are_those_that_the_configs_check(page):
    (row,) = (line for line in page.splitlines() if line.startswith("| `clip_epsilon` | float |"))
    assert "`(0, 1)`" in row and "`0.2`" in row
    for value in (0.0, 1.0):
        with pytest.raises(ValueError, match="clip_epsilon"):
            AgentConfig(learner=dataclasses.replace(AgentConfig().learner, clip_epsilon=value))
