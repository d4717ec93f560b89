"""Every row of the design's fault table is a test, with the code by which its effect is known.

`ROWS` holds each row, and for each of its faults the tests and what they look for. A row without
a test, a test that is gone, and a test that no longer looks for its code fail here.
"""

import ast
import functools
import pathlib
import re

import pytest
from sources import parsed

HERE = pathlib.Path(__file__).parents[1]
TABLE = HERE.parents[1] / "shared" / "PAPER.md"
FAULTS, LIVE = "paper/test_faults.py", "paper/test_live.py"
SERVERS, ROUTER = "paper/test_live_faults.py", "paper/test_router.py"
GATE, ALPACA = "paper/test_gate.py", "paper/test_alpaca.py"
JOURNAL, STREAM = "paper/test_journal.py", "paper/test_venue_bars.py"
FEED = "paper/test_venue_feed.py"
WAITS, DAYS = "paper/test_waits.py", "paper/test_days.py"

# Of each row: (fault, file, test, what the test must look for).
ROWS = {
    "SIGKILL at each fail point (about 12) and 200 random kills": [
        ("each fail point", FAULTS, "a_kill_at_each_kind_of_event_is_survived", "before"),
        ("no point left out", FAULTS, "every_kind_of_event_has_a_fail_point", "KINDS"),
        ("12 random kills", FAULTS, "a_dozen_kills_at_any_call_are_survived", "converges"),
        ("200 random kills", FAULTS, "twenty_kills_at_any_call_are_survived", "converges"),
        ("a halt killed", FAULTS, "a_loss_that_halts_is_a_halt_also_if_the_process_dies_on_the_way",
         "max-drawdown"),
    ],
    "SIGTERM, Ctrl-C": [
        ("once, twice", FAULTS, "a_signal_ends_the_session_with_130_and_a_later_one_goes_on",
         "run_ended"),
        ("Ctrl-C", "cli/test_interrupt.py", "the_first_signal_asks_and_the_second_insists",
         "once more stops at once"),
    ],
    "disk full; db page flipped; WAL cut; head file ahead": [
        ("disk full", LIVE, "a_full_disk_stops_before_the_order", "full"),
        ("page flipped", FAULTS,
         "a_journal_damaged_between_two_sessions_is_refused_and_nothing_is_sent", "a flipped bit"),
        ("WAL cut", FAULTS,
         "a_journal_damaged_between_two_sessions_is_refused_and_nothing_is_sent", "a cut log"),
        ("head file ahead", FAULTS,
         "a_journal_damaged_between_two_sessions_is_refused_and_nothing_is_sent", "an older copy"),
        ("files exchanged", JOURNAL, "a_file_that_is_lost_during_a_session_stops_it", "deleted"),
    ],
    "clock +-1 h, DST 2024-03-10 and 11-03, TZ changed": [
        ("+1 h", LIVE, "clocks_that_differ_halt", "clock-skew"),
        ("-1 h", LIVE, "clocks_that_differ_halt", "-3600"),
        ("2024-03-10", SERVERS, "a_change_of_the_clock_is_crossed_on_time", "2024-03-10"),
        ("2024-11-03", SERVERS, "a_change_of_the_clock_is_crossed_on_time", "2024-11-03"),
        ("TZ", FAULTS, "the_same_decisions_under_any_time_zone", "America/New_York"),
        ("no clock of its own", "paper/test_sources.py", "no_clock_and_no_chance", "BANNED"),
    ],
    "bar duplicated (same, other values), out of order, missing, unfinished, in the future": [
        ("again", GATE, "the_same_bar_again_is_dropped_and_another_of_its_time_is_refused", "D021"),
        ("out of order", GATE, "the_same_bar_again_is_dropped_and_another_of_its_time_is_refused",
         "D020"),
        ("missing", SERVERS, "a_missing_bar_is_traded_through_as_in_training", "halt"),
        ("missing for long: halt", SERVERS,
         "a_position_without_bars_for_as_long_as_training_knows_halts", "bars-missing"),
        ("missing for long: flat", SERVERS,
         "the_simulated_exchange_pays_such_a_position_out_as_training_does", "delisted"),
        ("missing of all", FEED, "a_missing_bar_of_all_is_a_gap", "gap"),
        ("unfinished", LIVE, "a_feed_from_the_future_is_refused", "bar-unfinished"),
        ("future", GATE, "a_bar_that_is_not_closed_is_not_used", "bar-future"),
    ],
    "NaN, inf, 0, negative price, high < low, negative volume; 100x spike": [
        ("NaN", GATE, "the_gate_names_what_is_wrong", "D006"),
        ("inf", GATE, "the_gate_names_what_is_wrong", "D007"),
        ("0, negative", GATE, "the_gate_names_what_is_wrong", "D008"),
        ("high < low", GATE, "the_gate_names_what_is_wrong", "D010"),
        ("negative volume", GATE, "the_gate_names_what_is_wrong", "D012"),
        ("k in a row", LIVE, "a_feed_from_the_future_is_refused", "bad-bars"),
        ("spike", LIVE, "a_price_a_hundred_times_the_last_is_not_traded_on", "bar-not-confirmed"),
        ("confirmed", GATE, "a_jump_that_the_next_bar_confirms_is_released_as_it_came", "D026"),
    ],
    "broker 4xx, 429, 5xx, timeout before and after accept, reset, HTML, slow drip": [
        *((fault, SERVERS, "a_live_session_at_alpaca_meets_every_answer_and_orders_once", fault)
          for fault in ("403-before", "429-before", "500-after", "504-before", "504-after",
                        "hang-before", "hang-after", "reset-before", "reset-after", "html-after",
                        "drip", "redirect-before")),
        ("classes", ROUTER, "every_class_of_answer_makes_one_order_or_none", "rejected"),
        ("duplicate id", ROUTER, "a_duplicate_id_is_success_by_look_up", "filled"),
        ("look-up fails", ROUTER, "look_ups_that_fail_hold_the_symbol_and_no_other", "symbol-held"),
        ("busy", ROUTER, "busy_waits_as_long_as_the_venue_says_and_ends_with_the_decision",
         "too-old"),
        ("no answer at all", FAULTS,
         "an_exchange_that_dies_halts_the_session_and_nothing_more_is_sent", "venue-unreachable"),
        ("never an answer", FAULTS, "an_exchange_that_accepts_and_never_answers", "timeout"),
        ("no second order", ALPACA, "alpaca_py_without_the_guard_makes_two_orders_of_one", "2"),
    ],
    "fills duplicated, late, out of order, partial then cancelled, too many, before the ack": [
        ("twice, out of order", ROUTER, "fills_in_parts_out_of_order_and_twice_count_once", "fill"),
        ("late", ROUTER, "a_fill_that_is_listed_late_is_waited_for", "late"),
        ("partial then cancelled", ALPACA, "partial_then_cancelled", "cancelled"),
        ("too many", ROUTER, "more_fills_than_ordered_halt", "overfilled"),
        ("changed", ROUTER, "an_execution_that_changes_halts", "fill-changed"),
        ("before the ack", ROUTER, "a_fill_before_the_answer_is_the_answer", "fill"),
        ("of somebody else", ROUTER,
         "a_fill_of_somebody_else_in_our_symbol_halts_and_in_another_does_not", "foreign-fill"),
    ],
    "stream drops, mute but open, reconnect storm": [
        ("drops", STREAM, "the_stream_posts_bars_and_corrections_and_comes_back_after_a_drop",
         "drop"),
        ("mute", STREAM, "a_mute_stream_is_opened_again", "connections"),
        ("storm", STREAM, "waits_between_connections_grow_to_half_a_minute_by_the_seed", "30"),
        ("stale", FEED, "an_outage_makes_the_feed_stale_and_every_bar_comes_after_it_in_order",
         "stale"),
        ("not traded on", LIVE, "a_bar_that_comes_too_late_is_not_traded_on", "decisions"),
        ("caught up", LIVE, "bars_missed_while_away_teach_but_do_not_trade", "decision"),
    ],
    "venue position differs; order cancelled by hand": [
        ("position", FAULTS, "a_position_that_moved_by_hand_halts_also_if_the_halt_is_killed",
         "position-differs"),
        ("cash", ROUTER, "cash_that_nothing_explains_halts_and_a_payment_explains_it",
         "cash-differs"),
        ("cancelled", LIVE, "a_rejected_order_is_decided_again_and_one_cancelled_by_hand_is_not",
         "cancelled"),
    ],
    "reconciliation: a working order without fills while fills do not explain the venue's "
    "position (NautilusTrader #5000); run twice in a row (#3878); position older than the "
    "look-back of fills": [
        ("#5000", ROUTER, "a_working_order_is_kept_while_fills_do_not_explain_the_position",
         "position-differs"),
        ("#3878", ROUTER, "reconciling_twice_changes_nothing", "head"),
        ("older", ROUTER,
         "positions_older_than_the_fills_are_adopted_at_the_first_start_and_halt_later",
         "position-differs"),
        ("denied", ROUTER, "an_acknowledged_order_that_the_venue_denies_halts", "order-lost"),
    ],
    "policy NaN, out of range, exception; checkpoint truncated, flipped, pickle inside": [
        ("NaN", LIVE, "three_unusable_decisions_halt", "policy-not-finite"),
        ("shape", "paper/test_session.py", "a_logit_of_the_wrong_shape_is_not_acted_upon",
         "policy-not-finite"),
        ("infinite", "paper/test_strategies.py", "infinite_targets_are_not_traded_and_halt",
         "policy-not-finite"),
        ("out of range", "paper/test_risk_limits.py", "whatever_is_asked_no_limit_is_exceeded",
         "max_position"),
        ("exception", SERVERS, "an_agent_that_raises_halts_and_goes_on_after_it_is_corrected",
         "policy-error"),
        ("truncated", "runs/test_tensors.py", "a_file_that_was_cut_is_refused", "raises"),
        ("flipped", "runs/test_tensors.py", "a_single_flipped_bit_is_refused_wherever_it_is",
         "raises"),
        ("checkpoint", "runs/test_checkpoint.py", "every_flipped_byte_and_every_cut_file_is_found",
         "cut"),
        ("pickle", SERVERS, "a_pickle_in_place_of_an_agent_is_refused_and_not_run", "it-ran"),
    ],
    "config: unknown key, wrong type, NaN limit": [
        ("unknown key", "config/test_presets.py",
         "an_unknown_key_names_file_table_and_the_nearest_key", "did you mean"),
        ("wrong type", "config/test_presets.py",
         "a_value_of_another_type_is_refused_and_not_converted", "text"),
        ("all at once", "config/test_presets.py", "all_that_is_wrong_is_said_at_once_and_each_once",
         "said"),
        ("NaN limit", "paper/test_kill_switch.py", "limits_are_options_of_both_commands", "NaN"),
    ],
    "any wait: Retry-After of hours, nan or inf; a cancel that stays pending, fifty symbols": [
        ("halt, stop, signal in any call", WAITS,
         "no_call_of_a_venue_keeps_a_halt_or_a_stop_from_being_heard", "1.0"),
        ("in any wait", WAITS, "no_wait_keeps_a_halt_or_a_stop_from_being_heard",
         "cancellations stay pending"),
        ("hours, nan, inf", WAITS, "no_wait_outlasts_the_order_that_it_is_for", "259_200"),
        ("fifty cancels", WAITS, "fifty_orders_are_cancelled_at_once_and_waited_for_once", "50"),
        ("the end", WAITS, "the_end_awaits_the_request_under_way_but_not_for_ever", "EXIT"),
    ],
    "a day's bar that settles late (60 s and more); bars below a minute": [
        (f"{venue} {every}", DAYS, "the_newest_bar_is_traded_on_and_no_older_one",
         f"at_{venue}, '{every}'")
        for venue, every in (("alpaca", "1d"), ("alpaca", "1h"), ("alpaca", "1min"),
                             ("binance", "1d"), ("binance", "1h"), ("binance", "1min"),
                             ("binance", "1s"))
    ],
    "the last N bars sent again after a reconnection; a bar revised several times": [
        ("again", LIVE, "bars_that_come_again_after_a_reconnection_are_dropped", "halt"),
        ("revised", LIVE,
         "a_bar_that_is_corrected_several_times_is_an_event_each_time_and_no_bad_bar",
         "correction"),
        ("left out", LIVE, "bars_that_a_feed_leaves_out_are_an_event", "gap"),
    ],
    "the first three orders rejected or too old, of a rule that orders once": [
        ("rejected", LIVE, "a_target_is_owed_until_it_is_filled", "rejected"),
        ("too old", LIVE, "a_target_is_owed_until_it_is_filled", "too-old"),
        ("for good", LIVE, "an_order_that_is_refused_for_good_is_an_event_and_not_sent_again",
         "no-funds"),
    ],
    "fee or dividend dated the day of the start; JSON of another shape or depth; 500 to every "
    "order; fills far from the market": [
        ("dated the day of the start or of a resume", ROUTER,
         "a_payment_dated_the_day_of_the_start_is_booked_once", "resume"),
        ("shape", ALPACA, "an_answer_of_another_shape_is_unreachable_and_no_traceback",
         "Unreachable"),
        ("500 to every order", LIVE,
         "orders_that_no_answer_comes_to_are_events_and_halt_after_three_bars",
         "orders-unanswered"),
        ("fills far", LIVE, "fills_far_from_the_market_are_events_and_halt_after_three",
         "fills-far"),
    ],
    "absence of 100 bars": [
        ("once", LIVE, "books_are_compared_once_after_an_absence", "100"),
        ("booked", LIVE, "what_filled_during_an_absence_is_booked", "fill"),
    ],
    "page down, slow client, half-sent headers, alert sink failing": [
        ("page hangs", SERVERS, "a_page_that_hangs_while_it_reads_does_not_hold_up_a_session",
         "BEGIN"),
        ("reads only", "watch/test_dashboard_server.py", "reading_changes_no_file", "before"),
        ("slow sink", "watch/test_sinks.py", "a_slow_sink_does_not_hold_up_the_caller", "slow"),
        ("failing sink", "watch/test_sinks.py",
         "a_service_that_stays_away_is_logged_and_stops_nothing", "caplog"),
    ],
}  # fmt: skip
CASES = [case for cases in ROWS.values() for case in cases]


def test_every_row_of_the_design_has_its_tests():
    if not TABLE.exists():
        pytest.skip(f"{TABLE} is not there")
    table = TABLE.read_text().partition("| fault | must hold |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")]
    assert rows == list(ROWS)
    assert all(ROWS.values())


@functools.cache
def nodes_of(file):
    """The text of each function, class and constant of a file, with its decorators."""
    text, nodes = (HERE / file).read_text().splitlines(), {}
    for node in parsed(HERE / file).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            nodes[node.name] = "\n".join(text[first - 1 : node.end_lineno])
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            nodes[node.targets[0].id] = ast.unparse(node)
    return nodes


def sources_of(file, name):
    """What a test is: its own text, its parameters', and those of what it names in its file."""
    nodes = nodes_of(file)
    assert name in nodes, f"{file} has no {name}"
    words = set(re.findall(r"\w+", nodes[name]))
    return nodes[name] + "".join(text for other, text in nodes.items() if other in words)


@pytest.mark.parametrize(("fault", "file", "name", "wanted"), CASES)
def test_the_test_of_a_fault_is_there_and_looks_for_its_code(fault, file, name, wanted):
    assert wanted in sources_of(file, f"test_{name}"), fault
