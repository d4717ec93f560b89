"""The switches of `train` for finding faults: each does what it says, and is off again after."""

import argparse
import logging

import jax
import jax.numpy as jnp
import pytest

from nca_trader.cli.debugging import SWITCHES, Watch, add_debug_arguments, debugged
from nca_trader.errors import ConfigError


def arguments(*words, run_dir="runs/x"):
    parser = argparse.ArgumentParser()
    add_debug_arguments(parser)
    return argparse.Namespace(**vars(parser.parse_args(words)), run_dir=run_dir)


@pytest.mark.parametrize("option", SWITCHES)
def test_a_switch_is_on_inside_and_as_before_after(option):
    name, value, _ = SWITCHES[option]
    before = getattr(jax.config, name)
    with debugged(arguments(f"--{option}"), lambda row: None):
        assert getattr(jax.config, name) == value != before
    assert getattr(jax.config, name) == before
    with debugged(arguments(), lambda row: None):
        assert getattr(jax.config, name) == before


def test_a_nan_stops_where_it_is_made():
    with debugged(arguments("--debug-nans"), lambda row: None):
        with pytest.raises(FloatingPointError, match="nan"):
            jnp.log(jnp.float32(-1.0))
    assert jnp.isnan(jnp.log(jnp.float32(-1.0)))


@jax.jit
def step(x):
    return 2.0 * x


def test_a_learner_that_is_compiled_again_is_counted_and_warned_about(caplog):
    rows = []
    with caplog.at_level(logging.WARNING), debugged(arguments(), rows.append) as report:
        for update, size in enumerate((3, 3, 4, 4), 1):
            step(jnp.zeros(size))
            report({"update": update})
    said = [record.getMessage() for record in caplog.records if "again" in record.getMessage()]
    assert len(said) == 1 and said[0].startswith("update 3 compiled the learner again (1 times")
    assert [row["update"] for row in rows] == [1, 2, 3, 4]


def test_sharding_is_shown_once_and_updates_after_the_first_are_traced(tmp_path, capsys):
    big = jnp.zeros((123, 7))
    words = arguments("--show-sharding", "--profile", "2", run_dir=tmp_path)
    with debugged(words, lambda row: None) as report:
        for update in range(1, 5):
            big = (big + 1.0).block_until_ready()
            report({"update": update})
    said = capsys.readouterr().out
    assert said.count("float32[123, 7]  SingleDeviceSharding") == 1
    assert said.count("profile of the updates") == 1
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))


def test_a_trace_ends_where_training_ends_sooner(tmp_path):
    watch = Watch(5, str(tmp_path), False)
    watch.updated(1)
    watch.close()
    watch.close()
    jax.profiler.start_trace(str(tmp_path / "next"))  # there is none running
    jax.profiler.stop_trace()


def test_no_update_can_not_be_traced():
    with pytest.raises(ConfigError, match="at least one"):
        with debugged(arguments("--profile", "0"), lambda row: None):
            pass
