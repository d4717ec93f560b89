"""What is said of a bar file that is refused."""

import pytest

from nca_trader.errors import BarError


def refusal(read, *given, **options):
    """The message of the `BarError` that `read(*given, **options)` raises."""
    with pytest.raises(BarError) as caught:
        read(*given, **options)
    return str(caught.value)
