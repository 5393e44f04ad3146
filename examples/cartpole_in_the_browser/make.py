"""Trains a policy, and writes a web page in which it balances CartPole.

    python examples/cartpole_in_the_browser/make.py
    python -m http.server -d exported/cartpole     # then open http://localhost:8000/cartpole.html

The page loads ONNX Runtime from a CDN. For a page that needs no network, run
`npm install onnxruntime-web` and add `--ort-web node_modules/onnxruntime-web/dist`.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from tfpolicies import PPOConfig

ENV = "CartPole-v1"
PAGE = ("cartpole.html", "cartpole.js", "play.js")


def main(
    folder: Path = Path("exported/cartpole"),
    ort_web: Path | None = None,
    target: float = 475.0,
    max_steps: int = 500_000,
) -> float:
    algorithm = PPOConfig.from_tuned(ENV).debugging(seed=0).build()
    learned = algorithm.learn(
        max_steps,
        callbacks=[
            lambda _, result: (
                result["episodes_total"] < 100 or result["episode_reward_mean"] < target
            )
        ],
    )
    print(algorithm.get_policy().export_model(folder, web=True, ort_web=ort_web))
    algorithm.stop()
    for name in PAGE:
        shutil.copy(Path(__file__).with_name(name), folder)
    return float(learned.result["episode_reward_mean"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", type=Path, default=Path("exported/cartpole"))
    parser.add_argument("--ort-web", type=Path, help="dist folder of the npm package")
    options = parser.parse_args()
    main(options.folder, options.ort_web)
