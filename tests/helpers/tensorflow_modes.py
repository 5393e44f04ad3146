"""Policies in TensorFlow's and Keras's global modes: `python -m helpers.tensorflow_modes NAME`.

Prints what happened under headlines: without eager execution (`disabled`), or in other modes
(`changed`).
"""

import sys

import keras
import numpy as np
import tensorflow as tf

from helpers.factories import OBS, make, rows_of
from helpers.forked_policies import get_error
from tfpolicies import DQNTF2Policy, PPOConfig, PPOTF1Policy, PPOTF2Policy
from tfpolicies.testing import random_batch

KINDS = PPOTF2Policy, PPOTF1Policy, DQNTF2Policy


def print_errors(**config):
    print(*[get_error(make, kind, **config) for kind in KINDS], sep="\n")


def run_disabled():
    for name in ("eager_execution", "v2_behavior"):
        print("==", name)
        getattr(tf.compat.v1, "disable_" + name)()
        print_errors()
        config = PPOConfig().environment("CartPole-v1").debugging(log_level="ERROR")
        print(get_error(config.build))


def compute_numbers(kind, units):
    model = {"fcnet_hiddens": [4], "custom_model_config": {"units": units}}
    policy = make(kind, model=model)
    stats = policy.learn_epochs(random_batch(policy, 8), 2, 4)["learner_stats"]
    actions = policy.compute_actions(rows_of(OBS, 3))[0].tolist()
    return actions, {name: float(x) for name, x in stats.items()}, policy.get_weights()


def run_changed():
    print("== floatx")
    keras.config.set_floatx("float64")
    print_errors()
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")

    print("== strategy")
    with tf.distribute.MirroredStrategy(["cpu:0"]).scope():
        print_errors()

    print("== graph")
    with tf.Graph().as_default():
        print_errors()
    print(get_error(tf.function(lambda: make(), autograph=False)))

    print("== parts of TensorFlow 2")
    for name in ("control_flow_v2", "resource_variables"):
        getattr(tf.compat.v1, "disable_" + name)()
        print(get_error(make))
        getattr(tf.compat.v1, "enable_" + name)()
    print(get_error(make))

    print("== precision")
    for name in ("float64", "mixed_float16", "mixed_bfloat16"):
        keras.config.set_dtype_policy(name)
        print_errors()
    keras.config.set_dtype_policy("float32")

    print("== model")
    layer = keras.layers.Dense(2, dtype="float64")
    print_errors(model={"custom_model": keras.Sequential([keras.Input((3,)), layer])})
    print_errors()

    print("== functions")
    before = [compute_numbers(kind, 1) for kind in KINDS]
    tf.config.run_functions_eagerly(True)
    for kind, (actions, stats, weights) in zip(KINDS, before, strict=True):
        now = compute_numbers(kind, 2)  # of another Program
        pairs = zip(weights.values(), now[2].values(), strict=True)
        print(actions == now[0], stats == now[1], all(np.array_equal(*pair) for pair in pairs))


if __name__ == "__main__":
    {"disabled": run_disabled, "changed": run_changed}[sys.argv[1]]()
