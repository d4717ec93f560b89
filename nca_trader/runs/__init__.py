"""A run is a folder: manifest, checkpoints, and the trial log."""
