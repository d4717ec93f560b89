# %% [markdown]
# # Train and prove
#
# In a market that is drawn from known equations, the best possible reward can be computed. The
# fraction of it that an agent reaches says whether the agent learnt. Here is `nano` on `ou_mid`, a
# price that returns to its mean, with costs. The agent sees returns and price levels only.
#
# *Pictures and numbers are of `make notebooks` on two cores of a shared machine, November 2026.*

# %%
import matplotlib.pyplot as plt

import nca_trader as nca

# %% [markdown]
# ## The market and its optimum

# %%
task = nca.synthetic.make("ou", phi=0.95, sigma=0.01, cost=0.002)
print(f"the best policy earns {task.optimum:.6f} per step, after costs")
figure, ax = plt.subplots(figsize=(10, 2.5), layout="constrained")
ax.plot(task.bars.close[:600, 0], linewidth=1)
ax.set(xlabel="bar", ylabel="price", title="600 bars of the market")
plt.show()

# %% [markdown]
# ## Training, judged on a path that it did not see
#
# `nca.prove` trains with the preset and judges on another draw of the market. It also trains a
# control that sees one bar only. A million and a half steps are a sixteenth of the preset.

# %%
(proof,) = nca.prove(["ou_mid"], steps=1_500_000, seeds=[7])
figure, ax = plt.subplots(figsize=(10, 3.5), layout="constrained")
ax.plot(
    [p.steps for p in proof.curve], [p.reached.fraction for p in proof.curve], "o-", label="nano"
)
ax.axhline(1.0, color="black", linewidth=1, label="the optimum")
ax.axhline(proof.bar, color="tab:red", linestyle=":", label="the claim for the whole preset")
ax.set(xlabel="environment steps", ylabel="fraction of the optimum", ylim=(-0.6, 1.05))
ax.legend(loc="lower right")
plt.show()

# %%
for name, value in proof.row().items():
    if name in ("market", "fraction", "untrained", "no_history", "bar", "steps", "passed"):
        print(f"{name:>12}: {value}")

# %% [markdown]
# The untrained agent loses money to costs. `no_history` is a control that sees one bar: in this
# market the current level is enough, so it should do well too. Run `nca-trader prove hidden` for a
# market in which memory is needed, and in which that control fails.
#
# ## Markets with nothing to earn
#
# `nca-trader prove martingale` trains where nothing can be earned: there the agent has to hardly
# trade, and a learner that finds something has a fault.
