"""From one chip to a pod: what a machine has, plans, profiles."""
