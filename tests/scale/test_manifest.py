"""Jobs for a slice: their form is checked by a schema, and the script of SLURM runs."""

import subprocess

import pytest
import yaml

from nca_trader.errors import ConfigError
from nca_trader.scale import manifest
from nca_trader.scale.chips import CHIPS, slice_of

# Words that a shell, YAML or Kubernetes would take for something else.
HOSTILE = ["/a b/$(reboot)", "`reboot`", "x; reboot", "'\"", "- a: b # c", "é😀", "*", "line\nnext"]
COMMAND = ["nca-trader", "train", "--env", "equity_daily", "--agent", "base", "--run", *HOSTILE]

# The fields of jobset.x-k8s.io/v1alpha2, batch/v1 and v1 that a job uses: a mapping has these keys
# and no others, a list holds what its item says, and a set are the values that are allowed.
POD = {
    "restartPolicy": {"Never"},
    "nodeSelector": {
        "cloud.google.com/gke-tpu-accelerator": set(manifest.ACCELERATORS.values()),
        "cloud.google.com/gke-tpu-topology": str,
    },
    "containers": [
        {
            "name": str,
            "image": str,
            "command": [str],
            "resources": {
                "requests": {"google.com/tpu": {"1", "4", "8"}},
                "limits": {"google.com/tpu": {"1", "4", "8"}},
            },
        }
    ],
}
CODES = {"operator": {"In", "NotIn"}, "values": [int]}
JOB = {
    "parallelism": int,
    "completions": int,
    "completionMode": {"Indexed"},
    "backoffLimit": int,
    "podFailurePolicy": {"rules": [{"action": {"FailJob"}, "onExitCodes": CODES}]},
    "template": {"spec": POD},
}
FAILURE = {"action": {"FailJobSet"}, "onJobFailureReasons": [{"PodFailurePolicy"}]}
SCHEMA = {
    "apiVersion": {"jobset.x-k8s.io/v1alpha2"},
    "kind": {"JobSet"},
    "metadata": {
        "name": str,
        "annotations": {"alpha.jobset.sigs.k8s.io/exclusive-topology": str},
    },
    "spec": {
        "failurePolicy": {"maxRestarts": int, "rules": [FAILURE]},
        "replicatedJobs": [{"name": str, "replicas": int, "template": {"spec": JOB}}],
    },
}
# Options of sbatch 24.05 that a script may have.
SBATCH = {"job-name", "nodes", "ntasks-per-node", "exclusive", "open-mode", "requeue"}


def faults(value, schema, at="job"):
    """Where a value differs from a schema."""
    if isinstance(schema, dict):
        if not isinstance(value, dict) or value.keys() != schema.keys():
            return [f"{at}: {value!r} has not the keys {sorted(schema)}"]
        return [x for key in schema for x in faults(value[key], schema[key], f"{at}.{key}")]
    if isinstance(schema, list):
        if not isinstance(value, list) or not value:
            return [f"{at}: {value!r} is no list"]
        return [x for i, each in enumerate(value) for x in faults(each, schema[0], f"{at}[{i}]")]
    good = value in schema if isinstance(schema, set) else type(value) is schema
    return [] if good else [f"{at}: {value!r}"]


@pytest.mark.parametrize(
    ("topology", "hosts", "chips", "shape"),
    [
        ("v5e:1x1", 1, 1, "1x1"),
        ("v5e:2x2", 1, 4, "2x2"),
        ("v5e-8", 1, 8, "2x4"),
        ("v5e-16", 4, 4, "4x4"),
        ("v6e-256", 64, 4, "16x16"),
        ("v5p-8", 1, 4, "2x2x1"),
        ("v5p-768", 96, 4, "4x8x12"),
        ("tpu7x", 1, 4, "2x2x1"),
    ],
)
def test_a_jobset_fits_the_schema_and_has_the_machines_of_the_slice(topology, hosts, chips, shape):
    text = manifest.manifest("jobset", slice_of(topology), COMMAND, "gs://x/runs/My Run", "a/b:1")
    job = yaml.safe_load(text)
    assert faults(job, SCHEMA) == []
    assert job["metadata"]["name"] == "train-my-run"
    spec = job["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (spec["parallelism"], spec["completions"]) == (hosts, hosts)
    pod = spec["template"]["spec"]
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == shape
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"google.com/tpu": str(chips)}
    assert hosts * chips == slice_of(topology).chips
    # Kubernetes makes "$(" of "$$(", and expands "$(NAME)".
    assert [word.replace("$$(", "$(") for word in container["command"]] == COMMAND
    assert "$(reboot)" not in "".join(container["command"]).replace("$$(", "")
    # What ends for good is not started again: the job fails, and then the set of jobs.
    assert spec["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [2, 3, 4]
    assert job["spec"]["failurePolicy"]["rules"] == [
        {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    ]


def test_every_generation_has_a_label_and_a_slice_without_machines_is_refused():
    assert manifest.ACCELERATORS.keys() == CHIPS.keys()
    for topology in ("v5e:1x2", "v5p:1x1x1", "v5e:3x3"):
        with pytest.raises(ConfigError, match="no machine has"):
            manifest.hosts_of(slice_of(topology))


@pytest.mark.parametrize(
    ("run", "name"),
    [
        ("runs/a", "train-a"),
        ("gs://b/My Run!/", "train-my-run"),
        ("/", "train"),
        ("é" * 99, "train"),
    ],
)
def test_a_name_is_one_that_kubernetes_and_slurm_take(run, name):
    assert manifest.name_of(run) == name
    assert len(manifest.name_of("x-" * 99)) < 64


def run_script(folder, code, restarts=0):
    """Run the script with an srun that ends with `code`; return its exit code and what was said."""
    script = folder / "train.sh"
    script.write_text(manifest.manifest("slurm", slice_of("v5e-16"), COMMAND, "runs/a"))
    tools = folder / "bin"
    tools.mkdir(exist_ok=True)
    for name, text in {
        "srun": f"shift; printf '%s\\0' \"$@\" > {folder}/words; exit {code}",
        "scontrol": f'echo "$@" >> {folder}/asked',
        "reboot": f"touch {folder}/rebooted",
    }.items():
        (tools / name).write_text(f"#!/bin/bash\n{text}\n")
        (tools / name).chmod(0o755)
    known = {"PATH": f"{tools}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    done = subprocess.run(
        ["bash", script], env=known | {"SLURM_RESTART_COUNT": str(restarts)}, cwd=folder
    )
    asked = folder / "asked"
    return done.returncode, asked.read_text() if asked.exists() else ""


def test_the_script_of_slurm_is_one_and_starts_the_words_as_they_are(tmp_path):
    text = manifest.manifest("slurm", slice_of("v5e-16"), COMMAND, "runs/a")
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    head, rest = text.partition("srun")[::2]
    options = [line.removeprefix("#SBATCH --") for line in head.splitlines() if "SBATCH" in line]
    assert {option.partition("=")[0] for option in options} == SBATCH and "#SBATCH" not in rest
    assert {"nodes=4", "ntasks-per-node=1", "job-name=train-a"} <= set(options)
    run_script(tmp_path, 0)
    assert (tmp_path / "words").read_text().split("\0")[:-1] == COMMAND
    assert not (tmp_path / "rebooted").exists()


@pytest.mark.parametrize(
    ("code", "restarts", "again"),
    [(0, 0, False), (1, 0, True), (2, 0, False), (3, 0, False), (4, 0, False), (130, 0, False),
     (137, 9, True), (137, 10, False)],
)  # fmt: skip
def test_slurm_starts_it_again_unless_it_is_over(tmp_path, code, restarts, again):
    ended, asked = run_script(tmp_path, code, restarts)
    assert asked == ("requeue 7\n" if again else "") and (again or ended == code)
