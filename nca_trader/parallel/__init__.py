"""The mesh of devices, and the processes of a run."""
