"""tfpolicies' PPO on a robot, measured like its peer.

Run by `benchmarks.learning.robot`; by hand: `PYTHONPATH=. python benchmarks/learning/ours_robot.py
training --variant envpool --settings '{...}'`.
"""

from typing import Any

from benchmarks import probe

probe.hush()

import tfpolicies  # noqa: E402
from tfpolicies import PPOConfig  # noqa: E402


def training(request: probe.Request) -> probe.Figures:
    chosen = request.settings
    rows = chosen["fragment"] * chosen["num_envs"]
    config = (
        PPOConfig()
        .environment(_envs(request))
        .rollouts(
            num_envs_per_worker=chosen["num_envs"], rollout_fragment_length=chosen["fragment"]
        )
        .training(
            lr=chosen["lr"],
            gamma=chosen["gamma"],
            lambda_=chosen["lambda"],
            clip_param=chosen["clip"],
            kl_coeff=0.0,
            grad_clip=chosen["grad_clip"],
            grad_clip_by="global_norm",
            vf_clip_param=float("inf"),
            vf_loss_coeff=chosen["vf_loss_coeff"],
            train_batch_size=rows,
            sgd_minibatch_size=chosen["minibatch"],
            num_sgd_iter=chosen["epochs"],
            model={"fcnet_hiddens": chosen["hidden"], "free_log_std": True},
        )
        .debugging(seed=request.seed, log_level="ERROR")
    )
    algo = config.build()

    def iterate() -> int:
        algo.train()
        return rows

    figures = {"training": probe.rate(iterate, request.seconds)}
    algo.stop()
    return figures


def _envs(request: probe.Request) -> Any:
    name, count = request.settings["env"], request.settings["num_envs"]
    if request.variant == "gymnasium":
        return name
    import envpool

    return lambda context: envpool.make(
        name, env_type="gymnasium", num_envs=count, num_threads=1, seed=request.seed
    )


if __name__ == "__main__":
    probe.serve(
        ["tensorflow", "keras", "onnxruntime", "gymnasium", "envpool", "mujoco", "numpy"],
        {"training": training},
        {"tfpolicies": tfpolicies.__version__},
    )
