"""What cannot be used is one line that says what, where and how to mend it; nothing is written."""

import pandas as pd
import pytest
from tiny import UNTIL

from nca_trader.data.bars import write_bars


def missing(own):
    own.data.unlink()
    return "bars.csv: D001 no such file. Check the path."


def nan_price(own):
    frame = pd.read_csv(own.data)
    frame.loc[30, "close"] = float("nan")
    frame.to_csv(own.data, index=False)
    return "line 32"


def too_few(own):
    write_bars(own.bars[:66], own.data)
    return "66 bars"


BAD_DATA = [missing, nan_price, too_few]  # what else is refused, tests of data say


def commands(own):
    """The three that read bars, with everything that they would write in `own.folder`."""
    run, data = own.path, own.data
    return {
        "train": own.train_command(own.runs / "new"),
        "backtest": ["backtest", f"--run={run}", f"--data={data}", f"--out={own.folder}/r.csv"],
        "paper": [
            *("paper", f"--run={run}", f"--feed=replay:{data}"),
            f"--journal={own.folder}/journal.sqlite",
        ],
    }


def assert_refused(said, own, before, *says):
    assert said.code == 2, said
    assert len(said.err.splitlines()) == 1 and said.out == "", said
    for text in says:
        assert text in said.err, said.err
    assert own.written() == before


@pytest.mark.parametrize("name", ["train", "backtest", "paper"])
@pytest.mark.parametrize("spoil", BAD_DATA)
@pytest.mark.few(5)
def test_bars_that_cannot_be_used(command, own, name, spoil):
    says, before = spoil(own), own.written()
    assert_refused(command(*commands(own)[name]), own, before, f"nca-trader {name}: ", says)


AGENT_EDITS = {"channels": ("channels = 4", "channels = 8"), "leak": ("leak = 0.1", "leak = 0.2")}


@pytest.mark.parametrize("name", ["backtest", "paper"])
@pytest.mark.parametrize("edit", AGENT_EDITS)
def test_a_run_folder_whose_agent_was_edited(command, own, name, edit):
    file = own.path / "agent.toml"
    was, now = AGENT_EDITS[edit]
    assert was in file.read_text()
    file.write_text(file.read_text().replace(was, now))
    before = own.written()
    says = f"{file}: was changed after the run was made"
    assert_refused(command(*commands(own)[name]), own, before, says, "restore it, or train")


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--set=policy.channels=8", "agent.policy.channels was 4 there and is 8 now"),
        ("--set=env.costs.slippage=0.0", "env.costs.slippage was 0.0002 there and is 0.0 now"),
        ("--seed=3", "seed was 0 there and is 3 now"),
        ("--until=2020-07-01", "data rows was 200 there and is 182 now"),
    ],
)
def test_training_on_in_the_folder_of_another_run(command, own, option, says):
    before = own.written()
    said = command(*own.train_command(own.path), option)
    assert_refused(said, own, before, f"{own.path}: a run of something else: ", says, "--run")


@pytest.mark.parametrize("name", ["backtest", "paper"])
def test_a_folder_that_is_no_run(command, own, name):
    (own.path / "run.json").unlink()
    before = own.written()
    assert_refused(command(*commands(own)[name]), own, before, "tiny: not a run folder")


def test_training_into_a_folder_of_something_else(command, own):
    before = own.written()
    said = command(*own.train_command(own.folder))
    assert_refused(said, own, before, f"{own.folder}: holds files of something else; choose")


@pytest.mark.parametrize(
    ("file", "key", "says"),
    [
        ("agent.toml", "[policy]\nchanels = 4", "[policy] chanels is not a known key; did you"),
        ("agent.toml", "[learner]\ndiscount = 2.0", "[learner] discount=2.0 is outside its range"),
        ("env.toml", "comission = 1e-3", "comission is not a known key"),
        ("env.toml", "features = [", "not valid TOML"),
    ],
)
def test_a_configuration_with_a_slip_names_it(command, own, file, key, says):
    (own.folder / file).write_text(key + "\n")
    before = own.written()
    said = command(*own.train_command(own.runs / "new"))
    assert_refused(said, own, before, says)
    assert f"{own.folder / file}: " in said.err


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"agent": "nowhere.toml"}, "nowhere.toml: cannot be read (No such file or directory)"),
        ({"devices": 64}, "learner.logical_shards=8 is not a multiple of mesh.devices=64"),
        (
            {"until": "1999-01-01"},
            "bars.csv: no bar before --until 1999-01-01; the first is of 2020-",
        ),
    ],
)
def test_options_of_train_that_mean_nothing(command, own, changes, says):
    before = own.written()
    said = command(*own.train_command(own.runs / "new", **changes))
    assert_refused(said, own, before, says)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--start=2031-01-01"], "no bar from 2031-01-01 to the last; there are bars from 2020"),
        ([f"--start={UNTIL}", f"--stop={UNTIL}"], f"no bar from {UNTIL}"),
        (["--slippage=nan"], "costs.slippage = nan is not a fraction"),
    ],
)
def test_options_of_backtest_that_mean_nothing(command, own, options, says):
    before = own.written()
    said = command("backtest", f"--run={own.path}", f"--data={own.data}", *options)
    assert_refused(said, own, before, says)


def test_a_damaged_run_is_exit_4_and_one_line(command, own):
    (own.path / "run.json").write_text("{")
    for name in ("backtest", "paper"):
        said = command(*commands(own)[name])
        assert said.code == 4 and len(said.err.splitlines()) == 1, said
        assert "run.json: not JSON" in said.err and "restore it" in said.err


@pytest.mark.heavy
def test_a_run_without_a_good_checkpoint_is_exit_4(command, own):
    for file in (own.path / "checkpoints").glob("*/leaves/manifest.ocdbt"):
        file.write_bytes(b"damaged")
    said = command(*commands(own)["backtest"])
    assert said.code == 4, said
    assert "checkpoints: none of the checkpoints [1, 2] verifies" in said.err.splitlines()[-1]
