"""What a compilation is at is read from the files that the compiler writes."""

from nca_trader.scale.compiled import stage_of


def test_the_newest_files_name_the_stage(tmp_path):
    assert stage_of(tmp_path) == "tracing the update"
    seen = []
    for name in (
        "module_0001.jit_step.before_optimizations.txt",
        "module_0001.jit_step.after_optimizations_after_buffer_assignment.txt",
        "module_0001.jit_step.after_codegen.txt",
    ):
        seen.append(stage_of(tmp_path))
        (tmp_path / name).write_text("")
    seen.append(stage_of(tmp_path))
    assert seen == [
        "tracing the update", "optimising, and placing arrays", "generating code",
        "reading the program",
    ]  # fmt: skip
