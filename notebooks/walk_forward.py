# %% [markdown]
# # Walk-forward
#
# Parameters that are chosen on all years look better than any trader could have done. A
# walk-forward chooses them again and again on the past alone, and trades the next year with them,
# in one account.
#
# *Pictures and numbers are of `make notebooks` on two cores of a shared machine, November 2026.*

# %%
import matplotlib.pyplot as plt
import numpy as np

import nca_trader as nca

bars = nca.sample_bars("sp500").select("SP500")
costs = nca.Costs(commission=5e-4, slippage=2e-4)
grid = {"fast": range(5, 35, 5), "slow": range(50, 200, 50)}

walk = nca.walk_forward(bars, nca.rules.sma_cross, costs, grid=grid, train=1000, test=250)
print(walk)

# %% [markdown]
# ## What hindsight adds

# %%
table = nca.sweep(bars, nca.rules.sma_cross, grid, costs, trials=None)
best = table.sort_values("equity").iloc[-1]
known = nca.rules.sma_cross(int(best["fast"]), int(best["slow"]))
start = str(walk.result.equity.index[0].date())
hindsight = nca.backtest(bars, known, costs, start=start)

figure, ax = plt.subplots(figsize=(10, 3.5), layout="constrained")
ax.plot(walk.result.equity, label="walk-forward: chosen on the past")
ax.plot(hindsight.equity, label=f"best of all years, known in hindsight: {known.name}")
for first in walk.folds["test_start"]:
    ax.axvline(first, color="lightgrey", linewidth=0.5, zorder=0)
ax.set_ylabel("equity, after costs")
ax.legend()
plt.show()

# %% [markdown]
# ## What each fold chose

# %%
columns = [name for name in ("test_start", "fast", "slow", "sharpe") if name in walk.folds]
print(walk.folds[columns].to_string(index=False))

# %% [markdown]
# ## A model that you fit
#
# A function of the train span that returns a function of bars. Here a regression on the last
# return, refit in every fold.


# %%
def forecaster(train):
    r = np.diff(train.close[:, 0]) / train.close[:-1, 0]
    slope = np.polyfit(r[:-1], r[1:], 1)[0]

    def decide(bars):
        return np.sign(slope * np.diff(bars.close[:, 0], prepend=bars.close[0, 0]))

    return decide


print(nca.walk_forward(bars, forecaster, costs, train=1000, test=250, purge=1).verdict)

# %% [markdown]
# ## A decision that peeks
#
# The same model with a mistake of one bar: it decides on the return that follows. The
# walk-forward lets the first fold decide again on bars whose later half was replaced, sees other
# decisions in the half before it, and ends.


# %%
def peeking(train):
    def decide(bars):
        following = np.append(bars.close[1:, 0], bars.close[-1, 0])
        return np.sign(following - bars.close[:, 0])

    return decide


try:
    nca.walk_forward(bars, peeking, costs, train=1000, test=250)
except nca.NcaTraderError as error:
    print(f"{type(error).__name__}: {error}")
else:
    raise AssertionError("the leak was not found")
