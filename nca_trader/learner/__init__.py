"""How an agent learns: rollouts, advantages, the clipped surrogate, the training loop."""
