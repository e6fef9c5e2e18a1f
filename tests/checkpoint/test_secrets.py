"""Secrets in a command or in hyper-parameters: no file keeps them, and a run that had one says so when it goes on."""

from __future__ import annotations

import os
import stat
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import ddp_loop as dl
from ddp_loop.checkpoint import flatten_config, hide_secrets, lacks_secret, way_on
from ddp_loop.monitor.continuing import command_of
from ddp_loop.sweeps.folders import begun_folder
from ddp_loop.sweeps.jobs import FunctionJob, Job, ScriptJob
from tests.support.refusals import loop_over, network
from tests.support.runs import status_of
from tests.support.training import take

pytestmark = pytest.mark.covers("D1")
SECRET = "xq7-not-to-be-seen"


@contextmanager
def usual_mask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.parametrize(
    ("command", "hidden"),
    [
        ("--api-key X --epochs 3", "--api-key *** --epochs 3"),
        ("--api_key=X -token Y", "--api_key=*** -token ***"),
        ("WANDB_API_KEY=X wandb.apiKey=X=Y", "WANDB_API_KEY=*** wandb.apiKey=***"),
        ("login.password=12 --password -x", "login.password=*** --password ***"),
        ("--client-secret 7 --secret-value=7", "--client-secret *** --secret-value=***"),
        ("--aws-access-key-id=AKIA", "--aws-access-key-id=***"),
        ("--at=sql://me:pw@host/db http://a:80/b", "--at=sql://me:***@host/db http://a:80/b"),
        ("--url=http://a/b?token=X&page=3 ?apiKey=X", "--url=http://a/b?token=***&page=3 ?apiKey=***"),
        ("--tokens X --api_keys=X,Y -token1=X", "--tokens *** --api_keys=*** -token1=***"),
        ("--secrets A B --keys C -n 3", "--secrets *** *** --keys *** -n 3"),
    ],
)
def test_what_looks_like_a_secret_is_hidden_in_a_command(command: str, hidden: str) -> None:
    assert hide_secrets(command.split()) == hidden.split()
    assert hide_secrets(hidden.split()) == hidden.split()
    assert lacks_secret({"start": ["python", *command.split()]})


@pytest.mark.parametrize(
    "command",
    [
        "--hf_token --epochs 3",
        "--pad-token 0 --eos-token=2 --sort-key=",
        "--tokenizer gpt2 --max-tokens=a",
        "--key-file=k train.py",
        "--num-tokens a --tokens-per-batch=4",
        "--tokens=512 --keys 3",
        "--key-frames a --monkey=b --keyboard=us",
    ],
)
def test_what_is_no_secret_stays_in_a_command(command: str) -> None:
    assert hide_secrets(command.split()) == command.split()
    assert not lacks_secret({"start": ["python", *command.split()]})


def test_what_looks_like_a_secret_is_hidden_in_hyper_parameters() -> None:
    config = {"rate": 0.1, "wandb": {"api_key": SECRET, "token": 3, "password": 1234}, "db": "a://b:c@d", "key": None}
    hidden = {"wandb.api_key": "***", "wandb.token": 3, "wandb.password": "***", "db": "a://b:***@d", "key": None}
    assert flatten_config(config) == {"rate": 0.1, **hidden}
    more = {"secrets": {"openai": SECRET}, "api_keys": [SECRET], "Authorization": SECRET}
    assert SECRET not in repr(flatten_config(more))
    around = {"api_keys": {"openai": SECRET}, "DB_PASSWORD": {"main": {"value": SECRET}}, "Secrets": {"a": SECRET}}
    listed = {"sinks": [{"name": "a", "api_key": SECRET}, 2], "pairs": [[Namespace(token=SECRET)]]}
    assert set(flatten_config({**around, "sinks": [{"token": SECRET}]}).values()) == {"***"}
    assert flatten_config(listed) == {
        "sinks.0.name": "a",
        "sinks.0.api_key": "***",
        "sinks.1": 2,
        "pairs.0.0.token": "***",
    }
    harmless = {"keys": 3, "n_tokens": "many", "pad_token_id": 0, "token_dim": 8, "tokens": 512, "secretary": "Ann"}
    harmless |= {"keys.jump_scale": 2.5, "betas": "[0.9, 0.99]"}
    assert flatten_config(harmless) == harmless


def train(folder: Path) -> None:
    with dl.join_world(device="cpu") as world:
        model = network()
        for step in loop_over(world, str(folder), model, config={"api_key": SECRET, "rate": 1}):
            take(step, model)
            break


@pytest.mark.filterwarnings("ignore:Two steps were folded")
def test_no_file_of_a_run_keeps_a_secret_and_those_with_arguments_are_the_user_s_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    with usual_mask(0):
        for secret in (SECRET, f"{SECRET}-2"):
            words = ["train.py", "--api-key", secret, f"--password={secret}", f"TOKEN={secret}"]
            monkeypatch.setattr(sys, "argv", words)
            train(run)
    files = [path for path in run.rglob("*") if path.is_file()]
    assert [path.name for path in files if SECRET.encode() in path.read_bytes()] == []
    for name in ("run.json", "starts.jsonl", "status.json"):
        assert stat.S_IMODE((run / name).stat().st_mode) == 0o600, name
    status = status_of(run)
    assert status["command"] == ["train.py", "--api-key", "***", "--password=***", "TOKEN=***"]
    assert len((run / "starts.jsonl").read_text().splitlines()) == 2
    assert command_of(run).lacks == ("--api-key", "--password", "TOKEN")
    assert "--api-key '***'" in way_on(status)


def test_the_secret_of_an_older_version_is_not_shown() -> None:
    status = {"start": ["python", "train.py", "--api-key", SECRET], "directory": None}
    assert SECRET not in way_on(status)
    assert "had a secret" in lacks_secret(status)
    assert lacks_secret({"start": ["python", "train.py"]}) == lacks_secret({}) == ""


@pytest.mark.parametrize(
    ("job", "mode"),
    [
        (ScriptJob(Path("train.py"), ("--api-key", SECRET)), 0o700),
        (ScriptJob(Path("train.py"), ("--epochs", "3")), 0o755),
        (FunctionJob(train, {"api_key": SECRET}), 0o700),
        (FunctionJob(train, {"max_tokens": 3}), 0o755),
    ],
)
def test_the_folder_of_a_sweep_with_a_secret_is_the_user_s_alone(tmp_path: Path, job: Job, mode: int) -> None:
    with usual_mask(0o022), begun_folder(tmp_path / "sweep", {"job": job.facts, "objective": None}):
        pass
    assert stat.S_IMODE((tmp_path / "sweep").stat().st_mode) == mode
