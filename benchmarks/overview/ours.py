"""tfpolicies' PPO, measured like its peers.

Variants: acting "onnx", "tf" (inference runtime); sampling "vector" (environment by its name),
"instances" (an `env_creator` that returns plain environments); update "xla", "plain"; acting and
updates also "graph" (graph mode), one_update "tf". Run by
`main_job`; by hand: `PYTHONPATH=. python benchmarks/overview/ours.py acting --variant onnx`.
"""

import time
from typing import Any

from benchmarks import probe

probe.hush()

import gymnasium as gym  # noqa: E402

import tfpolicies  # noqa: E402
from tfpolicies import (  # noqa: E402
    PolicyMap,
    PPOConfig,
    PPOTF1Policy,
    PPOTF2Policy,
    RolloutWorker,
    SampleBatch,
    TFPolicy,
)


def config_of(
    num_envs: int = 8, inference: str = "auto", jit_compile: bool | str = "auto", **training: Any
) -> PPOConfig:
    """Returns a config with 2x64 tanh networks, on CartPole, other settings as SB3's."""
    settings = {
        "model": {"fcnet_hiddens": probe.HIDDEN, "vf_share_layers": False},
        "lr": 3e-4,
        "train_batch_size": probe.ROWS,
        "sgd_minibatch_size": probe.MINIBATCH,
        "num_sgd_iter": probe.EPOCHS,
        "clip_param": 0.2,
        "kl_coeff": 0.0,
        "vf_loss_coeff": 0.5,
        "vf_clip_param": float("inf"),
        "entropy_coeff": 0.0,
        "grad_clip": 0.5,
    }
    return (
        PPOConfig()
        .environment("CartPole-v1")
        .framework("tf2", inference=inference, jit_compile=jit_compile)
        .rollouts(num_envs_per_worker=num_envs, rollout_fragment_length=probe.FRAGMENT)
        .training(**settings | training)
        .debugging(seed=0)
    )


def policy_of(config: PPOConfig, variant: str = "") -> TFPolicy:
    env = gym.make("CartPole-v1")
    policy_class = PPOTF1Policy if variant == "graph" else PPOTF2Policy
    return policy_class(env.observation_space, env.action_space, config)


def acting(request: probe.Request) -> probe.Figures:
    inference = "tf" if request.variant == "graph" else request.variant
    policy = policy_of(config_of(inference=inference), request.variant)

    def figure(batch: int) -> float:
        obs = probe.observations(batch)
        return probe.microseconds(lambda: policy.compute_actions(obs), request.seconds)

    return {str(batch): figure(batch) for batch in probe.BATCH_SIZES}


CREATORS = {"vector": None, "instances": lambda context: gym.make("CartPole-v1")}


def sampling(request: probe.Request) -> probe.Figures:
    def figure(num_envs: int) -> float:
        worker = RolloutWorker(
            env_creator=CREATORS[request.variant],
            config=config_of(num_envs),
            default_policy_class=PPOTF2Policy,
        )
        return probe.rate(lambda: len(worker.sample()), request.seconds)

    return {str(num_envs): figure(num_envs) for num_envs in probe.ENV_COUNTS}


def one_update(request: probe.Request) -> probe.Figures:
    policy = policy_of(config_of(), request.variant)

    def figure(rows: int) -> float:
        batch = SampleBatch(probe.training_rows()).slice(0, rows)
        return probe.microseconds(lambda: policy.learn_on_batch(batch), request.seconds) / 1e3

    return {str(rows): figure(rows) for rows in probe.ONE_UPDATE_ROWS}


def update(request: probe.Request) -> probe.Figures:
    jit_compile = {"xla": True, "plain": False, "graph": "auto"}[request.variant]
    policy = policy_of(config_of(jit_compile=jit_compile), request.variant)

    def one() -> float:
        batch = SampleBatch(probe.training_rows())
        before = time.perf_counter()
        policy.learn_epochs(batch, probe.EPOCHS, probe.MINIBATCH)
        return time.perf_counter() - before

    return probe.update_figures(one, request.seconds)


def league(request: probe.Request) -> probe.Figures:
    spaces = gym.make("CartPole-v1")
    config = config_of().to_dict()

    def add(policies: PolicyMap, name: str) -> None:
        inputs = spaces.observation_space, spaces.action_space
        policies.create_policy(name, PPOTF2Policy, *inputs, {}, config)

    def snapshot(policies: PolicyMap, name: str) -> None:
        policies.copy_policy("main", name)

    return probe.league_figures(
        lambda capacity: PolicyMap(capacity=capacity), add, snapshot, request.seconds
    )


def learning(request: probe.Request) -> probe.Figures:
    chosen = request.settings
    config = config_of(
        chosen["num_envs"],
        train_batch_size=chosen["num_envs"] * chosen["fragment"],
        sgd_minibatch_size=chosen["minibatch"],
        num_sgd_iter=chosen["epochs"],
        lr=chosen["lr"],
        gamma=chosen["gamma"],
        lambda_=chosen["lambda"],
        clip_param=chosen["clip"],
        entropy_coeff=chosen["entropy_coeff"],
        vf_loss_coeff=chosen["vf_loss_coeff"],
        grad_clip=chosen["grad_clip"],
        optimizer={"epsilon": 1e-5},  # SB3's Adam
    )
    config.training(model={"ortho_init": True})  # and its initial weights
    config.rollouts(rollout_fragment_length=chosen["fragment"]).debugging(seed=request.seed)
    algo = config.build()

    def iterate() -> tuple[float, int]:
        result = algo.train()
        enough = result["episodes_total"] >= 100
        mean = result["episode_reward_mean"] if enough else float("nan")
        return mean, result["timesteps_total"]

    figures = probe.learning_figures(iterate, request, time.time())
    algo.stop()
    return figures


if __name__ == "__main__":
    probe.serve(
        ["tensorflow", "keras", "onnxruntime", "gymnasium", "numpy"],
        {
            "acting": acting,
            "one_update": one_update,
            "sampling": sampling,
            "update": update,
            "league": league,
            "learning": learning,
        },
        {"tfpolicies": tfpolicies.__version__},
    )
