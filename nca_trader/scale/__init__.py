"""From one chip to a pod: what a machine has, and what a run would need elsewhere."""
