"""What the product does, recorded before the code is moved and compared afterwards.

    python -m benchmarks.behaviour record benchmarks/results/behaviour         # once, before
    python -m benchmarks.behaviour compare benchmarks/results/behaviour        # after
    python -m benchmarks.behaviour compare FOLDER --parts backtests paper gym  # seconds

The folder keeps bars, two trained run folders, an exported agent and a journal, so that `compare`
also reads what the older code wrote. Only public names and commands are used. Backtests, paper
trading and Gymnasium must be equal bit for bit, a first update to 1e-6; what training ends with is
printed side by side, because rounding moves it within the spread of its seeds.
"""

import argparse
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np

SEEDS = (0, 1)
SPLIT = "2020-12-01"
ENV = """\
features = ["return_1", "return_5", "rsi", "bollinger"]
reward = "{reward}"
[costs]
commission = 5e-4
slippage = 2e-4
half_spread = 1e-4
borrow_fee = 0.01
interest_borrow = 0.03
"""
AGENT = """\
[policy]
channels = 8
hidden = 16
steps = 3
dilations = [1, 2, 4]
head_hidden = 16
[learner]
steps = 2048
num_segments = 16
segment_length = 32
envs_per_segment = 2
num_epochs = 2
num_minibatches = 2
"""
COSTS: dict[str, Any] = dict(
    commission=3e-4, slippage=2e-4, half_spread=1e-4, fixed_fee=1.0, impact=0.01, borrow_fee=0.02,
    interest_lend=0.01, interest_borrow=0.04, liquidation_fee=0.01,
)  # fmt: skip
CAPITAL = 1e5
BACKTESTS = {
    "open": dict(fill="next_open", capital=CAPITAL),
    "close": dict(fill="close", order="on_change", max_gross=1.0, capital=CAPITAL),
    "lots": dict(capital=CAPITAL, lot=1.0, min_notional=50.0, max_participation=0.05),
}


def make_bars(folder):
    """Writes a random walk of three assets with volume, spread, dividends and missing bars."""
    rng = np.random.default_rng(2026)
    rows = ["time,symbol,open,high,low,close,volume,half_spread,cash_dividend"]
    price = np.full(3, 100.0)
    for day in np.arange("2020-01-01", "2021-03-01", dtype="datetime64[D]"):
        opened = price * np.exp(rng.normal(0, 0.005, 3))
        price = opened * np.exp(rng.normal(2e-4, 0.015, 3))
        for i in range(3):
            if day > np.datetime64("2020-01-01") and rng.random() < 0.02:
                continue
            high, low = max(opened[i], price[i]) * 1.001, min(opened[i], price[i]) * 0.999
            cells = (opened[i], high, low, price[i], rng.lognormal(8, 1), rng.uniform(0, 5e-4))
            paid = 0.5 if rng.random() < 0.01 else 0.0
            rows.append(f"{day},S{i}," + ",".join(f"{x:.6f}" for x in (*cells, paid)))
    (folder / "bars.csv").write_text("\n".join(rows) + "\n")


def command(*args, cwd=None, ok=(0,)):
    """The last line of a command's output as JSON."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    environment["PYTHONPATH"] = str(pathlib.Path(__file__).resolve().parents[1])
    # Files that are kept should not name this machine's folders: hence the name, and `cwd`.
    code = (
        "import sys; sys.argv[0] = 'nca-trader'; from nca_trader.cli import main; sys.exit(main())"
    )
    words = [sys.executable, "-c", code, *map(str, args), "--json"]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=cwd)
    if done.returncode not in ok:
        raise SystemExit(f"{' '.join(words)}: exit {done.returncode}\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def digest(*arrays):
    """SHA-256 of float64 arrays."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(np.ascontiguousarray(array, np.float64).tobytes())
    return found.hexdigest()[:16]


def bars_of(folder):
    """The recorded bars, as read."""
    import nca_trader as nca

    return nca.read_bars(folder / "bars.csv", repair=("drop-bad", "keep-gaps", "keep-jumps"))


def result_of(result):
    """The digest of a backtest, and its final equity for a reader."""
    whole = [result.equity, result.targets, result.weights, result.turnover, result.costs]
    final = float(np.asarray(result.equity)[-1])
    return {"sha256": digest(*(np.asarray(x) for x in whole)), "final": final}


def backtests(folder):
    """Random weights at all costs under three sets of rules, and the two recorded agents."""
    import nca_trader as nca

    bars, found = bars_of(folder), {}
    targets = np.random.default_rng(5).uniform(-0.4, 0.4, bars.close.shape).round(1)
    targets[np.random.default_rng(6).random(len(targets)) < 0.9] = np.nan
    for name, options in BACKTESTS.items():
        result = nca.backtest(bars, targets, costs=nca.Costs(**COSTS), **options)
        found[name] = result_of(result)
    for seed in SEEDS:
        for name in (f"run-{seed}", f"agent-{seed}.nca"):
            agent = nca.Run(folder / name) if name.startswith("run") else None
            if agent is not None:
                found[name] = result_of(nca.backtest(bars, agent, start=SPLIT, look=False))
    return found


def paper(folder):
    """The head hash of a replay of each recorded agent, and that the recorded journal verifies."""
    found = {}
    with tempfile.TemporaryDirectory() as new:
        for seed in SEEDS:
            for name in (f"run-{seed}", f"agent-{seed}.nca"):
                said = command(
                    *("paper", "--run", folder / name, "--feed", f"replay:{folder / 'bars.csv'}"),
                    *("--journal", f"{new}/{name}.db", "--start", SPLIT),
                    *("--repair", "drop-bad,keep-gaps,keep-jumps"),
                )
                found[name] = {key: said[key] for key in ("head", "equity", "bars", "decisions")}
    found["old journal"] = command("journal", "verify", folder / "paper.db")
    return found


def gym(folder):
    """One Gymnasium episode."""
    import gymnasium

    import nca_trader as nca

    env = gymnasium.make(
        "nca_trader/Trading-v0", bars=bars_of(folder), config=nca.load_env(folder / "env.toml"),
        window=4,
    )  # fmt: skip
    rng = np.random.default_rng(1)
    observation, _ = env.reset(seed=7)
    seen = [np.asarray(observation)]
    over = False
    while not over:
        observation, reward, ended, truncated, info = env.step(rng.integers(0, 3, 3))
        seen.append(np.append(observation, [float(reward), info["equity"]]))
        over = ended or truncated
    return {"sha256": digest(*seen), "steps": len(seen), "equity": info["equity"]}


def update(folder):
    """Loss, other metrics and a norm of the parameters after one update, on 1 and 8 devices."""
    code = (
        "import json, sys, dataclasses, jax, numpy as np, nca_trader as nca\n"
        "from benchmarks.behaviour import bars_of\n"
        "import pathlib; folder = pathlib.Path(sys.argv[1]); n = int(sys.argv[3])\n"
        "env = nca.TradingEnv(bars_of(folder), nca.load_env(folder / 'env.toml'))\n"
        "agent = nca.load_agent(folder / 'agent.toml', [f'mesh.devices={n}'])\n"
        "learner = nca.make_learner(env, nca.make_policy(agent, env.spec), agent)\n"
        "state, metrics = learner.step(learner.init(jax.random.key(int(sys.argv[2]))))\n"
        "out = {k: float(v) for k, v in metrics.items() if np.ndim(v) == 0}\n"
        "leaves = jax.tree.leaves(state.params)\n"
        "squares = ((np.asarray(x, np.float64) ** 2).sum() for x in leaves)\n"
        "out['params'] = float(sum(squares) ** 0.5)\n"
        "print(json.dumps(out))\n"
    )
    found = {}
    for devices in (1, 8):
        for seed in SEEDS:
            flags = f"--xla_force_host_platform_device_count={devices}"
            environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
            words = [sys.executable, "-c", code, str(folder), str(seed), str(devices)]
            done = subprocess.run(
                words, capture_output=True, text=True, env=environment, check=True
            )
            found[f"seed {seed}, {devices} devices"] = json.loads(done.stdout.splitlines()[-1])
    return found


def training(folder):
    """What a run of each seed ends with: the last row of its metrics; by the command."""
    found = {}
    with tempfile.TemporaryDirectory() as new:
        for seed in SEEDS:
            train(folder, pathlib.Path(new), seed)
            rows = (pathlib.Path(new) / f"run-{seed}" / "metrics.jsonl").read_text().splitlines()
            keys = ("loss", "entropy", "reward")
            found[f"seed {seed}"] = {k: json.loads(rows[-1])[k] for k in keys}
    return found


def prove(folder):
    """Fractions of known optima."""
    found = {}
    for market in ("ou_mid", "hidden", "kelly"):
        for seed in SEEDS:
            said = command("prove", market, "--seed", seed, "--alone", ok=(0, 1))
            row = said["results"][0]
            found[f"{market}, seed {seed}"] = {k: row[k] for k in ("fraction", "untrained")}
    return found


def demo(folder):
    """The last metrics of the demo's training."""
    found = {}
    with tempfile.TemporaryDirectory() as new:
        for seed in SEEDS:
            found[f"seed {seed}"] = command("demo", "--out", new, "--seed", seed)
    return found


PARTS = {f.__name__: f for f in (backtests, paper, gym, update, training, prove, demo)}
EXACT = {"backtests", "paper", "gym"}


def train(folder, out, seed):
    """Trains the recorded agent for its few updates."""
    command(
        *("train", "--data", "bars.csv", "--env", "env.toml", "--agent", "agent.toml"),
        *("--run", out / f"run-{seed}", "--seed", seed),
        *("--until", SPLIT, "--repair", "drop-bad,keep-gaps,keep-jumps"),
        cwd=folder,
    )


def begin(folder):
    """Makes bars, agents, an exported file of each and a journal."""
    folder.mkdir(parents=True)
    make_bars(folder)
    (folder / "env.toml").write_text(ENV.format(reward="differential_sharpe"))
    (folder / "agent.toml").write_text(AGENT)
    for seed in SEEDS:
        train(folder, pathlib.Path(), seed)
        command("export", "--run", f"run-{seed}", "--out", f"agent-{seed}.nca", cwd=folder)
    command(
        *("paper", "--run", "run-0", "--feed", "replay:bars.csv", "--journal", "paper.db"),
        *("--start", SPLIT, "--repair", "drop-bad,keep-gaps,keep-jumps"),
        cwd=folder,
    )


def differences(before, after, exact, where=""):
    """Lines that say what differs."""
    if isinstance(before, dict):
        for key in before:
            yield from differences(before[key], (after or {}).get(key), exact, f"{where} {key}")
    elif before != after:
        numbers = all(isinstance(x, int | float) for x in (before, after))
        off = abs(after - before) / max(abs(before), 1e-12) if numbers else None
        if exact or off is None or off > 1e-6:
            yield f"{where.strip()}: {before} -> {after}" + (f" ({off:.1e})" if off else "")


def main():
    """Runs from the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    args = parser.parse_args()
    folder = args.folder.resolve()
    kept = folder / "expected.json"
    if args.what == "record" and not folder.exists():
        begin(folder)
    known = json.loads(kept.read_text()) if kept.is_file() else {}
    failed = False
    for part in args.parts:
        with tempfile.TemporaryDirectory() as copy:  # nothing that is recorded changes
            here = pathlib.Path(copy) / "folder"
            shutil.copytree(folder, here)
            found = json.loads(json.dumps(PARTS[part](here)))
        if args.what == "record":
            known[part] = found
            kept.write_text(json.dumps(known, indent=1) + "\n")
            print(f"{part}: recorded")
            continue
        lines = list(differences(known.get(part, {}), found, part in EXACT))
        failed |= bool(lines) and part in EXACT | {"update"}
        print(f"{part}: {'equal' if not lines else ''}")
        print("\n".join(f"  {line}" for line in lines), end="\n" if lines else "")
    raise SystemExit(int(failed))


if __name__ == "__main__":
    main()
