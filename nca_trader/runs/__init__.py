"""A run is a folder: manifest, checkpoints, and the ledger of trials."""
