"""What the tests of bar files share."""

import pytest

from nca_trader.data.bars import read_bars


@pytest.fixture
def read(tmp_path):
    """Reads a text as the file bars.csv."""

    def read(text, name="bars.csv", **options):
        (tmp_path / name).write_text(text)
        return read_bars(tmp_path / name, **options)

    return read
