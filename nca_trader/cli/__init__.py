"""The command `nca-trader`: parses the options, calls the library and prints what it returns.

Exit codes: 0 done; 1 a check failed, or an object store cannot be reached; 2 the input was wrong;
3 halted; 4 damaged or unwritable state; 130 interrupted before the end, by SIGINT or SIGTERM.
"""

from nca_trader.cli.command import (
    COMMANDS,
    build_parser,
    fail_check,
    main,
    print_json,
    stop_on_signal,
    stopped,
    use_compile_cache,
)

__all__ = [
    "COMMANDS",
    "build_parser",
    "fail_check",
    "main",
    "print_json",
    "stop_on_signal",
    "stopped",
    "use_compile_cache",
]
