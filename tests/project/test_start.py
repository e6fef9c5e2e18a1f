"""What processes of the tests do at their start changes when torch's compiler is imported, and nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest

TRAIN = """
import sys, torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
optimizer.zero_grad()
assert "torch._dynamo.eval_frame" not in sys.modules
@torch._disable_dynamo
def apart(rows):
    return rows.sin()
rows = torch.ones(2)
first = apart(rows)
"""
COMPILED = """
compiled = torch.compile(lambda rows: apart(rows) + 1, backend="eager", fullgraph=True)
try:
    compiled(rows)
except torch._dynamo.exc.Unsupported:
    print("apart")
whole = torch.compile(lambda rows: rows.sin() + 1, backend="eager", fullgraph=True)
assert whole(rows).equal(first + 1) and apart(rows).equal(first)
optimizer.step()
"""
IMPORTED = """
import inspect
import torch._dynamo.config
assert "torch._dynamo.eval_frame" in sys.modules
assert "def reset" in inspect.getsource(torch._dynamo)
optimizer.step()
print("apart")
"""


@pytest.mark.slow
@pytest.mark.parametrize("then", [COMPILED, IMPORTED])
def test_the_compiler_is_there_when_it_is_asked_for_and_functions_that_it_must_not_compile_stay_apart(
    then: str,
) -> None:
    done = subprocess.run([sys.executable, "-c", TRAIN + then], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "apart\n"), done.stderr
