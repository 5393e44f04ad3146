"""LSTM and GRU over padded sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from tfpolicies.models.catalog.initializers import Kernels
from tfpolicies.models.catalog.inspection import STATE_IN
from tfpolicies.models.catalog.layers import Memory, SequenceMask, Tensor
from tfpolicies.models.settings import Settings


class _WithoutLoop:
    """A recurrent layer of Keras's that runs a single step without a loop.

    A step costs ONNX Runtime half the time without it. Longer sequences keep the loop: unrolled,
    20 steps take XLA six times as long to compile and run no faster.
    """

    unroll: bool

    def inner_loop(
        self,
        sequences: Tensor,
        initial_state: Sequence[Tensor],
        mask: Tensor,
        training: bool = False,
    ) -> Any:
        before = self.unroll
        self.unroll = before or sequences.shape[1] == 1
        given = sequences, initial_state, mask
        try:
            return super().inner_loop(*given, training=training)  # type: ignore[misc]
        finally:
            self.unroll = before


@keras.saving.register_keras_serializable(package="tfpolicies")
class LSTM(_WithoutLoop, keras.layers.LSTM):
    """Keras's LSTM, without a loop where there is only one step."""


@keras.saving.register_keras_serializable(package="tfpolicies")
class GRU(_WithoutLoop, keras.layers.GRU):
    """Keras's GRU, without a loop where there is only one step."""


def recurrent_core(x: Tensor, seq_lens: Tensor, settings: Settings, kernels: Kernels) -> Memory:
    """Puts Keras's LSTM or GRU behind `x`, with `lstm_cell_size` units.

    LSTM: Hochreiter & Schmidhuber 1997, with a forget gate that starts open; states h and c. GRU:
    Cho et al. 2014 (arXiv:1406.1078) with the reset gate behind the product (Keras's `reset_after`,
    as cuDNN has it); state h. Steps behind a sequence's length leave the state as it is.

    Args:
        x: sequences `[B, T, F]`.
        seq_lens: true lengths, `[B]` int32.
        settings: the complete model config.
        kernels: gives kernel initializers.

    Returns:
        The outputs `[B, T, units]`, the state inputs and the states after the sequences, each
        `[B, units]`.
    """
    units = int(settings["lstm_cell_size"])
    is_lstm = settings["use_lstm"]
    layer = (LSTM if is_lstm else GRU)(
        units,
        return_sequences=True,
        return_state=True,
        use_cudnn=False,  # one code path, which XLA and ONNX know too
        kernel_initializer=kernels.glorot(),
        recurrent_initializer=kernels.orthogonal(),
        name="lstm" if is_lstm else "gru",
    )
    states = [
        keras.Input((units,), name=f"{STATE_IN}{i}", dtype="float32")
        for i in range(2 if is_lstm else 1)
    ]
    mask = SequenceMask(name="mask")([x, seq_lens])
    outputs, *after = layer(x, initial_state=states, mask=mask)
    return outputs, states, after
