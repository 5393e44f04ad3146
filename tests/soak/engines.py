"""Layouts against the engines' own packages: `python -m soak.engines`.

Exports a policy with nested spaces and one with a memory for TensorFlow Serving, MLServer and
KServe, and lets their published packages, in virtual environments that it makes, read what was
written: the messages of warm-up requests, MLServer itself over HTTP, the models of an
InferenceService. `tests/export/test_layouts.py` does the same for Triton, whose messages are light.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from helpers.policy_matrix import Combination, make_policy
from helpers.scripts import parse_options
from tfpolicies.export.verify import draw_random_inputs
from tools.peers import KSERVE, MLSERVER, PEERS, TF_SERVING, Peer, interpreter

POLICIES = {
    "nested": Combination("dict", "nested", "mlp"),
    "recurrent": Combination("box", "discrete", "lstm"),
}
LAYOUTS: dict[str, Peer] = {"tf-serving": TF_SERVING, "mlserver": MLSERVER, "kserve": KSERVE}


def expected(policy: Any, file: Path) -> None:
    """Writes inputs of an export and what the policy makes of them."""
    ports = policy.program.ports
    drawn = draw_random_inputs(ports, 3, 1, np.random.default_rng(0))
    inputs = {port.name: x for port, x in zip(ports.all, drawn, strict=True)}
    if ports.is_recurrent:
        inputs["seq_lens"] = np.ones(3, np.int32)
    else:
        inputs = {name: x[:, 0] for name, x in inputs.items()}
    rows = [x[:, 0] for x in drawn[: len(ports.obs)]]
    values: dict[str, Any] = {"explore": False}
    if ports.is_recurrent:
        values |= {"state_batches": drawn[-len(ports.states) :]}
        values |= {name: inputs[name][:, 0] for name in ("prev_actions", "prev_rewards")}
        values = {
            k.removesuffix("s") + "_batch" if "prev" in k else k: x for k, x in values.items()
        }
    obs = rows[0] if len(rows) == 1 else dict(zip(("speed", "gear", "camera"), rows, strict=True))
    extras = policy.compute_actions(obs, **values).extras
    outputs = {name: extras[name] for name in ("action_dist_inputs", "vf_preds")}
    outputs = {k: x[:, None] if ports.is_recurrent else x for k, x in outputs.items()}
    np.savez(file, **inputs, **outputs)


def checked(layout: str, policy: Any, folder: Path, python: Path) -> str:
    result = policy.export_model(folder / "arm", layout=layout)
    arguments = {
        "tf-serving": [result.path],
        "mlserver": [result.path, folder / "expected.npz"],
        "kserve": [folder / "arm" / "inference_service.yaml"],
    }
    script = Path(__file__).with_name(f"engine_{layout.replace('-', '_')}.py")
    command = [str(python), str(script), *map(str, arguments[layout])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{layout}: {(done.stderr or done.stdout)[-3000:]}")
    return done.stdout.splitlines()[-1]


def main() -> int:
    options = parse_options(__doc__, only=("", "part of the name of a layout"), peers=PEERS)
    for layout, peer in LAYOUTS.items():
        if options.only not in layout:
            continue
        python = interpreter(peer, options.peers)
        for name, combination in POLICIES.items():
            policy = make_policy(combination)
            with tempfile.TemporaryDirectory() as folder:
                expected(policy, Path(folder, "expected.npz"))
                actual = checked(layout, policy, Path(folder), python)
            print(f"{layout}, {name}: {actual}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
