"""Fills the board: markets, agents of several libraries, and seeds; it can be stopped.

    python -m benchmarks.board FILE --peers .venv-peers/bin/python
    python -m benchmarks.board FILE --peers PYTHON --markets ou_mid hidden --names "SB3 PPO"
    python -m benchmarks.board FILE --peers PYTHON --seconds 90 --steps 20000000   # a race to 95%
    python -m benchmarks.board FILE --peers PYTHON --markets ou_expensive hidden --trials 10
    python -m benchmarks.board FILE --names "nca_trader nano" --markets all --seeds 10 --steps 0

Each run that ends appends a row, and the same command resumes. The first seed of all pairs comes
before the second of any. Seeds are drawn once; they are the first line of FILE.seeds. All agents
get the same number of environment steps, 0 for what an agent of ours has by itself, with the
hyper-parameters that their libraries have, or with the best of `--trials` of Optuna, which run a
third of the steps, have seeds of their own and stand in FILE.trials; ours take `--set` as well. A
pair that a library cannot do is a row without a fraction.
"""

import argparse
import bisect
import json
import math
import pathlib
import secrets
import subprocess
import sys
import tempfile

from nca_trader import prove
from nca_trader.agents import load_agent
from nca_trader.config.spans import override, parse_space
from nca_trader.errors import NcaTraderError
from nca_trader.evaluate.tune import overrides_of, study_of
from nca_trader.optimum.board import REACHED
from nca_trader.optimum.frozen import frozen
from nca_trader.optimum.prove import BARS, prepare, prove_markets
from nca_trader.optimum.rows import about
from nca_trader.runs.folder import commit

MARKETS = (
    "ou_mid",
    "ou_expensive",
    "hidden",
    "garleanu_pedersen",
    "ring_hop3",
    "moving_volatility",
)
STEPS = 100_000  # of each run
SEEDS = 1_000_000  # of the rows below it, of trials from it on
TRIAL_PART = 3  # a trial has 1 / 3 of the steps: ten of RecurrentPPO would take two hours a market
OURS = {"nca_trader nano": "nano", "nca_trader mlp": "mlp"}
PEERS = ("rejax PPO", "SB3 PPO", "SB3 DQN", "sb3-contrib RecurrentPPO")
BATCHED = {"n_steps": 128, "batch_size": 2048, "n_epochs": 4, "normalize": True}
RACING = {"SB3 PPO": BATCHED, "sb3-contrib RecurrentPPO": BATCHED}
PACKAGES = {
    "rejax PPO": "rejax",
    "SB3 PPO": "stable_baselines3",
    "SB3 DQN": "stable_baselines3",
    "sb3-contrib RecurrentPPO": "sb3_contrib",
}
# What trials draw from: of the library's own names, with "normalize" for a `VecNormalize`.
OFTEN = ("learning_rate=1e-4:1e-2:log", "gamma=0.0,0.9,0.99", "ent_coef=0.0,0.01")
SPACES = {
    "nca_trader nano": (
        "optimizer.learning_rate=1e-4:1e-2:log",
        "policy.channels=8,16,32",
        "policy.hidden=32,64,128",
    ),
    "nca_trader mlp": (
        "optimizer.learning_rate=1e-4:1e-2:log",
        "policy.hidden=32,64,128",
        "policy.window=15,63",
    ),
    "rejax PPO": (*OFTEN, "num_steps=16,64,256", "normalize_observations=false,true"),
    "SB3 PPO": (*OFTEN, "n_steps=512,2048", "batch_size=64,256", "normalize=false,true"),
    "SB3 DQN": (
        *OFTEN[:2],
        "exploration_fraction=0.1,0.5",
        "target_update_interval=100,1000,10000",
        "normalize=false,true",
    ),
    "sb3-contrib RecurrentPPO": (*OFTEN, "n_steps=128,512", "normalize=false,true"),
}


def learner(name, market):
    """The module and the options of a peer; None where it cannot do the market."""
    if name == "rejax PPO":
        several = "MultiDiscrete" in str(space(market))
        return None if several else ("rejax_learns", {})
    if name == "SB3 DQN":
        one = str(space(market)).startswith("Discrete")
        return ("sb3_learns", {"algorithm": "DQN"}) if one else None
    return "sb3_learns", {"algorithm": name.split()[-1]}


def space(market):
    """The space of the actions of a market."""
    import gymnasium

    env = gymnasium.make(frozen(market).id)
    found = env.action_space
    env.close()
    return found


def ours(name, market, seed, args, given):
    """A row of an agent of this package."""
    changes = [*args.set, *(override(key, value) for key, value in given.items())]
    trial = prepare(market, load_agent(OURS[name], changes), args.steps or None)
    (proof,) = prove_markets([trial], [seed], controls=False)
    return proof.row()


def theirs(name, market, seed, args, given, last):
    """A row of an agent of another library: trained by its own program, played by `prove`."""
    found = learner(name, market)
    if found is None:
        why = {"complaint": f"n/a: actions are {space(market)}", "digest": frozen(market).digest}
        none = {"fraction": None, "steps": 0, "curve": [], "entry": {}}
        return {"market": market, "seed": seed} | none | why
    module, options = found
    with tempfile.TemporaryDirectory() as folder:
        options |= {"market": market, "seed": seed % 2**31, "steps": args.steps, "out": folder}
        options |= {"seconds": args.seconds, "given": json.dumps(given)}
        if args.seconds and module == "sb3_learns":
            options |= {"envs": 64, "given": json.dumps(RACING.get(name, {}))}
        words = [f"--{key}={value}" for key, value in options.items()]
        command = [args.peers, "-m", f"benchmarks.peers.{module}", *words]
        ran = subprocess.run(command, capture_output=True, text=True)
        if ran.returncode:
            raise RuntimeError(ran.stderr[-2000:])
        looks = json.loads(ran.stdout.splitlines()[-1])["looks"]
        rows = {}

        def judge(number):
            """Play the agent of a look on new paths; whether it reaches 95%."""
            file = pathlib.Path(folder) / looks[number]["file"]
            moments = file.with_suffix(".pkl") if module == "sb3_learns" else file
            agent = f"{file},{moments}" if moments != file and moments.exists() else str(file)
            (proof,) = prove([market], agent, allow_code=True, python=args.peers, controls=False)
            rows[number] = proof.row()
            return rows[number]["fraction"] >= REACHED

        if args.seconds:  # a race asks for the first look that reaches it
            end = len(looks) - 1
            if judge(end):
                bisect.bisect_left(range(end), True, key=judge)
        else:
            for number in range(len(looks))[-1 if last else 0 :]:
                judge(number)
    curve = [
        [looks[k]["steps"], looks[k]["seconds"], rows[k]["fraction"], rows[k]["error"]]
        for k in sorted(rows)
    ]
    own = {"seed": seed, "steps": curve[-1][0], "seconds": curve[-1][1], "curve": curve}
    return rows[max(rows)] | own | {"evaluated_on": [row["seed"] for row in rows.values()]}


def run_one(name, market, seed, args, given, last=False):
    """The row of one seed; of another library, with `last`, only the trained agent is played."""
    if name in OURS:
        return ours(name, market, seed, args, given)
    return theirs(name, market, seed, args, given, last)


def best_of(name, market, args):
    """The best hyper-parameters of the trials of an agent on a market; the missing ones are run."""
    import optuna

    args = argparse.Namespace(**vars(args) | {"steps": args.steps // TRIAL_PART})
    asked = ", ".join([name, *args.set, market, f"{args.steps} steps"])
    study = study_of(pathlib.Path(args.file).with_suffix(".trials"), asked)
    while len(done := [t for t in study.trials if "seed" in t.user_attrs]) < args.trials:
        study.sampler = optuna.samplers.TPESampler(seed=len(done))
        trial = study.ask()
        overrides_of(trial, parse_space(SPACES[name]))
        seed, reached = SEEDS + secrets.randbelow(SEEDS), math.nan
        try:
            row = run_one(name, market, seed, args, trial.params, last=True)
            reached = row["fraction"]
        except (NcaTraderError, RuntimeError) as error:
            print(f"{name} on {market}, {trial.params}: {error}", file=sys.stderr, flush=True)
        trial.set_user_attr("seed", seed)
        study.tell(trial, reached)  # a trial without a number fails
        print(f"{market:<20}{name:<28} trial {len(done):>2}{reached:8.1%}", flush=True)
    return study.best_params


def run(args):
    """Trains what is not in the file yet."""
    file, drawn = pathlib.Path(args.file), pathlib.Path(args.file).with_suffix(".seeds")
    drawn.parent.mkdir(parents=True, exist_ok=True)
    seeds = json.loads(drawn.read_text()) if drawn.is_file() else []
    if len(seeds) < args.seeds:
        seeds += [secrets.randbelow(SEEDS) for _ in range(args.seeds - len(seeds))]
        drawn.write_text(json.dumps(seeds) + "\n")
    seeds = seeds[: args.seeds]
    lines = file.read_text().splitlines() if file.is_file() else []
    before = [json.loads(line) for line in lines]
    done = {(row["market"], row["name"], row["seed"]) for row in before}
    others = {(row["market"], row["name"]): row.get("given", {}) for row in before}
    tuned = {}
    markets = list(BARS) if args.markets == ["all"] else args.markets
    for seed in seeds:
        for name in args.names:
            for market in markets:
                label = ", ".join([name, *args.set, *["tuned"] * bool(args.trials)])
                can = name in OURS or learner(name, market)
                if args.trials and can and (name, market) not in tuned:
                    tuned[name, market] = best_of(name, market, args)
                given = tuned.get((name, market), {})
                if others.get((market, label), given) != given:
                    raise SystemExit(f"{file}: {label} on {market} has rows of fewer trials.")
                if (market, label, seed) in done:
                    continue
                try:
                    row = run_one(name, market, seed, args, given)
                except (NcaTraderError, RuntimeError) as error:
                    print(f"{name} on {market}: {error}", file=sys.stderr, flush=True)
                    continue  # the same command tries it again
                row = row | {"name": label, "commit": commit()} | about()
                if name in PACKAGES:
                    row["versions"] = versions(args.peers, PACKAGES[name])
                if given:
                    row["given"] = given
                with file.open("a") as out:
                    out.write(json.dumps(row, allow_nan=False) + "\n")
                reached = math.nan if row["fraction"] is None else row["fraction"]
                print(f"{market:<20}{row['name']:<28}{seed:>8}{reached:8.1%}", flush=True)


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
    parser.add_argument("--markets", nargs="+", default=MARKETS)
    parser.add_argument("--names", nargs="+", default=[*OURS, *PEERS])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--set", nargs="+", default=[], help="TABLE.KEY=VALUE of agents of ours")
    parser.add_argument("--trials", type=int, default=0, help="of Optuna, before tuned agents")
    args = parser.parse_args(words)
    if not args.steps and {*args.names} - {*OURS}:
        parser.error("--steps 0 is of agents of ours alone; give --names of them, or steps.")
    run(args)


if __name__ == "__main__":
    main()
