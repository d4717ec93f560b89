"""Every row of the design's fault table has its tests: a row without one, or a test that is gone,
fails here."""

import functools
import pathlib

import pytest
from sources import parsed

HERE = pathlib.Path(__file__).parents[1]
TABLE = HERE.parents[1] / "shared" / "PAPER.md"

# Of each row: the tests that prove it, below the name of their file.
ROWS = {
    "SIGKILL at each fail point (about 12) and 200 random kills": """
        paper/session/test_faults.py a_kill_at_each_kind_of_event_is_survived
        every_kind_of_event_has_a_fail_point twenty_kills_at_any_call_are_survived
        a_loss_that_halts_is_a_halt_also_if_the_process_dies_on_the_way
    """,
    "SIGTERM, Ctrl-C": """
        paper/session/test_faults.py a_signal_ends_the_session_with_130_and_a_later_one_goes_on
        cli/test_interrupt.py the_first_signal_asks_and_the_second_insists
    """,
    "disk full; db page flipped; WAL cut; head file ahead": """
        paper/session/test_session.py
        a_full_disk_stops_before_the_order_and_goes_on_when_there_is_space
        paper/session/test_faults.py
        a_journal_damaged_between_two_sessions_is_refused_and_nothing_is_sent
        paper/journal/test_journal.py a_file_that_is_lost_during_a_session_stops_it
    """,
    "clock +-1 h, DST 2024-03-10 and 11-03, TZ changed": """
        paper/session/test_live.py clocks_that_differ_halt paper/session/test_live_faults.py
        a_change_of_the_clock_is_crossed_on_time paper/session/test_faults.py
        the_same_decisions_under_any_time_zone paper/test_sources.py no_clock_and_no_chance
    """,
    "bar duplicated (same, other values), out of order, missing, unfinished, in the future": """
        paper/session/test_gate.py the_same_bar_again_is_dropped_and_another_of_its_time_is_refused
        a_bar_that_is_not_closed_is_not_used paper/session/test_live_faults.py
        a_missing_bar_is_traded_through_as_in_training
        a_position_without_bars_for_as_long_as_training_knows_halts
        the_simulated_exchange_pays_such_a_position_out_as_training_does
        paper/feeds/test_venue_feed.py
        a_missing_bar_of_all_is_a_gap paper/session/test_live.py a_feed_from_the_future_is_refused
    """,
    "NaN, inf, 0, negative price, high < low, negative volume; 100x spike": """
        paper/session/test_gate.py the_gate_names_what_is_wrong
        a_jump_that_the_next_bar_confirms_is_released_as_it_came paper/session/test_live.py
        a_feed_from_the_future_is_refused a_price_a_hundred_times_the_last_is_not_traded_on
    """,
    "broker 4xx, 429, 5xx, timeout before and after accept, reset, HTML, slow drip": """
        paper/session/test_live_faults.py
        a_live_session_at_alpaca_meets_every_answer_and_orders_once
        paper/session/test_router.py every_class_of_answer_makes_one_order_or_none
        a_duplicate_id_is_success_by_look_up look_ups_that_fail_hold_the_symbol_and_no_other
        busy_waits_as_long_as_the_venue_says_and_ends_with_the_decision paper/session/test_faults.py
        an_exchange_that_dies_halts_the_session_and_nothing_more_is_sent
        an_exchange_that_accepts_and_never_answers paper/venues/test_alpaca.py
        alpaca_py_without_the_guard_makes_two_orders_of_one
    """,
    "fills duplicated, late, out of order, partial then cancelled, too many, before the ack": """
        paper/session/test_router.py fills_in_parts_out_of_order_and_twice_count_once
        a_fill_that_is_listed_late_is_waited_for more_fills_than_ordered_halt
        an_execution_that_changes_halts a_fill_before_the_answer_is_the_answer
        a_fill_of_somebody_else_in_our_symbol_halts_and_in_another_does_not
        paper/venues/test_alpaca.py
        partial_then_cancelled
    """,
    "stream drops, mute but open, reconnect storm": """
        paper/feeds/test_venue_bars.py
        the_stream_posts_bars_and_corrections_and_comes_back_after_a_drop
        a_mute_stream_is_opened_again waits_between_connections_grow_to_half_a_minute
        paper/feeds/test_venue_feed.py
        an_outage_makes_the_feed_stale_and_every_bar_comes_after_it_in_order
        paper/session/test_live.py
        a_bar_that_comes_too_late_is_not_traded_on bars_missed_while_away_teach_but_do_not_trade
    """,
    "venue position differs; order cancelled by hand": """
        paper/session/test_faults.py a_position_that_moved_by_hand_halts_also_if_the_halt_is_killed
        paper/session/test_router.py cash_that_nothing_explains_halts_and_a_payment_explains_it
        paper/session/test_live.py
        a_rejected_order_is_decided_again_and_one_cancelled_by_hand_is_not
    """,
    "reconciliation: a working order without fills while fills do not explain the venue's "
    "position (NautilusTrader #5000); run twice in a row (#3878); position older than the "
    "look-back of fills": """
        paper/session/test_router.py a_working_order_is_kept_while_fills_do_not_explain_the_position
        reconciling_twice_changes_nothing
        positions_older_than_the_fills_are_adopted_at_the_first_start_and_halt_later
        an_acknowledged_order_that_the_venue_denies_halts
    """,
    "policy NaN, out of range, exception; checkpoint truncated, flipped, pickle inside": """
        paper/session/test_session.py three_failures_of_the_policy_in_a_row_halt
        a_logit_of_the_wrong_shape_is_not_acted_upon paper/session/test_strategies.py
        infinite_targets_are_not_traded_and_halt paper/session/test_risk_limits.py
        backtest_ledger_and_paper_agree_under_limits paper/session/test_live_faults.py
        an_agent_that_raises_halts_and_goes_on_after_it_is_corrected
        a_pickle_in_place_of_an_agent_is_refused_and_not_run runs/test_tensors.py
        a_file_that_was_cut_is_refused a_single_flipped_bit_is_refused_wherever_it_is
        runs/test_checkpoint.py each_of_two_hundred_flipped_bytes_and_cut_files_is_found
    """,
    "config: unknown key, wrong type, NaN limit": """
        config/test_presets.py an_unknown_key_names_file_table_and_the_nearest_key
        a_value_of_another_type_is_refused_and_not_converted
        all_that_is_wrong_is_said_at_once_and_each_once paper/session/test_kill_switch.py
        limits_are_options_of_both_commands
    """,
    "any wait: Retry-After of hours, nan or inf; a cancel that stays pending, fifty symbols": """
        paper/test_waits.py no_call_of_a_venue_keeps_a_halt_or_a_stop_from_being_heard
        no_wait_keeps_a_halt_or_a_stop_from_being_heard no_wait_outlasts_the_order_that_it_is_for
        fifty_orders_are_cancelled_at_once_and_waited_for_once
        the_end_awaits_the_request_under_way_but_not_for_ever
        an_answer_that_drips_holds_up_the_end_of_a_session_once
    """,
    "a day's bar that settles late (60 s and more); bars below a minute": """
        paper/session/test_days.py the_newest_bar_is_traded_on_and_no_older_one
    """,
    "the last N bars sent again after a reconnection; a bar revised several times": """
        paper/session/test_live.py bars_that_come_again_after_a_reconnection_are_dropped
        a_bar_that_is_corrected_several_times_is_an_event_each_time_and_no_bad_bar
        bars_that_a_feed_leaves_out_are_an_event
    """,
    "the first three orders rejected or too old, of a rule that orders once": """
        paper/session/test_live.py a_target_is_owed_until_it_is_filled
        an_order_that_is_refused_for_good_is_an_event_and_not_sent_again
    """,
    "fee or dividend dated the day of the start; JSON of another shape or depth; 500 to every "
    "order; fills far from the market": """
        paper/session/test_router.py a_payment_dated_the_day_of_the_start_is_booked_once
        paper/venues/test_mutated_answers.py
        no_answer_of_alpaca_leaves_a_session_without_a_way_on
        paper/session/test_live.py
        orders_that_no_answer_comes_to_are_events_and_halt_after_three_bars
        fills_far_from_the_market_are_events_and_halt_after_three
    """,
    "absence of 100 bars": """
        paper/session/test_live.py books_are_compared_once_after_an_absence
        what_filled_during_an_absence_is_booked
    """,
    "a payment or fill comes again under its id with another amount; a price of 1e308": """
        paper/venues/test_mutated_answers.py
        what_a_venue_booked_and_changes_halts_and_resume_passes_over_it
        no_answer_of_a_venue_leaves_a_session_without_a_way_on
        no_answer_of_alpaca_leaves_a_session_without_a_way_on
    """,
    "bar after bar every order ends refused or too old (429 without end, 401, read-only, no "
    "funds)": """
        paper/session/test_live.py orders_that_all_fail_are_events_and_halt_after_three_bars
        an_order_that_fails_next_to_one_that_fills_halts_nobody
        orders_that_no_answer_comes_to_are_events_and_halt_after_three_bars
    """,
    "page down, slow client, half-sent headers, alert sink failing": """
        paper/session/test_live_faults.py
        a_page_that_hangs_while_it_reads_does_not_hold_up_a_session
        watch/test_dashboard_server.py reading_changes_no_file
        half_sent_headers_block_nothing_and_end watch/test_sinks.py
        a_slow_sink_does_not_hold_up_the_caller
        a_service_that_stays_away_is_logged_and_stops_nothing
    """,
}
# Rows in which the design is ahead of the code.
DUE = {
    "a stop, target or trailing stop: killed between fill and withdrawal, partly filled, cancelled "
    "by hand, gap through it",
}


def cases():
    for word in "".join(ROWS.values()).split():
        if word.endswith(".py"):
            file = word
        else:
            yield file, word


def test_every_row_of_the_design_has_its_tests():
    if not TABLE.exists():
        pytest.skip(f"{TABLE} is not there")
    table = TABLE.read_text().partition("| fault | must hold |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")]
    assert [row for row in rows if row not in DUE] == list(ROWS)
    assert all(ROWS.values()) and not DUE & ROWS.keys()


@functools.cache
def names_of(file):
    return {getattr(node, "name", None) for node in parsed(HERE / file).body}


@pytest.mark.parametrize(("file", "name"), list(cases()))
def test_the_test_of_a_fault_is_there(file, name):
    assert f"test_{name}" in names_of(file)
