# %% [markdown]
# # Paper trading and its journal
#
# The same strategy, the same account and the same costs, now bar by bar. Every bar, decision, order
# and fill is in a journal before it is acted on, and the session earns what the backtest said, bit
# for bit.
#
# *Pictures and numbers are of `make notebooks` on two cores of a shared machine, November 2026.*

# %%
import sqlite3
import subprocess
import sys

import matplotlib.pyplot as plt
import pandas as pd

import nca_trader as nca

costs = nca.Costs(commission=5e-4, slippage=2e-4)
bars = nca.sample_bars("sp500").between("2006-01-01", "2010-01-01")
nca.write_bars(bars, "bars.csv")
rule = nca.rules.momentum(60)

session = nca.paper_trade(rule, "replay:bars.csv", "paper.db", costs=costs)
backtest = nca.backtest(bars, rule, costs)
print(f"paper:    {session['equity']!r}")
print(f"backtest: {float(backtest.equity.iloc[-1])!r}")

# %% [markdown]
# ## What the journal holds

# %%
with sqlite3.connect("paper.db") as journal:
    events = pd.read_sql("select kind, count(*) as events from event join series on id = series"
                         " group by kind order by 2 desc", journal)  # fmt: skip
print(events.to_string(index=False))

# %% [markdown]
# ## A session that is cut off, and resumed
#
# The session stops after 300 bars, and the same call resumes it. The end is the same.

# %%
left = iter(range(300))
nca.paper_trade(
    rule, "replay:bars.csv", "cut.db", costs=costs, stop=lambda: next(left, None) is None
)
resumed = nca.paper_trade(rule, "replay:bars.csv", "cut.db", costs=costs)
print(resumed["equity"] == session["equity"], resumed["bars"], "bars")

# %% [markdown]
# ## A limit that halts
#
# A drawdown of 15% stops the session. It stays stopped until someone says why it may go on.

# %%
limits = nca.Limits(max_drawdown=0.15)
try:
    nca.paper_trade(
        nca.rules.buy_and_hold(), "replay:bars.csv", "halted.db", costs=costs, risk=limits
    )
except nca.HaltError as halt:
    print(halt)

# %% [markdown]
# A halt stops orders. It does not sell: what happens to the position is for a person to decide.

# %%
held = nca.backtest(bars, nca.rules.buy_and_hold(), costs)
drawdown = 1 - held.equity / held.equity.cummax()
figure, axes = plt.subplots(2, 1, figsize=(10, 4.5), sharex=True, layout="constrained")
axes[0].plot(backtest.equity, label=rule.name)
axes[0].plot(held.equity, label="buy and hold")
axes[0].set_ylabel("equity, after costs")
axes[0].legend()
axes[1].fill_between(drawdown.index, -drawdown, color="tab:orange", alpha=0.5)
axes[1].axhline(-0.15, color="tab:red", linestyle=":")
axes[1].axvline(drawdown.index[(drawdown > 0.15).argmax()], color="tab:red", label="the halt")
axes[1].set_ylabel("buy and hold: drawdown")
axes[1].legend()
plt.show()

# %% [markdown]
# ## Somebody edits the journal
#
# One fill is changed by hand. The chain of hashes names the first event that does not fit.


# %%
def verify(path):
    done = subprocess.run([sys.executable, "-m", "nca_trader", "journal", "verify", path],
                          capture_output=True, text=True)  # fmt: skip
    print(f"exit code {done.returncode}: {(done.stdout + done.stderr).strip()}")


verify("paper.db")
with sqlite3.connect("paper.db") as journal:
    journal.execute("update event set body = replace(body, '0', '1') where seq = 500")
verify("paper.db")
