"""`python -m nca_trader` is the command `nca-trader`."""

import sys

from nca_trader.cli import main

if __name__ == "__main__":
    sys.exit(main())
