"""A market in which only an asset's place among all earns: by the feature, or by messages."""

import pytest

import nca_trader as nca
from nca_trader.config.toml import to_toml

SMALL = ["policy.window=1", "policy.channels=16"]
QUICK = [*SMALL, "learner.num_epochs=1", "optimizer.schedule=linear"]
NCA = ["policy.steps=2", "policy.dilations=[1,1]", "optimizer.learning_rate=2e-3"]
AGENTS = {
    "mlp": ("mlp", QUICK),
    "gru": (
        "gru",
        ["policy.window=1", "policy.channels=16", "optimizer.learning_rate=3e-3", *QUICK],
    ),
    "nca": ("nano", ["policy.neighbours=none", *NCA]),
    "nca, all, without the feature": ("nano", ["policy.neighbours=all", *NCA]),
}


def proved(agent, seeds, folder, ranked=True):
    """The scores of an agent, where it is shown its rank or not."""
    env = nca.load_env("cross_section")
    if not ranked:
        env = nca.load_env(env, ["features=['return_level']"])
    (folder / "market.toml").write_text(to_toml(env))
    market, more = str(folder / "market.toml"), {"steps": 400_000, "controls": False}
    return nca.prove([market], nca.load_agent(*agent), seeds=seeds, **more)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", AGENTS)
def test_a_place_among_all_is_learnt_with_the_feature_or_with_messages(name, seed, tmp_path):
    (score,) = proved(AGENTS[name], [seed], tmp_path, ranked="without" not in name)
    assert score.reached.fraction > 0.95


@pytest.mark.slow
def test_without_either_most_of_it_is_lost(tmp_path):
    (score,) = proved(AGENTS["nca"], [0], tmp_path, ranked=False)
    assert score.reached.fraction < 0.45
