"""Beyond one machine: chips and topologies, and what a run would need there."""
