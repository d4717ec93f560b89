"""Where a run takes place, and what is kept of it: its devices, its checkpoints."""

from __future__ import annotations

import dataclasses

from nca_trader.config.ranges import between, multiple, refuse, strict, whole


@strict
@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """The devices that a run is spread over, as a mesh of axes (data, fsdp, model).

    Attributes:
      devices: all of them; None is data * fsdp * model. By itself it is the size of `data`.
      data: parts of a batch whose devices share nothing else; None is what `devices` leaves.
      fsdp: devices that share parameters and optimiser state as well, a part kept by each.
      model: devices that share the width of hidden layers.
      deterministic: a seed ends in the same bits on any number of devices, at the price of more
        traffic and smaller products; `data` alone. Without it the end is the same to rounding.
    """

    devices: int | None = None
    data: int | None = None
    fsdp: int = 1
    model: int = 1
    deterministic: bool = False

    def __post_init__(self):
        given = [name for name in ("devices", "data") if getattr(self, name) is not None]
        refuse(whole(self, 1, *given, "fsdp", "model"))
        inner = self.fsdp * self.model
        if self.devices is not None and self.devices != (self.data or 1) * inner:
            if self.data is not None:
                refuse(
                    [
                        f"devices={self.devices}, but data * fsdp * model = {self.data * inner}; "
                        "give one of devices and data."
                    ]
                )
            refuse(multiple("devices", self.devices, "fsdp * model", inner))
        if self.deterministic and inner > 1:
            refuse(
                [
                    f"deterministic=true is of the data axis alone, but fsdp={self.fsdp} and "
                    f"model={self.model}; set both to 1, or leave it out."
                ]
            )

    @property
    def axes(self) -> tuple[int, int, int]:
        """The sizes of data, fsdp and model."""
        inner = self.fsdp * self.model
        return self.data or (self.devices or inner) // inner, self.fsdp, self.model


@strict
@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What is kept of a run, and when it goes back to it.

    Attributes:
      every: updates between checkpoints. every_seconds: seconds between them, whichever comes
        first; 0 is never, of either. One is also saved at the end, and when asked to stop. A
        checkpoint takes about 0.1 s of one core, while training goes on.
      keep: newest checkpoints that stay.
      max_skips: updates dropped in a row (their gradients were not finite) after which the run
        goes back to its newest checkpoint, with another key; NaN in parameters does so at once.
      max_rollbacks: times that it goes back to the same checkpoint before it gives up.
    """

    every: int = 0
    every_seconds: float = 30.0
    keep: int = 3
    max_skips: int = 5
    max_rollbacks: int = 3

    def __post_init__(self):
        refuse(whole(self, 1, "keep", "max_skips"), whole(self, 0, "every", "max_rollbacks"))
        refuse(between(self, "[0, inf)", "every_seconds"))
