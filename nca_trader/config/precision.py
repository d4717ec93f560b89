"""What may be computed in fewer bits."""

from __future__ import annotations

import dataclasses

from nca_trader.config.ranges import one_of, refuse, strict


@strict
@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """What of the encoder may be of bfloat16; parameters, sums, readout and losses are float32.

    The usual presets: f32 is all "float32"; bf16 has `matmul = "bfloat16"`; float32 parameters
    with bfloat16 compute has `compute = "bfloat16"` as well. See docs/concepts/precision.md.

    Attributes:
      matmul: "float32" or "bfloat16", of the operands of matrix products; they sum in float32.
      compute: "float32" or "bfloat16", of the cells between products; "bfloat16" takes a matmul
        of "bfloat16".
      params: "float32", of the parameters as they are learnt and saved.
    """

    matmul: str = "float32"
    compute: str = "float32"
    params: str = "float32"

    def __post_init__(self):
        for name in ("matmul", "compute", "params"):
            if getattr(self, name) == "float16":
                refuse(
                    [
                        f"{name}='float16' ends at 65,504 and at 6e-8: gradients leave that range, "
                        "and the loss is not scaled to keep them there; take 'bfloat16', whose "
                        "range is float32's."
                    ]
                )
        if self.params == "bfloat16":
            refuse(
                [
                    "params='bfloat16' would lose updates below 1/256 of a weight, unless float32 "
                    "values were kept beside, and then it saves nothing; take 'float32'."
                ]
            )
        refuse(
            one_of(self, "matmul", ("float32", "bfloat16")),
            one_of(self, "compute", ("float32", "bfloat16")),
            one_of(self, "params", ("float32",)),
        )
        if self.compute == "bfloat16" and self.matmul == "float32":
            refuse(
                [
                    "compute='bfloat16' rounds what products of matmul='float32' would read; take "
                    "matmul='bfloat16' with it."
                ]
            )
