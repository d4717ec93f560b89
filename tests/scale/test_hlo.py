"""Reading compiled programs: small ones, compiled for v5e once, of which the truth is known."""

import pathlib

import pytest

from nca_trader.scale.hlo import Shape, read_module, runs, trip_count, unknown_loops

SAMPLES = pathlib.Path(__file__).parent / "samples"


def module(name):
    return read_module((SAMPLES / f"{name}.hlo").read_text())


def test_a_loop_in_a_loop_runs_as_often_as_both_say():
    program = module("nested_scan")
    loops = [run for run in runs(program) if run.instruction.opcode == "while"]
    assert [(trip_count(program, run.instruction), run.times) for run in loops] == [(3, 1), (7, 3)]
    assert unknown_loops(program) == 0


def test_a_loop_whose_end_is_no_constant_is_counted_once_and_said():
    text = (SAMPLES / "running_sum.hlo").read_text()
    assert text.count("constant(64)") == 1
    program = read_module(text.replace("constant(64)", "parameter(1)"))
    assert unknown_loops(program) == 1
    assert max(run.times for run in runs(program)) == 1


def test_a_conditional_is_its_dearest_branch():
    program = module("either")
    products = [run for run in runs(program) if "dot_general" in run.instruction.op_name]
    assert len(products) == 1
    # Also where the dear branch stands first.
    text = (SAMPLES / "either.hlo").read_text()
    first, second = "%region_0.0_spmd", "%region_1.0_spmd"
    swapped = text.replace(f"{{{first}, {second}}}", f"{{{second}, {first}}}")
    assert swapped != text
    again = [run for run in runs(read_module(swapped)) if "dot_general" in run.instruction.op_name]
    assert len(again) == 1


def test_shapes_have_their_bytes_and_their_place():
    program = module("causal_convolution")
    (fusion,) = [run.instruction for run in runs(program) if run.instruction.opcode == "fusion"]
    assert fusion.shapes == (Shape("bf16", (8, 100, 128), 0),)
    assert fusion.shapes[0].bytes == 8 * 100 * 128 * 2
    copied = next(i.instruction for i in runs(program) if i.instruction.opcode == "copy-start")
    assert [shape.space for shape in copied.shapes] == [1, 0, 2]
    assert fusion.cycles == 5904  # as the text says
    assert fusion.op_name == "jit(causal_convolution)/collect/conv_general_dilated"


@pytest.mark.parametrize(
    ("dtype", "size"), [("f32", 24), ("bf16", 12), ("s8", 6), ("pred", 6), ("s4", 3), ("f8e4m3", 6)]
)
def test_an_element_takes_what_its_type_says(dtype, size):
    assert Shape(dtype, (2, 3), 0).bytes == size


def test_what_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        read_module("HloModule nothing")
