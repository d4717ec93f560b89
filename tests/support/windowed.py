"""The reference of every decision: the policy's whole window, encoded from the beginning."""

from nca_trader.agents.policy import decide


def decide_on_window(policy, params, window, present, account):
    """Logits `[A, n]` from the last bars, `window` `[RF, A, F]` and `present` `[RF, A]`."""
    cells = policy.encode(params, window[None], present[None], halo=len(window) - 1)[0, 0]
    return decide(policy, params, cells, account).logits
