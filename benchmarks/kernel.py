"""The gradient of the automaton's steps for a TPU: XLA's cycles beside the kernel's bundles.

    python -m benchmarks.kernel [--agent base] [--segments 32] [--bars 384]

Needs the extra `tpu-plan`, and no TPU. Both programs give the cells of one asset and their gradient
by the parameters. XLA's cycles are its compiler's estimate. Of a kernel there is none: counted are
the final bundles of the compiler's dump, each loop's as often as it runs, and a bundle takes a
cycle at least; what it waits for memory is in neither figure.
"""

import argparse
import dataclasses
import os
import pathlib
import re
import subprocess
import sys
import tempfile

from nca_trader.agents import kernel
from nca_trader.scale.compiled import ENVIRONMENT

LOOP = re.compile(r"^ *0x([0-9a-f]+) LB: >> \{", re.M)
BUNDLE = re.compile(r"^ *0x([0-9a-f]+)", re.M)
LEAVES = re.compile(r"^ *0x([0-9a-f]+) .*sbr\.rel \(!%p\w+\) target = \$region", re.M)


def program(agent, remat, segments, bars):
    """The policy, and what its cells and their gradient cost, but for what a kernel takes."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import AxisType, Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from nca_trader import load_agent, make_policy
    from nca_trader.scale.chips import slice_of
    from nca_trader.scale.compiled import devices_of
    from nca_trader.scale.cost import cost_of
    from nca_trader.scale.hlo import read_module
    from nca_trader.types import EnvSpec

    agent = load_agent(agent)
    agent = dataclasses.replace(agent, policy=dataclasses.replace(agent.policy, remat=remat))
    spec = EnvSpec(symbols=("A",), features=("return_1",), targets=(0.0, 1.0), warmup=0)
    policy = make_policy(agent, spec)
    device = np.array(devices_of(slice_of("v5e:2x2"))[:1])
    mesh = Mesh(device, ("data",), axis_types=(AxisType.Auto,))

    def like(shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))

    params = jax.tree.map(lambda a: like(a.shape), jax.eval_shape(policy.init, jax.random.key(0)))
    x, present = like((segments, bars, 1, 1)), like((segments, bars, 1), jnp.bool_)
    slope = like((segments, bars, 1, agent.policy.channels))

    def both(params, x, present, slope):
        cells, back = jax.vjp(lambda params: policy.encode(params, x, present), params)
        return cells, back(slope)

    compiled = jax.jit(both).lower(params, x, present, slope).compile()
    cost = cost_of(read_module(compiled.as_text()), 1)
    return agent.policy, cost


def bundles(text, steps, chunks, blocks):
    """Of a kernel's run: its inner loops run `chunks` times a block each, the rest once.

    There is no halo here: with one, later steps have fewer chunks than the first.
    """
    begins = [int(found, 16) for found in LOOP.findall(text)]
    ends = [int(found, 16) for found in LEAVES.findall(text)]
    loops = [(begin, min(end for end in ends if end > begin)) for begin in begins]
    if len(loops) != 2 * steps:
        raise SystemExit(f"{len(loops)} loops in the kernel, where {2 * steps} are known")
    inside = [end - begin + 1 for begin, end in loops]
    once = max(int(found, 16) for found in BUNDLE.findall(text)) - sum(inside)
    print(f"  loops of {', '.join(map(str, inside))} bundles; {once} once a block")
    return blocks * (once + chunks * sum(inside))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agent", default="base")
    parser.add_argument("--segments", type=int, default=32)
    parser.add_argument("--bars", type=int, default=384)
    parser.add_argument("--dump", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sizes = (args.segments, args.bars)
    if args.dump:  # in a process of its own, whose compiler writes there
        _, cost = program(args.agent, "kernel", *sizes)
        print(cost.cycles, cost.kernels)
        return
    os.environ.update(ENVIRONMENT)
    for remat in ("none", "step"):
        policy, cost = program(args.agent, remat, *sizes)
        print(f"XLA, remat = {remat}: {cost.cycles:,} cycles")
    with tempfile.TemporaryDirectory() as folder:
        told = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        command = [sys.executable, "-m", "benchmarks.kernel", "--dump", folder]
        command += ["--agent", args.agent, "--segments", str(sizes[0]), "--bars", str(sizes[1])]
        done = subprocess.run(
            command, env=os.environ | {"LIBTPU_INIT_ARGS": told}, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, check=True,
        )  # fmt: skip
        cycles, kernels = map(int, done.stdout.split()[-2:])
        (dump,) = pathlib.Path(folder).glob("*steps_gradient*-[0-9]*-final_bundles.txt")
        text = dump.read_text()
    chunks, blocks = -(-sizes[1] // kernel.BARS), -(-sizes[0] // kernel.ROWS)
    counted = kernels * bundles(text, policy.steps, chunks, blocks)
    print(f"the kernel: {cycles:,} cycles beside it, {counted:,} bundles of its own, ", end="")
    print(f"{cycles + counted:,} together")


if __name__ == "__main__":
    main()
