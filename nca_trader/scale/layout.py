"""Mesh sizes of a TPU slice; `parallel.mesh.arrange` places its chips."""

from __future__ import annotations

from nca_trader.scale.chips import Slice

# From so many chips on, parameters and optimiser are split over the four chips of a square: a
# smaller slice trains agents whose state is far below a chip's memory.
FSDP_FROM = 256
SQUARE = 4


def mesh_axes(there: Slice) -> tuple[int, int, int]:
    """(data, fsdp, model) sizes for all devices of a slice; their product is its devices."""
    return axes_of(there.devices, there.chips)


def axes_of(devices: int, chips: int) -> tuple[int, int, int]:
    """(data, fsdp, model) sizes for so many devices, which so many chips have."""
    fsdp = SQUARE if chips >= FSDP_FROM and devices % SQUARE == 0 else 1
    return devices // fsdp, fsdp, 1
