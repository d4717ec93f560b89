# %% [markdown]
# # Quickstart
#
# A rule and a small agent, on daily bars of the S&P 500 and the NASDAQ, after costs. The agent
# trains on the years before 2011, its update is selected on 2011 and 2012, and both trade the
# years from 2013 on, which neither saw.
#
# *Pictures and numbers are of `make notebooks` on two cores of a shared machine, November 2026.*

# %%
import matplotlib.pyplot as plt

import nca_trader as nca

bars = nca.sample_bars("sp500")  # nca.read_bars("mine.csv") reads your own
costs = nca.Costs(commission=5e-4, slippage=2e-4)  # 5 bp of notional, 2 bp of price
bars

# %% [markdown]
# ## A rule
#
# A decision at a close fills at the next open. `result.costs` says where equity went.

# %%
cross = nca.backtest(bars, nca.rules.sma_cross(50, 200), costs, start="2013-01-01")
print(cross)

# %%
cross.costs

# %% [markdown]
# ## An agent
#
# `nano` is a neural cellular automaton with 7,000 parameters. A million steps are a 24th of its
# preset. That is enough to see training at work, and not enough to trust.

# %%
env = nca.TradingEnv(bars.between(None, "2011-01-01"), nca.EnvConfig(short=False, costs=costs))
rows = []
select = nca.Selector(bars, "2011-01-01", "2013-01-01")
run = nca.train(env, "nano", "runs/first", steps=1_000_000, report=rows.append, select=select)

figure, axes = plt.subplots(1, 2, figsize=(10, 3), layout="constrained")
for ax, name in zip(axes, ("reward", "entropy"), strict=True):
    ax.plot([row["steps"] for row in rows], [row[name] for row in rows])
    ax.set(xlabel="environment steps", title=f"{name}, per step, in training")
plt.show()

# %% [markdown]
# ## Side by side, on unseen years

# %%
agent = nca.backtest(bars, run, costs=costs, start="2013-01-01", name="nano")
both = nca.compare([agent, cross])
print(both)

# %%
both.plot()

# %% [markdown]
# An index rose in these years, so whatever is mostly long looks good. One short run of one seed
# proves nothing: the notebook *Train and prove* shows how to tell an agent that learnt from one
# that did not. `nca.report(bars, agent, "page.html", run=run)` writes the page for a colleague.
