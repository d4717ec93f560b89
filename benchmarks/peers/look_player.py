"""Plays the saved agents of a run one after the other, for the judge of `benchmarks.board`.

`nca-trader prove --agent benchmarks/peers/look_player.py:act` plays a function. This one has the
next agent of the folder LOOKS whenever an episode begins.
"""

import json
import os

from nca_trader.optimum.outside.player import LOADERS

ENTRY = json.loads(os.environ["LOOKS"])  # of the loader, with the files of each agent
WAITING = [LOADERS[ENTRY["kind"]](ENTRY | {"files": files})[0] for files in ENTRY["each"]]
PLAYED = []


def act(observations, memory):
    """Actions of the agent whose turn it is."""
    if memory is None:
        PLAYED.append(WAITING[len(PLAYED)])
        memory = (None,)
    actions, inner = PLAYED[-1](observations, memory[0])
    return actions, (inner,)
