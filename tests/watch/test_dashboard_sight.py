"""What the page shows of an agent's features and cells is what the agent computed."""

import time

import jax
import numpy as np
import pytest

import nca_trader as nca
from nca_trader.data.features import feature_set
from nca_trader.runs.exported import Coding, Exported, compact, write_exported
from nca_trader.watch.dashboard.sources import Sources


def write(tiny, path, bits=8):
    run, env = tiny.run, tiny.env
    coded = compact(run, run.params(), Coding(bits=bits), env.features, env.bars.present)
    write_exported(path, run, coded)
    return path


@pytest.fixture(scope="module")
def traded(tiny, tmp_path_factory):
    """An exported file, and journals of two sessions that it drives: alone, and as a sleeve."""
    folder = tmp_path_factory.mktemp("root")
    agent, feed = write(tiny, folder / "agent.nca"), f"replay:{tiny.data}"
    nca.paper_trade(agent, feed, folder / "alone.db")
    rest = nca.Sleeve(name="rest", share=0.5, run=nca.rules.buy_and_hold())
    both = [nca.Sleeve(name="agent", share=0.5, run=agent), rest]
    nca.paper_trade(both, feed, folder / "both.db", costs=nca.Costs())
    return folder


def sight(sources, label, asset=""):
    """The heat maps of a journal, once they are computed."""
    source = next(each for each in sources.all() if each.label == label)
    until = time.monotonic() + 60
    while not (found := source._look(asset)["sight"])["maps"]:
        assert time.monotonic() < until, found["note"]
        if found["note"] != "Being computed from the bars.":
            return found
        time.sleep(0.02)
    return found


def rows_of(maps, key):
    (found,) = [each for each in maps if each["key"] == key]
    return found


def test_a_session_of_an_exported_file_has_its_heat_maps(tiny, traded):
    sources = Sources(root=str(traded))
    found = sight(sources, "alone.db", tiny.bars.symbols[1])
    # Another derivation: the features of all bars at once, and the policy over a window of them.
    run = Exported(traded / "agent.nca")
    features = np.asarray(feature_set(run.env_config.features).batch(tiny.bars))
    shown = rows_of(found["maps"], "features")
    assert shown["rows"] == list(run.spec.features) and len(shown["columns"]) == 96
    np.testing.assert_allclose(shown["values"], features[-96:, 1].T, atol=1e-3)
    policy, params = run.policy, run.params()
    last = slice(-policy.receptive_field, None)
    window = features[None, last], tiny.bars.present[None, last]
    encoded = np.asarray(jax.jit(policy.encode)(params, *window))
    cells = np.array(rows_of(found["maps"], "cells")["values"])
    np.testing.assert_allclose(cells[:, -1], encoded[0, -1, 1], atol=1e-3)
    assert np.ptp(cells) > 0.1
    assert "are the journal's, bit for bit" in found["note"]
    # As a sleeve, with the sleeve's name; a rule has none.
    two = sight(sources, "both.db", tiny.bars.symbols[1])
    assert [each["key"] for each in two["maps"]] == ["features-agent", "cells-agent"]
    assert (
        rows_of(two["maps"], "cells-agent")["values"] == rows_of(found["maps"], "cells")["values"]
    )
    sources.close()


def test_the_file_can_be_named_and_another_agent_is_refused_in_one_line(tiny, traded, tmp_path):
    journal = str(traded / "alone.db")
    named = Sources(runs=[str(traded / "agent.nca")], journals=[journal])
    assert sight(named, "alone.db")["maps"]
    named.close()
    other = write(tiny, tmp_path / "other.nca", bits=4)
    for path in (tiny.path, other):  # its weights of float32, or of fewer bits
        sources = Sources(runs=[str(path)], journals=[journal])
        found = sight(sources, "alone.db")
        assert found["maps"] == [] and "give the run or the exported file" in found["note"]
        sources.close()
