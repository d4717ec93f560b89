"""An agent of this package on a frozen market, evaluated on the way: as `prove` trains it."""

from benchmarks.peers.clock import row, run
from benchmarks.peers.looks import Looks
from nca_trader.agents import load_agent
from nca_trader.optimum.board import arrival
from nca_trader.optimum.prove import described, prepare, training
from nca_trader.optimum.rows import Score


def main(
    market: str = "ou_mid",
    agent: str = "nano",
    steps: int = 0,
    seconds: float = 60.0,
    seed: int = 0,
    out: str = "build/learns",
) -> dict[str, object]:
    """Trains the agent until it has arrived or `seconds` have passed; 0 steps are its own."""
    trial = prepare(market, load_agent(agent), steps or None)
    looks, points = Looks(out, 0, seconds, ""), []
    for point in training(trial.config, trial.agent, seed, looks.passed):
        points.append(point)
        if len(points) == 1:
            looks.start()
        found = Score(market=market, seed=seed, curve=points, entry=described(trial)).row()
        if (len(points) > 1 and arrival(found["curve"])) or point.seconds > seconds:
            break
    rate = found["steps"] / found["seconds"]
    return row(f"nca_trader {agent}", "nca_trader", 0, rate, found=found, before=looks.before)


if __name__ == "__main__":
    run(main)
