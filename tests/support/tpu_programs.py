"""Tiny programs whose cost is known by hand, compiled for a TPU: the samples in tests/scale.

With the extra `tpu-plan`, this file, run with `JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1`, writes them
again.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

SAMPLES = pathlib.Path(__file__).parents[1] / "scale" / "samples"
OUTER, INNER, ROWS, WIDTH = 3, 7, 64, 128
BARS, CELLS, TAPS, DILATION = 100, 8, 3, 4
BIG = (64, 1024, 1024)  # 256 MiB of float32: more than fits on the chip itself


def nested_scan(x, w):
    """On each of 4 devices: 3 times 7 products of [64, 128] and [128, 128], and 3 sums."""

    def inner(x, _):
        return jnp.tanh(x @ w), None

    def outer(x, _):
        y, _ = jax.lax.scan(inner, x, None, length=INNER)
        return y + jax.lax.psum(y, "data"), None

    return jax.lax.scan(outer, x, None, length=OUTER)[0]


def causal_convolution(x, kernel):
    """Dilated, causal, as the lattice of the automaton: [8, 100, 128] to [8, 100, 128]."""
    with jax.named_scope("collect"):
        return jax.lax.conv_general_dilated(
            x,
            kernel,
            (1,),
            [((TAPS - 1) * DILATION, 0)],
            rhs_dilation=(DILATION,),
            dimension_numbers=("NWC", "WIO", "NWC"),
        )


def either(flag, x, w):
    """One product, or nothing."""
    return jax.lax.cond(flag, lambda x: jnp.tanh(x @ w), lambda x: x, x)


def running_sum(xs):
    """Reads a slice of a large array each step: once the array in all, not 64 times."""

    def add(total, x):
        return total + x, None

    return jax.lax.scan(add, jnp.zeros(BIG[1:]), xs)[0]


def compiled():
    """By name, the compiled programs."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
    mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))

    def like(shape, dtype=jnp.bfloat16, axes=()):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*axes)))

    spread = jax.shard_map(nested_scan, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    square = like((WIDTH, WIDTH))
    programs = {
        "nested_scan": (spread, [like((4 * ROWS, WIDTH), axes=("data",)), square]),
        "causal_convolution": (
            causal_convolution,
            [like((CELLS, BARS, WIDTH)), like((TAPS, WIDTH, WIDTH))],
        ),
        "either": (either, [like((), jnp.bool_), like((1024, WIDTH)), square]),
        "running_sum": (running_sum, [like(BIG, jnp.float32)]),
    }
    return {name: jax.jit(f).lower(*args).compile() for name, (f, args) in programs.items()}


if __name__ == "__main__":
    for name, program in compiled().items():
        text = program.as_text()
        # Without the tables of source files: they hold paths of a machine.
        head, body = text.split("\n", 1)
        body = body[body.index("\n%") if "\n%" in body else body.index("\nENTRY") :]
        (SAMPLES / f"{name}.hlo").write_text(head + "\n" + body)
