"""Policies, environments and stashes in forked processes: `python -m helpers.forked_policies`.

Prints what happened under headlines.
"""

import gc
import os
import signal
import subprocess
import sys
import tempfile

import gymnasium
import numpy as np

from helpers.factories import OBS, make, rows_of
from tfpolicies import PolicyMap, PPOTF1Policy
from tfpolicies.testing import random_batch


def get_error(f, *args, **kwargs):
    try:
        f(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def run_in_child(f):
    """Runs a function in a forked process, and prints its error."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        print(get_error(f)[:60], flush=True)
        os._exit(0)
    print(end="" if os.waitpid(pid, 0)[1] == 0 else "the child hangs\n")


def run_tensorflow():
    policy, graph, onnx = make(), make(PPOTF1Policy), make(inference="onnx")
    batch, rows = random_batch(policy, 8), rows_of(OBS, 3)
    for each in (policy, graph):
        each.compute_actions(rows)
        each.learn_on_batch(batch)
    expected = onnx.compute_actions(rows, explore=False)[2]["action_dist_inputs"]
    print("== tensorflow")
    for f in (
        lambda: policy.compute_actions(rows),
        lambda: policy.compute_actions(rows[:1]),
        lambda: policy.compute_log_likelihoods(np.zeros(3, np.int64), rows),
        lambda: policy.learn_on_batch(batch),
        lambda: policy.learn_epochs(batch, 1, 4),
        lambda: policy.compute_gradients(batch),
        lambda: policy.export_model(tempfile.mkdtemp()),
        lambda: policy.export_model(tempfile.mkdtemp(), onnx=True),
        lambda: policy.model,
        lambda: policy.to_keras(),
        lambda: graph.compute_actions(rows),
        lambda: graph.learn_on_batch(batch),
        lambda: graph.copy().get_session(),
        lambda: make(),
        lambda: make(model={"fcnet_hiddens": [3]}),
    ):
        run_in_child(f)

    def act():
        result = onnx.compute_actions(rows, explore=False)[2]["action_dist_inputs"]
        assert np.array_equal(result, expected)
        onnx.compute_actions(rows_of(OBS, 7))
        onnx.compute_single_action(rows[0])
        onnx.session().act(rows[0])

    def store():
        policy.set_weights(policy.get_weights())
        policy.copy().set_state(policy.get_state())
        policy.export_checkpoint(tempfile.mkdtemp())
        assert batch.slice(2, 5).count == 3

    print("== numpy")
    for f in (act, store, lambda: subprocess.run(["true"], check=True)):
        run_in_child(f)
    return policy, batch


def run_environments():
    make_env = [lambda: gymnasium.make("CartPole-v1")] * 2
    envs = gymnasium.vector.AsyncVectorEnv(make_env, context="fork")
    obs, _ = envs.reset(seed=0)
    policy = make(obs=envs.single_observation_space)
    for _ in range(3):
        obs, *_ = envs.step(policy.compute_actions(obs)[0])
        policy.learn_on_batch(random_batch(policy, 8))
    envs.close()
    print("== environments", obs.shape, sep="\n")


def change_stash():
    paged = PolicyMap(capacity=1)
    for name in "ab":
        paged[name] = make(inference="onnx")
    weights = {name: paged[name].get_weights() for name in "ab"}
    print("== stash", flush=True)
    pid = os.fork()
    if pid == 0:
        for name in "ab":  # changes of the child do not reach the parent's stash
            zeros = [0 * x for x in weights[name].values()]
            print(get_error(lambda: paged[name].set_weights(zeros))[:49])  # noqa: B023
        del paged
        gc.collect()
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(pid, 0)
    for name in "ab":
        now = paged[name].get_weights()
        print(all(np.array_equal(now[key], x) for key, x in weights[name].items()))


def main():
    print("== before")
    run_in_child(lambda: make().learn_on_batch(random_batch(make(), 8)))
    policy, batch = run_tensorflow()
    run_environments()
    change_stash()
    print("== parent", get_error(policy.learn_on_batch, batch), get_error(make), sep="\n")


if __name__ == "__main__":
    main()
