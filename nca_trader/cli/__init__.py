"""The command `nca-trader`: parses the options, calls the library and prints what it returns.

Exit codes: 0 done; 1 a check failed, or an object store cannot be reached; 2 the input was wrong;
3 halted; 4 damaged or unwritable state; 130 interrupted before the end, by SIGINT or SIGTERM.
"""

from nca_trader.cli.command import COMMANDS as COMMANDS
from nca_trader.cli.command import build_parser as build_parser
from nca_trader.cli.command import end_stopped as end_stopped
from nca_trader.cli.command import fail_check as fail_check
from nca_trader.cli.command import main as main
from nca_trader.cli.command import print_json as print_json
from nca_trader.cli.command import stop_on_signal as stop_on_signal
from nca_trader.cli.command import use_compile_cache as use_compile_cache
