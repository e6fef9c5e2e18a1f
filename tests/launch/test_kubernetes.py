"""The Kubernetes files match the schemas of their kinds, and their commands run as local processes."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from torch.distributed.run import config_from_args, get_args_parser

from tests.support.harness import held_ports
from tests.support.paths import ROOT

LAUNCH, SCHEMAS = ROOT / "launch", Path(__file__).parent / "schemas/kubernetes.json"
PODS_S = 120.0
JOB = """
import sys, torch, ddp_loop as dl
with dl.join_world(device="cpu") as world:
    total = world.sum(torch.tensor(world.rank + 1.0)).item()
    open(f"{sys.argv[1]}/{world.rank}", "w").write(f"{total} {world.size}")
"""


def objects(name: str) -> list[dict[str, Any]]:
    """The objects of a file in `launch/`."""
    return list(yaml.safe_load_all((LAUNCH / name).read_text()))


def one_of(name: str, kind: str) -> dict[str, Any]:
    return next(one for one in objects(name) if one["kind"] == kind)


def problems(one: dict[str, Any]) -> list[str]:
    """The errors of its kind's schema."""
    schemas = json.loads(SCHEMAS.read_text())
    schema = {"$defs": schemas["$defs"], "$ref": schemas["kinds"][one["kind"]]}
    return [f"{error.json_path}: {error.message}" for error in Draft202012Validator(schema).iter_errors(one)]


@pytest.mark.parametrize(("name", "kinds"), [("kubernetes.yaml", "Service Job"), ("pytorchjob.yaml", "PyTorchJob")])
def test_the_files_fit_the_schemas(name: str, kinds: str) -> None:
    assert [one["kind"] for one in objects(name)] == kinds.split()
    assert [problems(one) for one in objects(name)] == [[] for _ in objects(name)]


def spoiled(one: dict[str, Any], path: list[str], value: object) -> dict[str, Any]:
    """A copy with another value at a path."""
    one = copy.deepcopy(one)
    at = one
    for name in path[:-1]:
        at = at[name]
    at[path[-1]] = value
    return one


@pytest.mark.parametrize(
    ("name", "kind", "path", "value"),
    [
        ("kubernetes.yaml", "Job", "spec.completion", 2),
        ("kubernetes.yaml", "Job", "spec.parallelism", "two"),
        ("kubernetes.yaml", "Job", "spec.template.spec.containers", [{}]),
        ("kubernetes.yaml", "Job", "spec.template.spec.volume", []),
        ("pytorchjob.yaml", "PyTorchJob", "spec.elasticPolicy.nprocs", 4),
        ("pytorchjob.yaml", "PyTorchJob", "spec.pytorchReplicaSpecs.Worker.template.spec.image", "x"),
    ],
)
def test_the_schemas_refuse_what_is_wrong(name: str, kind: str, path: str, value: object) -> None:
    assert len(problems(spoiled(one_of(name, kind), path.split("."), value))) == 1


def pod(folder: Path, index: int, **variables: str) -> tuple[list[str], dict[str, str]]:
    """The command and the environment of a pod of the Job, whose torchrun is that of this environment."""
    spec = one_of("kubernetes.yaml", "Job")["spec"]
    [container] = spec["template"]["spec"]["containers"]
    own = {one["name"]: one["value"] for one in container["env"]}
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, **own, "JOB_COMPLETION_INDEX": str(index), "PATH": path, **variables}
    return [*container["command"], *container["args"]], environment


@pytest.mark.covers("C4", "J16")
def test_a_pods_command_is_one_that_torchrun_understands(tmp_path: Path) -> None:
    spec = one_of("kubernetes.yaml", "Job")["spec"]
    (printer := tmp_path / "torchrun").write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\n")
    printer.chmod(0o755)
    for index in range(spec["completions"]):
        command, environment = pod(tmp_path, index)
        said = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.split("\0")
        arguments = get_args_parser().parse_args(said[:-1])
        config, _, script = config_from_args(arguments)
        assert (config.min_nodes, config.max_nodes) == (spec["completions"],) * 2 == (spec["parallelism"],) * 2
        assert config.rdzv_endpoint == "ddp-loop-0.ddp-loop:29400"
        assert config.rdzv_configs["is_host"] == str(int(index == 0))
        assert script[-3:] == ["train.py", "--run-dir", "/runs/train"]
    [container] = spec["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == config.nproc_per_node
    service, template = one_of("kubernetes.yaml", "Service"), spec["template"]["spec"]
    assert service["metadata"]["name"] == template["subdomain"] == "ddp-loop"
    assert service["spec"]["ports"][0]["port"] == int(config.rdzv_endpoint.rpartition(":")[2])


@pytest.mark.slow
@pytest.mark.covers("C4", "J16")
def test_two_pods_are_one_world(tmp_path: Path) -> None:
    (script := tmp_path / "job.py").write_text(JOB)
    (results := tmp_path / "results").mkdir()
    running = []
    with held_ports(1) as [port]:
        try:
            for index in reversed(range(2)):  # the first one may come last
                command, environment = pod(tmp_path, index, RANKS="1", FIRST=f"127.0.0.1:{port}", PYTHONPATH=str(ROOT))
                command = [*command[: command.index("train.py")], str(script), str(results)]
                running.append(subprocess.Popen(command, env=environment))
            assert [one.wait(PODS_S) for one in running] == [0, 0]
        finally:
            for one in running:
                one.kill()
    assert [(results / str(rank)).read_text() for rank in range(2)] == ["3.0 2", "3.0 2"]


@pytest.mark.covers("C4", "J16")
def test_torchrun_takes_the_operators_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables are those that version 1.9 of the operator sets for an elastic policy."""
    spec = one_of("pytorchjob.yaml", "PyTorchJob")["spec"]
    policy, worker = spec["elasticPolicy"], spec["pytorchReplicaSpecs"]["Worker"]
    [container] = worker["template"]["spec"]["containers"]
    port = container["ports"][0]["containerPort"]
    variables = {
        "RDZV_ENDPOINT": f"ddp-loop-worker-0:{port}",
        "RDZV_BACKEND": policy["rdzvBackend"],
        "NNODES": f"{policy['minReplicas']}:{policy['maxReplicas']}",
        "MAX_RESTARTS": str(policy["maxRestarts"]),
        "NPROC_PER_NODE": str(policy["nProcPerNode"]),
        "RDZV_CONF": ",".join(f"{one['key']}={one['value']}" for one in policy["rdzvConf"]),
    }
    for name, value in variables.items():
        monkeypatch.setenv(f"PET_{name}", value)
    assert container["command"] == ["torchrun"]
    config, _, script = config_from_args(get_args_parser().parse_args(container["args"]))
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node, config.max_restarts) == (2, 4, 4, 100)
    assert (config.rdzv_backend, config.rdzv_endpoint) == ("c10d", f"ddp-loop-worker-0:{port}")
    assert config.rdzv_configs["last_call_timeout"] == "5"
    assert script[-3:] == container["args"]
    assert policy["minReplicas"] <= worker["replicas"] <= policy["maxReplicas"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == policy["nProcPerNode"]
