"""Fills the board: markets, agents of several libraries, and seeds; it can be stopped.

    python -m benchmarks.board FILE --peers .venv-peers/bin/python
    python -m benchmarks.board FILE --peers PYTHON --markets ou_mid hidden --names "SB3 PPO"
    taskset -c 0 python -m benchmarks.board FILE --peers PYTHON --seconds 60   # a race to 95%
    python -m benchmarks.board FILE --names "nca_trader nano" --markets all --seeds 10 --steps 0

Each run that ends appends a row, and the same command resumes. The first seed of all pairs comes
before the second of any. Seeds are drawn once; they are the first line of FILE.seeds. A pair that a
library cannot do is a row without a fraction.

The rules, fixed before the runs:

- One configuration of an agent for all markets: `OURS`, `RACERS` and `LEARNERS`. Ours are presets
  as they are shipped. The others have their library's own hyper-parameters and what its guide
  advises: a batch of environments, normalised observations and rewards, actions within -1 and 1.
  Nothing is tuned.
- The board: all agents get the same number of environment steps, 0 for what ours have by
  themselves. What an agent reaches is evaluated on draws that it has not seen.
- The race: seconds of training on one core, by one clock, to the first of two evaluations in a row
  at 95%. Evaluations are a quarter of a second after the beginning and then at each 1.25 times that
  which an update has passed; they stop the clock. Training ends after `--seconds`, ours also when
  it has arrived. What passes before the first update, in a new process, is a column of its own:
  imports, bars and compilation. Another library's agent is saved and then played on new paths.
- All rows of a file are of one commit, without changes: others are refused. So it runs in a clean
  clone, and FILE stands outside of it.
"""

import argparse
import itertools
import json
import math
import os
import pathlib
import secrets
import subprocess
import sys
import tempfile

from nca_trader.agents import load_agent
from nca_trader.envs.gym.packed import account_size
from nca_trader.errors import NcaTraderError
from nca_trader.machine import cores
from nca_trader.optimum.board import arrival
from nca_trader.optimum.frozen import frozen
from nca_trader.optimum.outside.entry import Playing, entry_of
from nca_trader.optimum.outside.paths import draw_paths, judge, play
from nca_trader.optimum.prove import BARS, known_market, prepare, prove_markets
from nca_trader.optimum.rows import Point, Score, about
from nca_trader.runs.folder import commit

MARKETS = (
    "ou_mid",
    "ou_expensive",
    "hidden",
    "garleanu_pedersen",
    "ring_hop3",
    "moving_volatility",
)
RACED = ("ou_mid", "hidden", "ring_hop3")
PLAYER = pathlib.Path(__file__).parent / "peers/look_player.py"
STEPS = 100_000  # of each run
SEEDS = 1_000_000  # of the rows below it
OURS = {"nca_trader nano": "nano", "nca_trader mlp": "mlp"}
# The rate of `nano` falls to 0 over its steps, 24 M and fewer where a step teaches more; the second
# ends after a million.
RACERS = {
    "nca_trader nano": {"agent": "nano"},
    "nca_trader nano, 1 M steps": {"agent": "nano", "steps": 1_000_000},
    "nca_trader mlp": {"agent": "mlp"},
}
# The programs of other libraries with what is not their library's own: 8 environments collect
# as many steps between two updates as one does, and DQN takes as many gradient steps for each.
LEARNERS = {
    "rejax PPO": ("rejax_learns", {}, {"normalize_observations": True, "normalize_rewards": True}),
    "SB3 PPO": ("sb3_learns", {"algorithm": "PPO", "envs": 8}, {"n_steps": 256}),
    "SB3 DQN": ("sb3_learns", {"algorithm": "DQN", "envs": 8}, {"gradient_steps": 8}),
    "sb3-contrib RecurrentPPO": ("sb3_learns", {"algorithm": "RecurrentPPO", "envs": 8}, {}),
}
PACKAGES = {
    "rejax PPO": "rejax",
    "SB3 PPO": "stable_baselines3",
    "SB3 DQN": "stable_baselines3",
    "sb3-contrib RecurrentPPO": "sb3_contrib",
}


def able(name, market):
    """Whether an agent has actions of the market's kind."""
    actions = space(market)
    if name == "rejax PPO":
        return "MultiDiscrete" not in actions
    return name != "SB3 DQN" or actions.startswith("Discrete")


def space(market):
    """The space of the actions of a market."""
    import gymnasium

    env = gymnasium.make(frozen(market).id)
    found = str(env.action_space)
    env.close()
    return found


def trained(python, program, options):
    """What a program of `benchmarks.peers` reports of a run."""
    words = [f"--{key}={value}" for key, value in options.items()]
    command = [python, "-m", f"benchmarks.peers.{program}", *words]
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        raise RuntimeError(ran.stderr[-2000:])
    return json.loads(ran.stdout.splitlines()[-1])


def ours(name, market, seed, args):
    """A row of an agent of this package."""
    if args.seconds:
        options = RACERS[name] | {"market": market, "seed": seed, "seconds": args.seconds}
        ran = trained(sys.executable, "nca_learns", options)
        return ran["found"] | {"seconds_before": ran["before"]}
    trial = prepare(market, load_agent(OURS[name], args.set), args.steps or None)
    (proof,) = prove_markets([trial], [seed], controls=False)
    return proof.row()


def theirs(name, market, seed, args):
    """A row of an agent of another library: trained by its own program, played by `prove`."""
    if not able(name, market):
        why = {"complaint": f"n/a: actions are {space(market)}", "digest": frozen(market).digest}
        none = {"fraction": None, "steps": 0, "curve": [], "entry": {}}
        return {"market": market, "seed": seed} | none | why
    program, options, given = LEARNERS[name]
    with tempfile.TemporaryDirectory() as folder:
        options = options | {"market": market, "seed": seed % 2**31, "steps": args.steps}
        options |= {"seconds": args.seconds, "given": json.dumps(given), "out": folder}
        ran = trained(args.peers, program, options)
        files = [pathlib.Path(folder) / look["file"] for look in ran["looks"]]
        played_on, rows, curve = secrets.randbits(63), [], []
        for look, (earned, entry) in zip(
            ran["looks"], judged(files, market, args.peers, played_on), strict=False
        ):
            # Without seconds it counts as trained elsewhere: its first point is not untrained.
            last = Point(math.nan, look["steps"], earned)
            rows.append(Score(market=market, seed=seed, curve=[last], entry=entry).row())
            curve.append([look["steps"], look["seconds"], earned.fraction, earned.error])
            if args.seconds and len(curve) > 1 and arrival(curve):
                break
    own = {"curve": curve, "seconds": curve[-1][1], "evaluated_on": played_on}
    return rows[-1] | own | {"seconds_before": ran["before"], "given": given}


def judged(files, market, python, seed):
    """Yields what each agent of these files earns on the paths of a seed, and its entry."""
    each = [[str(p) for p in (file, file.with_suffix(".pkl")) if p.exists()] for file in files]
    kind = "rejax" if files[0].suffix == ".pkl" else "sb3"
    each = [files[:1] if kind == "rejax" else files for files in each]
    paths = draw_paths(*known_market(market), seed)
    spec = paths.dynamics.spec
    size = spec.num_assets * spec.num_features + account_size(spec)
    os.environ["LOOKS"] = json.dumps(
        {"kind": kind, "each": each, "assets": spec.num_assets, "observation": size}
    )
    entries = [entry_of(",".join(names), allow_code=True) for names in each]
    player = entry_of(f"{PLAYER}:act", python=python)
    assert player is not None
    with Playing(player, market, spec.num_assets, size, spec.num_actions) as playing:
        for entry in filter(None, entries):
            begins = itertools.chain([True], itertools.repeat(False))
            ordered = play(paths, lambda seen, begins=begins: playing.act(seen, next(begins)))
            yield judge(paths, ordered), entry.record()


def run(args):
    """Trains what is not in the file yet."""
    file, drawn = pathlib.Path(args.file), pathlib.Path(args.file).with_suffix(".seeds")
    drawn.parent.mkdir(parents=True, exist_ok=True)
    seeds = json.loads(drawn.read_text()) if drawn.is_file() else []
    if len(seeds) < args.seeds:
        seeds += [secrets.randbelow(SEEDS) for _ in range(args.seeds - len(seeds))]
        drawn.write_text(json.dumps(seeds) + "\n")
    lines = file.read_text().splitlines() if file.is_file() else []
    before, now = [json.loads(line) for line in lines], commit()
    if "dirty" in now or now == "unknown" or not {row["commit"] for row in before} <= {now}:
        raise SystemExit(f"{file}: rows are of one commit, without changes; this is {now}.")
    done = {(row["market"], row["name"], row["seed"]) for row in before}
    for seed in seeds[: args.seeds]:
        for name in args.names:
            for market in list(BARS) if args.markets == ["all"] else args.markets:
                label = ", ".join([name, *args.set])
                if (market, label, seed) in done:
                    continue
                try:
                    row = (theirs if name in LEARNERS else ours)(name, market, seed, args)
                except (NcaTraderError, RuntimeError) as error:
                    print(f"{name} on {market}: {error}", file=sys.stderr, flush=True)
                    continue  # the same command tries it again
                row = row | {"name": label, "commit": now} | about()
                if name in PACKAGES:
                    row["versions"] = versions(args.peers, PACKAGES[name])
                with file.open("a") as out:
                    out.write(json.dumps(row, allow_nan=False) + "\n")
                reached = math.nan if row["fraction"] is None else row["fraction"]
                when = (arrival(row["curve"]) or [0, math.nan])[1]
                print(f"{market:<20}{label:<28}{seed:>8}{reached:8.1%}{when:8.1f}", flush=True)


def versions(python, package):
    """The versions of a library and of what it stands on, as another Python has them."""
    names = ["jax" if package == "rejax" else "torch", package]
    code = (
        "import importlib.metadata as m, json; "
        f"print(json.dumps({{n: m.version(n) for n in {names}}}))"
    )
    return json.loads(subprocess.check_output([python, "-c", code], text=True))


def main(words=None):
    """Runs the command."""
    parser = argparse.ArgumentParser(description="Fill the board.")
    parser.add_argument("file")
    parser.add_argument("--peers", default=sys.executable, help="the Python of the other libraries")
    parser.add_argument("--markets", nargs="+", help="all: each with a known optimum")
    parser.add_argument("--names", nargs="+", choices=[*RACERS, *LEARNERS], metavar="NAME")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seconds", type=float, default=0.0, help="of a race")
    parser.add_argument("--set", nargs="+", default=[], help="TABLE.KEY=VALUE of agents of ours")
    args = parser.parse_args(words)
    if args.seconds and cores() > 1:
        parser.error("a race is on one core: taskset -c 0 python -m benchmarks.board ...")
    if args.seconds and args.set:
        parser.error("a race is of agents as they are shipped: no --set.")
    args.markets = args.markets or (RACED if args.seconds else MARKETS)
    # DQN explores by a part of its steps, which a race does not know.
    others = [name for name in LEARNERS if not args.seconds or name != "SB3 DQN"]
    args.names = args.names or [*(RACERS if args.seconds else OURS), *others]
    if not args.steps and {*args.names} - {*OURS}:
        parser.error("--steps 0 is of agents of ours alone; give --names of them, or steps.")
    if unknown := {*args.names} - {*(RACERS if args.seconds else OURS), *others}:
        parser.error(f"not run here: {', '.join(sorted(unknown))}.")
    run(args)


if __name__ == "__main__":
    main()
