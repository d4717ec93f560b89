"""Rules fire once and are resolved once, at the time that a hand ledger says."""

import math

import pytest

from nca_trader.errors import ConfigError
from nca_trader.watch.alerts import Alerts, Rule, read_rules

KL = Rule(name="kl", metric="approx_kl", comparison=">", threshold=0.05, for_seconds=10.0)


def told(rule, course):
    """(time, status) of every notice, looking at (time, value) of the course."""
    alerts, found = Alerts([rule], "runs/x"), []
    for now, value in course:
        samples = {} if value is None else {rule.metric: value}
        found += [(notice.at, notice.status) for notice in alerts.update(samples, now)]
    return found


AT_ONCE = Rule(name="x", metric="x", comparison=">=", threshold=1.0)
COURSES = {
    "fires after its time and is resolved once": (
        KL, [(0, .01), (1, .1), (6, .1), (10, .1), (11, .1), (20, .1), (21, .01), (22, .01)],
        [(11, "firing"), (21, "resolved")],
    ),
    "ends before its time, and nothing is notified": (
        KL, [(0, .1), (9, .1), (9.5, 0), (10, .1), (19, .1), (19.9, 0)], [],
    ),
    "comes back and waits its time again": (
        KL, [(0, .1), (10, .1), (11, 0), (12, .1), (21, .1), (22, .1)],
        [(10, "firing"), (11, "resolved"), (22, "firing")],
    ),
    "without a time it fires at once": (
        AT_ONCE, [(0, .5), (1, 1), (2, 1), (3, 0)], [(1, "firing"), (3, "resolved")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COURSES)
def test_a_rule_is_notified_as_the_ledger_says(name):
    rule, course, expected = COURSES[name]
    assert told(rule, course) == expected


def test_a_metric_that_is_missing_meets_absent_alone():
    absent = Rule(name="x", metric="x", comparison="absent", for_seconds=5.0)
    course = [(0, 1.0), (1, None), (6, math.nan), (7, 2.0)]
    assert told(absent, course) == [(6, "firing"), (7, "resolved")]
    for comparison in (">", "<", "!=", "=="):
        rule = Rule(name="x", metric="x", comparison=comparison, threshold=0.0)
        assert not rule.holds({}) and not rule.holds({"x": math.nan})


def test_a_rule_without_a_label_is_about_each_metric_of_its_name():
    rule = Rule(name="halt", metric="paper_halted", comparison="==", threshold=1.0)
    one, two = 'paper_halted{seed="a"}', 'paper_halted{seed="b"}'
    alerts = Alerts([rule], "j.db")
    course = [
        {one: 0.0, two: 0.0},
        {one: 1.0, two: 0.0},
        {one: 1.0, two: 1.0},  # the second is said while the first still fires
        {one: 0.0, two: 1.0, "paper_halted": 1.0},
        {"paper_halted": 1.0},  # another journal, without them
    ]
    found = [
        sorted((n.name, n.status) for n in alerts.update(samples, now, {one: "max-drawdown"}))
        for now, samples in enumerate(course)
    ]
    assert found == [
        [],
        [("halt, seed a", "firing")],
        [("halt, seed b", "firing")],
        [("halt", "firing"), ("halt, seed a", "resolved")],
        [("halt, seed b", "resolved")],
    ]
    exact = Rule(name="x", metric=two, comparison="==", threshold=1.0)
    assert exact.holds({two: 1.0}) and not exact.holds({one: 1.0})


@pytest.mark.parametrize(
    ("comparison", "expected"),
    [
        (">", [0, 0, 1]),
        (">=", [0, 1, 1]),
        ("<", [1, 0, 0]),
        ("<=", [1, 1, 0]),
        ("==", [0, 1, 0]),
        ("!=", [1, 0, 1]),
    ],
)
def test_every_comparison_is_of_the_metric_with_the_threshold(comparison, expected):
    rule = Rule(name="x", metric="x", comparison=comparison, threshold=2.0)
    assert [rule.holds({"x": value}) for value in (1.0, 2.0, 3.0)] == [bool(e) for e in expected]


def test_states_are_told_and_rules_do_not_mix():
    other = Rule(name="other", metric="loss", comparison="<", threshold=0.0)
    alerts = Alerts([KL, other], "runs/x")
    assert [alerts.state(rule) for rule in (KL, other)] == ["inactive", "inactive"]
    alerts.update({"approx_kl": 1.0, "loss": -1.0}, 0.0)
    assert [alerts.state(rule) for rule in (KL, other)] == ["pending", "firing"]
    (notice,) = alerts.update({"approx_kl": 1.0, "loss": 1.0}, 10.5)[1:]
    assert (notice.rule, notice.status) == (other, "resolved")
    assert alerts.state(KL) == "firing"


def test_a_notice_says_all_that_a_reader_needs():
    (notice,) = Alerts([KL], "runs/x").update({"approx_kl": 1.0}, 0.0) or [None]
    assert notice is None
    alerts = Alerts([KL], "runs/x")
    alerts.update({"approx_kl": 1.0}, 86400.0)
    (notice,) = alerts.update({"approx_kl": 0.5}, 86410.0)
    assert notice.as_json() == {
        "status": "firing", "rule": "kl", "metric": "approx_kl", "comparison": ">",
        "threshold": 0.05, "for_seconds": 10.0, "value": 0.5,
        "since": "1970-01-02T00:00:00+00:00", "at": "1970-01-02T00:00:10+00:00",
        "source": "runs/x", "labels": {}, "why": "",
    }  # fmt: skip
    assert str(notice) == "runs/x: kl firing: approx_kl > 0.05 for 10 s; now 0.5"


GOOD = """
[[rule]]
name = "kl"
metric = "approx_kl"
comparison = ">"
threshold = 0.05
for = "5m"
sinks = ["log", "apprise:jsons://example.org/x", "call:mine.alerts:tell"]

[[rule]]
name = "stalled"
metric = "row_age_seconds"
comparison = ">"
threshold = 600

[[rule]]
name = "gone"
metric = "reward"
comparison = "absent"
for = 90
"""


def write(tmp_path, text):
    path = tmp_path / "rules.toml"
    path.write_text(text)
    return path


def test_rules_are_read_as_they_are_written(tmp_path):
    kl, stalled, gone = read_rules(write(tmp_path, GOOD))
    sinks = ("log", "apprise:jsons://example.org/x", "call:mine.alerts:tell")
    assert kl == Rule(
        name="kl", metric="approx_kl", comparison=">", threshold=0.05, for_seconds=300.0,
        sinks=sinks,
    )  # fmt: skip
    assert (stalled.threshold, stalled.for_seconds, stalled.sinks) == (600.0, 0.0, ("log",))
    assert (gone.threshold, gone.for_seconds) == (None, 90.0)


ROW = '[[rule]]\nname = "a"\nmetric = "b"\n'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = ", "not valid TOML"),
        ("", "holds no rule; write rows of [[rule]]"),
        ("[rule]\nname = 'a'", "holds no rule"),
        ("rules = 1\n" + ROW, "'rules' is not a known key"),
        (ROW + 'comparison = "=>"\nthreshold = 1', "rule 1 (a): comparison='=>' is not known"),
        (ROW + 'comparison = ">"', "rule 1 (a): threshold is missing; give a number"),
        (ROW + 'comparison = ">"\nthreshold = nan', "threshold=nan is outside its range"),
        (ROW + 'comparison = ">"\nthreshold = true', "threshold = true where a number"),
        (ROW + 'comparison = "absent"\nthreshold = 1', "leave it out"),
        (ROW + 'comparison = ">"\nthreshold = 1\nfor = "5 fortnights"', "where a length of time"),
        (
            ROW + 'comparison = ">"\nthreshold = 1\nfor = -1',
            "for = -1 where a length of time",
        ),
        (ROW + 'comparison = ">"\nthreshold = 1\ntreshold = 1', "did you mean 'threshold'?"),
        (ROW + 'comparison = ">"\nthreshold = 1\nsinks = []', "sinks is empty"),
        (ROW + 'comparison = ">"\nthreshold = 1\nsinks = ["mail:me"]', "sink 'mail' is not known"),
        (
            ROW + 'comparison = ">"\nthreshold = 1\nsinks = ["webhook:http://x"]',
            "'webhook' is not known",
        ),
        (ROW + 'comparison = ">"\nthreshold = 1\nsinks = "log"', "where a list is expected"),
        ('[[rule]]\nname = "a"\ncomparison = ">"\nthreshold = 1', "metric is missing; give a text"),
        ((ROW + 'comparison = ">"\nthreshold = 1\n') * 2, "rule 2 (a): the name is another"),
    ],
)
def test_a_faulty_row_is_one_line_with_its_number_and_the_remedy(tmp_path, text, says):
    with pytest.raises(ConfigError) as error:
        read_rules(write(tmp_path, text))
    assert says in str(error.value) and str(error.value).startswith(str(tmp_path))
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("sinks", ['"apprise:json://secret"', '["apprise:json://secret", 3]'])
def test_an_address_is_not_repeated(tmp_path, sinks):
    with pytest.raises(ConfigError, match=r"sinks(\[1\])? = \.\.\. where a ") as error:
        read_rules(write(tmp_path, ROW + f'comparison = ">"\nthreshold = 1\nsinks = {sinks}'))
    assert "secret" not in str(error.value)


def test_all_faults_are_told_at_once(tmp_path):
    with pytest.raises(ConfigError) as error:
        read_rules(write(tmp_path, '[[rule]]\nname = "a"\n\n[[rule]]\nname = "b"\n'))
    assert len(str(error.value).splitlines()) == 6  # metric, comparison, threshold, of both


def test_a_rules_file_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_rules(tmp_path / "none.toml")
