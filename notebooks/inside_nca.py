# %% [markdown]
# # Inside the NCA
#
# The policy is one rule, applied K times to a lattice of bars. A cell reads its own bar and two
# earlier cells, further back at each step: 1, 2, 4, 8 and 16 bars. Here the rule is trained for a
# moment, and then looked at.
#
# *Pictures and numbers are of `make notebooks` on two cores of a shared machine, November 2026.*

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import nca_trader as nca

costs = nca.Costs(commission=5e-4, slippage=2e-4)
bars = nca.sample_bars("sp500").select("SP500")
env = nca.TradingEnv(bars.between(None, "2013-01-01"), nca.EnvConfig(costs=costs))
run = nca.train(env, "nano", "runs/inside", steps=1_000_000)
policy, params = run.policy, run.params()
print(
    f"{sum(leaf.size for leaf in jax.tree.leaves(params)):,} parameters, "
    f"a decision sees {policy.receptive_field} bars"
)

# %% [markdown]
# ## Cells over K steps
#
# The first row is what the features say, the next ones are the cells after each update: time to the
# right, channels down. Memory spreads to the right only, as far as the taps reach.

# %%
whole = nca.TradingEnv(bars, env.config)
x, present = whole.market.features, whole.market.legs.present  # [N, A, F], [N, A]
row = bars.row("2008-09-01")
span = slice(row - 62, row + 160)
steps = range(1, run.agent_config.policy.steps + 1)


def cells_after(k, x, present):
    """Cells `[T, C]` after k updates, of the bars of the span."""
    shorter = nca.Run("runs/inside", steps=k).policy
    return np.asarray(shorter.encode(params, x[None, span], present[None, span])[0, :, 0])


maps = [cells_after(k, x, present) for k in steps]
figure, axes = plt.subplots(len(maps) + 1, 1, figsize=(10, 8), sharex=True, layout="constrained")
axes[0].plot(bars.close[span, 0], linewidth=1)
axes[0].set_ylabel("S&P 500")
for ax, k, cells in zip(axes[1:], steps, maps, strict=True):
    ax.imshow(cells.T, aspect="auto", cmap="RdBu", vmin=-2, vmax=2)
    ax.set(ylabel=f"step {k}", yticks=[])
axes[-1].set_xlabel("bars, from June 2008")
plt.show()

# %% [markdown]
# ## What a missing bar does
#
# A missing bar enters as zeros and a flag. The picture is the change of the last cells when one bar
# of the span is hidden: nothing before it, and nothing once it is out of reach.

# %%
hidden = 80
without = present.at[row - 62 + hidden].set(False)
changed = np.abs(cells_after(5, x, without) - maps[-1])
figure, ax = plt.subplots(figsize=(10, 2.5), layout="constrained")
image = ax.imshow(changed.T, aspect="auto", cmap="magma")
ax.axvline(hidden + policy.receptive_field - 0.5, color="white", linestyle=":")
ax.set(xlabel="bars; the dotted line is the end of the receptive field", ylabel="channel")
figure.colorbar(image)
plt.show()
touched = np.flatnonzero(changed.max(axis=1))
print(f"bar {hidden} is hidden; cells {touched.min()} to {touched.max()} change")
assert touched.min() == hidden and touched.max() < hidden + policy.receptive_field

# %% [markdown]
# ## A window, a lattice and a stream are one policy
#
# Paper trading feeds one bar at a time. The cells are those of the lattice, to rounding.

# %%
state = policy.begin()
stream = jax.jit(policy.stream)
for t in range(span.start, span.stop):
    state, cells = stream(params, state, x[t], present[t])
gap = float(jnp.abs(cells[0] - maps[-1][-1]).max())
print(f"largest difference of the last cell: {gap:.1e}")
assert gap < 1e-5

# %% [markdown]
# ## Return against K
#
# K can differ from training. On the years before 2013, which trained the agent, so this says how
# the rule behaves and nothing about what it will earn:

# %%
rows = []
for k in range(1, 9):
    acting = nca.Run("runs/inside", steps=k)
    result = nca.backtest(bars, acting, start="2005-01-01", stop="2013-01-01", look=False)
    rows.append((k, result.equity.iloc[-1] - 1, acting.policy.receptive_field))
figure, ax = plt.subplots(figsize=(7, 3), layout="constrained")
ax.plot([k for k, *_ in rows], [100 * earned for _, earned, _ in rows], "o-")
ax.axvline(5, color="black", linestyle=":", label="K of training")
ax.axhline(0, color="grey", linewidth=1)
ax.set(xlabel="K, updates of a cell", ylabel="return 2005 to 2012, %, IN SAMPLE")
ax.legend()
plt.show()
