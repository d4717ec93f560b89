# %% [markdown]
# # Many devices, and a plan for a pod
#
# One program trains on one CPU and on a slice of a TPU. Here eight CPU devices stand for eight
# chips: the same seed is the same run, to rounding, and in the deterministic mode bit for bit.
#
# *Pictures and numbers are of `make notebooks` on two cores of a shared machine, November 2026.*

# %%
import dataclasses
import os

# Before jax is imported: eight devices on one CPU.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
import jax
import matplotlib.pyplot as plt
import numpy as np

import nca_trader as nca

env = nca.TradingEnv(nca.sample_bars("sp500").between(None, "2013-01-01"), "multi_asset")
agent = nca.load_agent("nano")
agent = dataclasses.replace(
    agent,
    policy=dataclasses.replace(agent.policy, channels=8, hidden=16),
    learner=dataclasses.replace(
        agent.learner, num_segments=16, num_minibatches=2, segment_length=64
    ),
)
print(len(jax.devices()), "devices")

# %% [markdown]
# ## The same run on one device and on eight

# %%
curves = {}
for deterministic in (False, True):
    for devices in (1, 8):
        mesh = dataclasses.replace(agent.mesh, devices=devices, deterministic=deterministic)
        given, rows = dataclasses.replace(agent, mesh=mesh), []
        name = f"runs/{devices}-{deterministic}"
        nca.train(env, given, name, steps=32_768, report=rows.append)
        curves[devices, deterministic] = np.array([row["loss"] for row in rows])
gaps = {d: np.abs(curves[1, d] - curves[8, d]) for d in (False, True)}
print(f"largest difference of the loss: {gaps[False].max():.1e}")
print(f"in the deterministic mode: {gaps[True].max():.1e}")
assert gaps[True].max() == 0.0

# %%
figure, axes = plt.subplots(1, 2, figsize=(10, 3), layout="constrained")
axes[0].plot(curves[1, False], label="1 device")
axes[0].plot(curves[8, False], "--", label="8 devices")
axes[0].set(title="loss", xlabel="update")
axes[0].legend()
axes[1].plot(gaps[False], label="means by all-reduce")
axes[1].plot(gaps[True], label="deterministic: exactly 0")
axes[1].set(title="difference of the loss, 1 against 8 devices", xlabel="update")
axes[1].legend()
plt.show()

# %% [markdown]
# ## A plan for a slice that is not here
#
# `nca.plan` compiles the update with the TPU compiler, on this CPU. Nothing runs and nothing is
# rented. Seconds are the compiler's estimates: a chip can only take longer.

# %%
plan = nca.plan("nano", "v5e-8")
print(f"fits: {plan['fits']}, {plan['hbm_bytes_per_chip'] / 2**20:.0f} MiB of "
      f"{plan['hbm_limit'] / 2**30:.2f} GiB per chip")  # fmt: skip
print(
    f"bound by {plan['estimate']['bound']}, at most {plan['estimate']['steps_per_s']:,.0f} steps/s"
)

# %%
parts = {name: cycles for name, cycles in plan["cycles"].items() if name != "update"}
memory = {kind: size / 2**20 for kind, size in plan["bytes_by_kind"].items()}
figure, axes = plt.subplots(1, 2, figsize=(10, 2.5), layout="constrained")
axes[0].barh(list(parts), list(parts.values()))
axes[0].set_title("cycles of an update, by part, by the compiler")
axes[1].barh(list(memory), list(memory.values()))
axes[1].set_title("MiB per chip, by kind")
plt.show()
