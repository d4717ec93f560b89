"""The job that starts a planned run on its slice: a JobSet for GKE, or a script for SLURM.

Both start one process per host, which find each other by `train --distributed`, and start them
again from the newest checkpoint, but not after an exit code that would only come back.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from nca_trader.errors import ConfigError, argument
from nca_trader.scale.chips import Slice

SUFFIXES = {"jobset": ".yaml", "slurm": ".sh"}
RESTARTS = 10
# Wrong input, a halt, damaged state: a restart ends the same way.
FINAL = (2, 3, 4)
SAVED = 130  # interrupted, with all saved; SLURM has it for a job that is cancelled
# Labels of the nodes of GKE, see cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus.
ACCELERATORS = {
    "v5e": "tpu-v5-lite-podslice", "v5p": "tpu-v5p-slice", "v6e": "tpu-v6e-slice",
    "tpu7x": "tpu7x",
}  # fmt: skip
OF_SEVERAL = 4  # chips of each machine of a slice that has several


def hosts_of(there: Slice) -> tuple[int, int]:
    """Return the number of machines of a slice and of chips in each.

    Raises:
      ConfigError: no machines make up such a slice.

    Example:
      >>> from nca_trader.scale.chips import slice_of
      >>> hosts_of(slice_of("v5e-8")), hosts_of(slice_of("v5e-256"))
      ((1, 8), (64, 4))
    """
    inside = all(n <= most for n, most in zip(there.shape, there.of.host, strict=True))
    # Machines of one, four and eight chips are on offer; in three dimensions of four alone.
    if inside and there.chips in ((1, 4, 8) if len(there.shape) == 2 else (4,)):
        return 1, there.chips
    if inside or there.chips % OF_SEVERAL:
        raise ConfigError(
            f"{argument('topology', there.name)}: no machine has {there.chips} chips, so no job "
            "can be written; plan a slice that is on offer, e.g. v5e-8."
        )
    return there.chips // OF_SEVERAL, OF_SEVERAL


def name_of(run: str) -> str:
    """Return the name of a job that trains a run: letters, digits and dashes, at most 40."""
    name = re.sub(r"[^a-z0-9]+", "-", PurePosixPath(run).name.lower())[:40].strip("-")
    return f"train-{name}".rstrip("-")


def manifest(kind: str, there: Slice, command: Sequence[str], run: str, image: str = "") -> str:
    """Return the job as text.

    Args:
      kind: "jobset" or "slurm".
      there: the slice.
      command: words of the command, which every host starts.
      run: folder of the run, for the job's name.
      image: of the container, for a JobSet.

    Raises:
      ConfigError: no machines make up such a slice.

    Example:
      >>> from nca_trader.scale.chips import slice_of
      >>> script = manifest("slurm", slice_of("v5e-16"), ["nca-trader", "train"], "runs/a")
      >>> script.splitlines()[1]
      '# v5e:4x4: 4 hosts of 4 chips'
    """
    if kind == "slurm":
        return slurm(there, command, name_of(run))
    # JSON, which is YAML.
    job = jobset(there, command, name_of(run), image)
    return json.dumps(job, indent=2, ensure_ascii=False) + "\n"


def jobset(there: Slice, command: Sequence[str], name: str, image: str) -> dict[str, Any]:
    """Return the JobSet: one pod per host, all created again when one ends, unless for good."""
    hosts, chips = hosts_of(there)
    tpus = {"google.com/tpu": str(chips)}  # a quantity
    container = {
        "name": "train",
        "image": image,
        # Words and no shell; but Kubernetes itself expands "$(NAME)".
        "command": [word.replace("$(", "$$(") for word in command],
        "resources": {"requests": tpus, "limits": tpus},
    }
    pod = {
        "restartPolicy": "Never",
        "nodeSelector": {
            "cloud.google.com/gke-tpu-accelerator": ACCELERATORS[there.chip],
            "cloud.google.com/gke-tpu-topology": "x".join(map(str, there.shape)),
        },
        "containers": [container],
    }
    codes = {"operator": "In", "values": list(FINAL)}
    job = {
        "parallelism": hosts,
        "completions": hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": codes}]},
        "template": {"spec": pod},
    }
    # Without the rule a JobSet also starts again what `podFailurePolicy` ended.
    ended = {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    nodes = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name, "annotations": nodes},
        "spec": {
            "failurePolicy": {"maxRestarts": RESTARTS, "rules": [ended]},
            "replicatedJobs": [{"name": "train", "replicas": 1, "template": {"spec": job}}],
        },
    }


def slurm(there: Slice, command: Sequence[str], name: str) -> str:
    """Return the batch script: one task per host, put into the queue again unless it is over."""
    hosts, chips = hosts_of(there)
    over = "|".join(map(str, sorted({0, *FINAL, SAVED})))
    return f"""#!/bin/bash
# {there.name}: {hosts} host{"s" * (hosts > 1)} of {chips} chip{"s" * (chips > 1)}
#SBATCH --job-name={name}
#SBATCH --nodes={hosts}
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --open-mode=append
#SBATCH --requeue
srun --kill-on-bad-exit=1 {shlex.join(command)}
code=$?
if [ "${{SLURM_RESTART_COUNT:-0}}" -ge {RESTARTS} ]; then exit $code; fi
case $code in {over}) exit $code ;; *) scontrol requeue "$SLURM_JOB_ID" ;; esac
"""
