"""What a loss records is what an update tells; attributes of ported losses are read on demand."""

import pytest
import tensorflow as tf

from helpers.factories import make
from tfpolicies import PGTF2Policy, PPOTF2Policy
from tfpolicies.errors import ConfigError, PolicyOwnedError
from tfpolicies.testing import random_batch


@pytest.mark.core
def test_a_loss_records_numbers_and_rows():
    class Recording(PGTF2Policy):
        def loss(self, model, dist_class, train_batch):
            loss = super().loss(model, dist_class, train_batch)
            self.record(twice=2 * self.recorded["policy_loss"], returns=train_batch["advantages"])
            return loss

    policy = make(Recording)
    batch = random_batch(policy, 4)
    result = policy.learn_on_batch(batch)
    stats = result["learner_stats"]
    assert stats["twice"] == pytest.approx(2 * stats["policy_loss"])
    assert result["returns"].tolist() == batch["advantages"].tolist()


def test_statistics_that_nothing_reads_are_an_error(no_extensions):
    class Ported(PPOTF2Policy):
        def loss(self, model, dist_class, train_batch):
            self._mean_kl_loss = tf.constant(0.0)
            return super().loss(model, dist_class, train_batch)

    class Reading(PPOTF2Policy):
        def loss(self, model, dist_class, train_batch):
            return super().loss(model, dist_class, train_batch) + self._mean_kl_loss

    policy = make(Ported)
    with pytest.raises(ConfigError, match=r"stores _mean_kl_loss on self.*self\.record\(kl="):
        policy.learn_on_batch(random_batch(policy, 4))
    policy = make(Reading)
    with pytest.raises(PolicyOwnedError, match=r"read self\._mean_kl_loss"):
        policy.learn_on_batch(random_batch(policy, 4))
