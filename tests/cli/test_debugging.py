"""The switches of `train` for finding faults: each does what it says, and is off again after."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from nca_trader.cli import build_parser
from nca_trader.cli.train import SWITCHES, debugged
from nca_trader.errors import CheckFailed
from nca_trader.parallel.mesh import make_mesh


def arguments(*words, run_dir="runs/x"):
    return build_parser().parse_args(
        ["train", "--env=ou_mid", "--agent=nano", f"--run={run_dir}", *words]
    )


@pytest.mark.parametrize("option", SWITCHES)
def test_a_switch_is_on_inside_and_as_before_after(option):
    name, value, _ = SWITCHES[option]
    before = getattr(jax.config, name)
    with debugged(arguments(f"--{option}")):
        assert getattr(jax.config, name) == value != before
    assert getattr(jax.config, name) == before
    with debugged(arguments()):
        assert getattr(jax.config, name) == before


def test_a_nan_stops_where_it_is_made():
    with debugged(arguments("--debug-nans")):
        with pytest.raises(FloatingPointError, match="nan"):
            jnp.log(jnp.float32(-1.0))
    assert jnp.isnan(jnp.log(jnp.float32(-1.0)))


def test_a_nan_in_a_program_of_a_mesh_stops_it():
    inside = jax.shard_map(jnp.log, mesh=make_mesh(1), in_specs=P(), out_specs=P())
    with pytest.raises(FloatingPointError, match="nan"):
        with debugged(arguments("--debug-nans")):
            jax.jit(inside, donate_argnums=0)(-jnp.ones(3))


def test_without_jit_it_stops_inside_a_program_of_a_mesh():
    def halved_log(x):
        return jnp.log(x) / 2.0

    inside = jax.shard_map(halved_log, mesh=make_mesh(1), in_specs=P(), out_specs=P())
    with debugged(arguments("--debug-nans", "--disable-jit")):
        with pytest.raises(FloatingPointError, match="nan") as error:
            jax.jit(inside)(-jnp.ones(3))
    assert "halved_log" in [entry.name for entry in error.traceback]


@pytest.mark.parametrize("option", ["--debug-nans", "--debug-infs"])
def test_a_dropped_update_ends_a_run_that_looks_for_nan(option):
    good, bad = row(1) | {"skipped": 0.0}, row(2) | {"skipped": 1.0, "loss": None}
    said = r"^update 2 dropped: values .* \(null in metrics.jsonl: loss\).$"
    with pytest.raises(CheckFailed, match=said):
        with debugged(arguments(option)) as watch:
            watch(good)
            watch(bad)
    with debugged(arguments()) as watch:
        watch(bad)


def row(update, rate=1.0):
    return {"update": update, "steps_per_s": rate}


def test_what_compiling_cost_is_told_at_the_end():
    twice = jax.jit(lambda x: 2.0 * x)
    with debugged(arguments()) as watch:
        assert "first_over_steady" not in watch.figures
        twice(jnp.zeros(3))
        for update, rate in enumerate((2.0, 50.0, 40.0, 10.0), 1):
            watch(row(update, rate))
    twice(jnp.zeros(4))  # nobody listens any more
    found = watch.figures
    # Zeros are a program as well.
    assert found["programs"] >= 1 and 0 <= found["cache_hits"] <= found["programs"]
    assert found["compile_s"] > 0.0 and found["first_over_steady"] == 20.0
    line = watch.sentence
    assert line.endswith("the first update took 20 times a later one")
    assert line.startswith(f"compiled {found['programs']} programs in ")
