"""tfpolicies in the town of `examples/traffic_grid.py`: cars and lights, three PPO policies.

Variants: "" samples; "bare" steps the environment alone, with random actions. Run by
`multi_agent`; by hand: `PYTHONPATH=. python benchmarks/sampling/ours_traffic.py traffic`.
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks import probe

probe.hush()

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

import numpy as np  # noqa: E402
import traffic  # noqa: E402
from traffic_grid import (  # noqa: E402
    CAR_SPACE,
    KEEP_OR_SWITCH,
    LIGHT_SPACE,
    STAY_OR_GO,
)

from tfpolicies import PPOTF2Policy  # noqa: E402
from tfpolicies.envs.multi_agent_adapter import MultiAgentEnvAdapter  # noqa: E402
from tfpolicies.rollout.multi_agent_sampler import MultiAgentSampler  # noqa: E402


def sampling(request: probe.Request) -> probe.Figures:
    settings = request.settings
    envs = [traffic.MultiAgentTrafficGrid(settings["cars"]) for _ in range(settings["copies"])]
    if request.variant == "bare":
        return {"steps": probe.rate(lambda: _step_alone(envs), request.seconds)}
    config = {"model": {"fcnet_hiddens": probe.HIDDEN}, "seed": request.seed}
    cars = {
        f"car_policy{i}": PPOTF2Policy(CAR_SPACE, STAY_OR_GO, {**config, "gamma": gamma})
        for i, gamma in ((1, 0.99), (2, 0.95))
    }
    lights = PPOTF2Policy(LIGHT_SPACE, KEEP_OR_SWITCH, config)
    rng = np.random.default_rng(request.seed)

    def mapping(agent_id: str, episode: Any, **kwargs: Any) -> str:
        return f"car_policy{rng.integers(1, 3)}" if agent_id.startswith("car_") else "lights"

    sampler = MultiAgentSampler(
        MultiAgentEnvAdapter(envs),
        {**cars, "lights": lights},
        SimpleNamespace(policy_mapping_fn=mapping),
        fragment_length=settings["fragment"],
        rng=np.random.default_rng(request.seed),
    )
    sampler.reset([request.seed + i for i in range(len(envs))])
    return {"steps": probe.rate(lambda: sampler.sample().env_steps(), request.seconds)}


def _step_alone(envs: list[traffic.MultiAgentTrafficGrid]) -> int:
    actions = envs[0].action_space_sample()
    for env in envs:
        env.reset()
        for _ in range(100):
            env.step(actions)
    return 100 * len(envs)


if __name__ == "__main__":
    probe.serve(["tensorflow", "keras", "onnxruntime", "numpy"], {"traffic": sampling})
