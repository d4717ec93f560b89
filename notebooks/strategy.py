# %% [markdown]
# # Your strategy, its sweep, and its luck
#
# A strategy of your own, a grid of its parameters as one program, and the question that a sweep
# raises: is the best of it more than the luck of many tries?
#
# *Pictures and numbers are of `make notebooks` on two cores of a shared machine, November 2026.*

# %%
# %matplotlib inline
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import nca_trader as nca
from nca_trader.strategies import rolling

bars = nca.sample_bars("sp500").select("SP500")
costs = nca.Costs(commission=5e-4, slippage=2e-4)

# %% [markdown]
# ## One bar at a time
#
# `act` gets a state and one bar, and returns the next state and a target weight. It never receives
# a later bar, so it cannot look ahead.


# %%
def dip(lookback=20, depth=0.05):
    highest = rolling.highest(lookback)

    def act(state, bar):
        state, top = highest.update(state, bar.close, bar.present)
        return state, jnp.where(bar.close < (1 - depth) * top, 1.0, 0.0)

    return nca.Strategy(highest.init, act, f"dip {lookback}, {depth}")


nca.backtest(bars, dip(), costs).plot()

# %% [markdown]
# ## A function of bars, and a leak
#
# Any library may compute target weights. Here a mean that is centred by mistake: it sees ten bars
# ahead, and `leakcheck` names the first bar that gives it away.


# %%
def centred(bars):
    close = pd.DataFrame(bars.close)
    return (close > close.rolling(20, center=True).mean()).astype(float).to_numpy()


print(nca.leakcheck(centred, bars, cases=50))

# %% [markdown]
# ## The sweep
#
# 240 combinations are one compiled program. Every number is that of `nca.backtest`.

# %%
grid = {"lookback": range(5, 125, 5), "depth": np.round(np.arange(0.01, 0.11, 0.01), 2)}
table = nca.sweep(bars, dip, grid, costs, trials=None)
heat = table.pivot(index="depth", columns="lookback", values="sharpe")

figure, ax = plt.subplots(figsize=(10, 3.5), layout="constrained")
image = ax.imshow(heat, aspect="auto", origin="lower", cmap="RdBu", vmin=-1, vmax=1)
ax.set_xticks(range(len(heat.columns)), heat.columns)
ax.set_yticks(range(len(heat.index)), heat.index)
ax.set(xlabel="lookback, bars", ylabel="depth of the dip", title="Sharpe ratio, 1999 to 2018")
figure.colorbar(image)
plt.show()

# %% [markdown]
# ## Is the best luck?
#
# The verdict compares the best Sharpe ratio with the best that so many tries without skill would
# show, and resamples the series to price the search itself.

# %%
print(table.attrs["verdict"])

# %%
best = table.sort_values("sharpe").iloc[-1]
chosen = dip(int(best["lookback"]), float(best["depth"]))
stress = nca.backtest(bars, chosen, costs).stress()
print(stress.sentence)
