"""The environment's name in Gymnasium, registered without importing what it needs."""

ID = "nca_trader/Trading-v0"


def register() -> None:
    """Makes the name known to `gymnasium.make` and `gymnasium.make_vec`; twice is once."""
    import gymnasium

    if ID not in gymnasium.registry:
        gymnasium.register(
            ID,
            entry_point="nca_trader.envs.gym.environment:GymEnv",
            vector_entry_point="nca_trader.envs.gym.vector:GymVectorEnv",
        )
