"""Compares the NCA with a GRU, an MLP and a dilated convolution of equal size.

    python -m benchmarks.policies --market ou_mid --equal parameters --steps 1000000 --seeds 3

Each kind gets the width that makes its parameters, or its operations for each bar of the lattice,
those of the NCA's preset, and the same learner. One row per kind and seed: the fraction of the
known optimum on a fresh draw; with bars dropped; and with fewer bars of history than in training.
Report the result also where the NCA loses.
"""

import argparse
import bisect
import dataclasses
import json
import math
import time

import jax
import jax.numpy as jnp
import numpy as np

from nca_trader.agents import load_agent
from nca_trader.agents.lattice import ROWS, TAPS, delayed, entered, rows_dense
from nca_trader.agents.nca import dilations_of
from nca_trader.agents.policy import make_policy
from nca_trader.config.ranges import switched
from nca_trader.data.synthetic import task_of
from nca_trader.envs.trading import TradingEnv, kept
from nca_trader.evaluate.simulate import encode
from nca_trader.learner.learner import make_learner
from nca_trader.optimum.measure import greedy_positions, judge, pieces
from nca_trader.optimum.prove import prepare

KINDS = ("nca", "gru", "mlp", "tcn")
DROPPED = (0.0, 0.1, 0.3, 0.5)
SHORTER = (0.5, 0.25)  # of the receptive field
UNSEEN = 40_000  # bars of the fresh draw


def policy_of(kind, agent, spec, width):
    """The policy of `kind` and `width`; the NCA is as its preset says."""
    config = agent.policy
    window = make_policy(agent, spec).receptive_field
    changes = {"channels": width, "window": window}
    if kind == "nca":
        return make_policy(agent, spec)
    if kind == "gru":
        other = switched(config, kind="gru", **changes)
    else:
        other = switched(config, kind="mlp", hidden=width, **changes)
    policy = make_policy(dataclasses.replace(agent, policy=other), spec)
    return convolutional(policy, config, width) if kind == "tcn" else policy


def convolutional(policy, config, width):
    """A residual stack of dilated causal layers, each with weights of its own.

    Source: Bai, Kolter, Koltun, An empirical evaluation of generic convolutional and recurrent
    networks for sequence modeling (2018), with its first weights of N(0, 0.01), and without its
    dropout and normalisation.
    """
    dilations = dilations_of(config)

    def init(key):
        keys = jax.random.split(key, len(dilations) + 2)
        embed = jax.nn.initializers.lecun_normal()
        small = jax.nn.initializers.normal(0.01)  # layers that vary as their input learn nothing
        params = {"embed": embed(keys[0], (policy.spec.num_features + 1, width))}
        for k, layer in enumerate(keys[2:]):
            params[f"taps_{k}"] = small(layer, (TAPS * width, width))
            params[f"bias_{k}"] = jnp.zeros(width)
        return {"tcn": params, "head": policy.init(keys[1])["head"]}

    def encode(params, x, present, fire=None, halo=0):
        p = params["tcn"]
        state = rows_dense(p["embed"], entered(ROWS, config.feature_clip, x, present), "float32")
        for k, dilation in enumerate(dilations):
            seen = jnp.concatenate([delayed(state, j * dilation) for j in range(TAPS)])
            hidden = rows_dense(p[f"taps_{k}"], seen, "float32")
            state = state + jax.nn.relu(hidden + ROWS.column(p[f"bias_{k}"]))
        return ROWS.leave(state)[:, halo:]

    hidden = policy.hidden_axis

    def hidden_axis(part, parameter):  # layers are not split over a mesh
        return None if part == "tcn" else hidden(part, parameter)

    return policy._replace(init=init, encode=encode, hidden_axis=hidden_axis)


def sizes(kind, agent, policy):
    """Parameters of the encoder, and its operations for a bar of the lattice."""
    shapes = jax.eval_shape(policy.init, jax.random.key(0))[kind]
    count = {name: math.prod(leaf.shape) for name, leaf in shapes.items()}
    once = sum(count.values())
    if kind == "nca":
        again = agent.policy.steps - 1
        return once, 2 * (once + again * (count["taps"] + count["update"]))
    if kind == "gru":
        return once, 2 * (once + (policy.receptive_field - 1) * count["recurrent"])
    return once, 2 * once


def of_equal_size(kind, agent, spec, equal):
    """The policy of `kind` whose size is nearest to the NCA's."""
    which = ("parameters", "operations").index(equal)
    target = sizes("nca", agent, policy_of("nca", agent, spec, 0))[which]
    if kind == "nca":
        return policy_of(kind, agent, spec, 0)

    def size(width):
        return sizes(kind, agent, policy_of(kind, agent, spec, width))[which]

    # Sizes rise with the width, and a policy takes a while to describe: halve, do not try all.
    width = 2 + bisect.bisect_left(range(2, 513), target, key=size)
    return policy_of(
        kind, agent, spec, min((max(width - 1, 2), width), key=lambda w: abs(size(w) - target))
    )


def fraction(policy, params, env, rate=0.0, history=None, seed=0):
    """What the most probable actions reach of the optimum, as `nca-trader prove` counts it.

    Args:
      rate: share of bars that the policy does not see. history: bars that each decision sees;
        None is all of them.
    """
    x, present = env.features, env.bars.present
    if rate:
        there = np.asarray(kept(rate, jnp.uint32(seed), jnp.arange(len(env)), present.shape[1]))
        x, present = np.where(there[..., None], x, 0.0), present & there
    seen = encode(policy, params, x, present) if history is None else None
    if history is not None:
        seen = short_sighted(policy, params, x, present, history)
    rows = pieces(len(env), policy.first_decision)
    return judge(env.task, rows, greedy_positions(env, policy, params, rows, seen)).fraction


def short_sighted(policy, params, x, present, history):
    """`[N, A, C]` the cells of all bars, each from a window of its own of `history` bars."""
    rows = np.arange(len(x))[:, None] + np.arange(1, history + 1)
    x, present = (np.pad(a, [(history, 0)] + [(0, 0)] * (a.ndim - 1)) for a in (x, present))
    x, present = jnp.asarray(x), jnp.asarray(present)

    @jax.jit
    def cells(params, rows):
        one = lambda at: policy.encode(params, x[at][None], present[at][None])[0, -1]  # noqa: E731
        return jax.lax.map(one, rows, batch_size=512)

    return np.asarray(cells(params, rows))


def compare(
    market, agent, equal, steps, seeds, *, learnt=0.0, unseen=UNSEEN, kinds=KINDS, dropped=DROPPED
):
    """Rows of the comparison; every kind sees and learns as `nca-trader prove` has it.

    Args:
      learnt: share of bars that are missing in training.
    """
    trial = prepare(market, agent, steps)
    agent = trial.agent
    fresh = dataclasses.replace(trial.config, market_bars=unseen)
    holes = dataclasses.replace(trial.config, feature_dropout=learnt)
    for seed in range(seeds):
        env = TradingEnv(task_of(trial.config, seed), holes)
        other = TradingEnv(task_of(fresh, 1000 + seed), fresh)
        for kind in kinds:
            policy = of_equal_size(kind, agent, env.spec, equal)
            parameters, operations = sizes(kind, agent, policy)
            learner = make_learner(env, policy, agent)
            state, began = learner.init(jax.random.key(seed)), time.perf_counter()
            for _ in range(max(1, steps // learner.steps_per_update)):
                state, _ = learner.step(state)
            params = jax.device_get(state.params)
            row = {"kind": kind, "seed": seed, "parameters": parameters, "operations": operations}
            row["seconds"] = time.perf_counter() - began
            for rate in dropped:
                row[f"dropped {rate:.0%}"] = fraction(policy, params, other, rate, seed=seed)
            for share in SHORTER:
                bars = max(1, round(share * policy.receptive_field))
                row[f"history {share:g} RF"] = fraction(policy, params, other, history=bars)
            yield row


def main(words=None):
    """Prints a row of JSON a kind and seed, then the medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--market", default="ou_mid")
    parser.add_argument("--agent", default="nano")
    parser.add_argument("--equal", choices=("parameters", "operations"), default="parameters")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, metavar="KIND")
    parser.add_argument("--learnt", type=float, default=0.0, help="bars missing in training")
    parser.add_argument("--set", action="append", default=[], metavar="TABLE.KEY=VALUE")
    args = parser.parse_args(words)
    rows = []
    agent = load_agent(args.agent, args.set)
    how = (args.market, agent, args.equal, args.steps, args.seeds)
    for row in compare(*how, learnt=args.learnt, kinds=args.kinds):
        print(json.dumps(row), flush=True)
        rows.append(row)
    for kind in args.kinds:
        of = [row for row in rows if row["kind"] == kind]
        names = [name for name in of[0] if name.startswith(("dropped", "history"))]
        medians = (f"{name} {np.median([row[name] for row in of]):.3f}" for name in names)
        print(f"{kind:<4} {of[0]['parameters']:>6} parameters  " + "  ".join(medians))


if __name__ == "__main__":
    main()
