"""Alone, a process agrees with itself at once; several are tested in scale/test_distributed.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from nca_trader.errors import BarError, NcaTraderError, RunError, StateError, StoreError
from nca_trader.learner.train import agreed
from nca_trader.parallel import hosts
from nca_trader.parallel.mesh import make_mesh
from nca_trader.runs.folder import check_shared


def test_one_process_is_the_first_and_hears_itself():
    assert hosts.count() == 1 and hosts.own() == 0 and hosts.first()
    assert hosts.all_gather([1, 2]).tolist() == [[1, 2]]
    first, second = hosts.broadcast((np.float32(0.5), np.arange(3)))
    assert first == 0.5 and second.tolist() == [0, 1, 2]
    hosts.barrier()


def test_what_the_first_does_is_done_or_its_own_mistake_is_raised():
    assert hosts.on_first(lambda: 7) == 7

    def mistaken():
        raise StateError("mine")

    with pytest.raises(StateError, match="mine"):
        hosts.on_first(mistaken)


@pytest.mark.parametrize(
    "mistake",
    [RunError("no"), BarError("no"), StateError("no"), StoreError("later"), KeyError("a fault")],
)
def test_another_process_ends_as_the_first_that_gave_up(mistake, monkeypatch):
    """With its exit code, so that on every host a supervisor starts again, or none does."""
    told = []

    def fails():
        raise mistake

    with monkeypatch.context() as patch:
        patch.setattr(hosts, "broadcast", lambda code: told.append(code) or code)
        with pytest.raises(type(mistake)):
            hosts.on_first(fails)
    monkeypatch.setattr(hosts, "first", lambda: False)
    monkeypatch.setattr(hosts, "broadcast", lambda code: told[0])
    with pytest.raises(NcaTraderError, match="process 0 failed") as error:
        hosts.on_first(lambda: pytest.fail("not mine to do"))
    assert error.value.exit_code == getattr(mistake, "exit_code", 1)


def test_a_copy_is_whole_and_no_view_of_the_device():
    split = jax.device_put(jnp.arange(8.0), NamedSharding(make_mesh(8), P("data")))
    copy = hosts.copy_to_host(split)
    copy[0] = 5.0
    assert copy.tolist()[1:] == list(range(1, 8)) and split[0] == 0.0


def test_all_processes_stop_as_one_must_and_save_by_the_clock_of_the_first(monkeypatch):
    for others, said in (((True, False), (True, False)), ((False, True), (False, False))):
        every = lambda own, others=others: np.stack([own, others])  # noqa: E731
        monkeypatch.setattr(hosts, "all_gather", every)
        assert agreed(False, False) == said


def test_a_folder_that_one_process_does_not_see_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(hosts, "all_gather", lambda own: np.array([own, False]))
    monkeypatch.setattr(hosts, "count", lambda: 2)
    with pytest.raises(RunError, match=r"process 1 of 2 does not see .*; give a folder on storage"):
        check_shared(tmp_path)
    assert not list(tmp_path.iterdir())
