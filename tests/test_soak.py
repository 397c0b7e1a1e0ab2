"""A few seconds of bench/soak.py: mixed load beside hostile bodies and silent connections, then a SIGTERM within it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import PATIENCE_S, slowness

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "checkpoints" / "demo"


@pytest.mark.skipif(not any(DEMO.glob("*.safetensors")), reason="the demo checkpoint's weights are not here")
def test_a_short_soak() -> None:
    command = [sys.executable, "bench/soak.py", "--minutes", "0.2", "--texts", "10", "--clients", "8"]
    command += ["--slowest-health", str(0.5 * slowness())]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=4 * PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["outcomes"]["text"] > 0 and result["aborts"] > 0 and result["exit_code_after_sigterm"] == 0
    assert result["outcomes"]["hostile body"] >= 5 and result["outcomes"]["kept apart"] > 0
    assert result["silent_connections"] > 256 and result["health_answers"] > 10
    assert any(name.startswith("under way, then") for name in result["outcomes_with_sigterm"])
