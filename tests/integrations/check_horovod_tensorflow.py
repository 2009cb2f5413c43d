"""The adapter for TensorFlow users, on two processes without torch: `make test-tensorflow`.

Not named test_*: it needs TensorFlow, which has no place in the default environment.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "horovod_tensorflow_short.py"


def run(tmp_path: Path, *command: str) -> list[str]:
    """Return what two ranks print, started as mpirun starts them."""
    ranks = []
    for rank in range(2):
        environment = {
            **os.environ,  # noqa: TID251
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            "PMIX_NAMESPACE": "check",
            "TMPDIR": str(tmp_path),
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "DEEPYTORCH_TUNE": "off",
        }
        ranks.append(
            subprocess.Popen(
                [sys.executable, *command],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    outputs = [rank.communicate(timeout=300) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    return [output for output, _ in outputs]


def operations() -> None:
    import numpy as np
    import tensorflow as tf

    import deepytorch
    import deepytorch.integrations.horovod_tensorflow as hvd

    hvd.init()
    hvd.init()
    rank = hvd.rank()
    assert (hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_size()) == (2, rank, 2, 1)

    def everything() -> None:
        own = tf.constant([1.0 + rank, 4.0 - rank])
        for op, expected in {
            hvd.Average: [1.5, 3.5],
            hvd.Sum: [3.0, 7.0],
            hvd.Min: [1.0, 3.0],
            hvd.Max: [2.0, 4.0],
            hvd.Product: [2.0, 12.0],
        }.items():
            tf.debugging.assert_equal(hvd.allreduce(own, op=op), expected)
        half = hvd.allreduce(own, compression=hvd.Compression.fp16)
        tf.debugging.assert_equal(half, [1.5, 3.5])
        scaled = hvd.allreduce(own, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
        tf.debugging.assert_equal(scaled, [6.0, 14.0])
        group = hvd.grouped_allreduce([own, tf.cast(own, tf.int32), tf.zeros([400, 100]) + own[0]])
        tf.debugging.assert_equal(group[1], [1, 3])
        tf.debugging.assert_equal(group[2], tf.fill([400, 100], 1.5))
        tf.debugging.assert_equal(
            hvd.allgather(tf.fill([1 + rank, 2], rank)), [[0, 0], [1, 1], [1, 1]]
        )
        tf.debugging.assert_equal(hvd.broadcast(tf.constant(rank), 1), 1)
        bfloat = hvd.allreduce(tf.cast(own, tf.bfloat16), op=hvd.Sum)
        tf.debugging.assert_equal(tf.cast(bfloat, tf.float32), [3.0, 7.0])

        with tf.GradientTape() as tape:
            tape.watch(own)
            total = tf.reduce_sum(hvd.allreduce(own, op=hvd.Sum)) * (1.0 + rank)
        tf.debugging.assert_equal(tape.gradient(total, own), [3.0, 3.0])
        with tf.GradientTape() as tape:
            tape.watch(own)
            total = tf.reduce_sum(hvd.allgather(own)) * (1.0 + rank)
        tf.debugging.assert_equal(tape.gradient(total, own), [1.5, 1.5])
        with tf.GradientTape() as tape:
            tape.watch(own)
            total = tf.reduce_sum(hvd.broadcast(own, 0)) * (1.0 + rank)
        tf.debugging.assert_equal(tape.gradient(total, own), [1.5 * (1 - rank)] * 2)

    everything()
    tf.function(everything)()

    variables = [tf.Variable([[1.0 * rank]]), tf.Variable(rank)]
    hvd.broadcast_variables(variables, root_rank=1)
    assert [variable.numpy().tolist() for variable in variables] == [[[1.0]], 1]
    assert hvd.broadcast_object({"rank": rank}, 1) == {"rank": 1}
    assert hvd.allgather_object([rank] * rank) == [[], [1]]
    hvd.barrier()

    table = tf.Variable(tf.zeros([4, 2]))
    for as_dense in (False, True):
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(tf.gather(table, [rank, 3]))
        tape = hvd.DistributedGradientTape(tape, sparse_as_dense=as_dense)
        gradient = tape.gradient(total, table)
        assert isinstance(gradient, tf.IndexedSlices) != as_dense
        dense = tf.convert_to_tensor(gradient).numpy()
        assert dense[:, 0].tolist() == [0.5, 0.5, 0.0, 1.0]

    def must_fail(kind: type[Exception], said: str, call: Callable[[], object]) -> None:
        with pytest.raises(kind, match=said):
            call()

    must_fail(hvd.HorovodInternalError, "all_reduce", lambda: hvd.allreduce(np.ones(2 + rank)))
    must_fail(hvd.HorovodInternalError, "dtype", lambda: hvd.allgather(np.ones((2, 2 + rank))))
    must_fail(hvd.IntegrationError, "Adasum", lambda: hvd.allreduce(np.ones(1), op=hvd.Adasum))
    must_fail(hvd.IntegrationError, "same number of batches", hvd.join)
    rows = deepytorch.report().rows
    native = {row.op for row in rows if row.algorithm != "delegate"}
    assert native == {"all_reduce", "all_gather", "broadcast", "barrier"}
    hvd.shutdown()
    must_fail(ValueError, "use hvd.init", hvd.rank)


def training() -> None:
    import numpy as np
    import tensorflow as tf

    import deepytorch.integrations.horovod_tensorflow as hvd

    hvd.init()

    def make() -> tf.keras.Model:
        tf.keras.utils.set_random_seed(3)
        layers = [tf.keras.layers.Dense(32, "tanh"), tf.keras.layers.Dense(4)]
        model = tf.keras.Sequential(layers)
        model.build([None, 16])
        return model

    def batch(rank: int, step: int) -> tuple[tf.Tensor, tf.Tensor]:
        generator = np.random.default_rng(100 * step + rank)
        draw = generator.standard_normal
        return draw((8, 16)).astype("float32"), draw((8, 4)).astype("float32")

    def loss_of(model: tf.keras.Model, rank: int, step: int) -> tf.Tensor:
        inputs, targets = batch(rank, step)
        return tf.reduce_mean(tf.square(model(inputs) - targets))

    ours, reference = make(), make()
    optimizers = [tf.keras.optimizers.SGD(0.1, momentum=0.9) for _ in range(2)]
    for step in range(20):
        with tf.GradientTape() as tape:
            loss = loss_of(ours, hvd.rank(), step)
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, ours.trainable_variables)
        optimizers[0].apply_gradients(zip(gradients, ours.trainable_variables, strict=True))

        expected, parts = [], []
        for rank in range(2):
            with tf.GradientTape() as tape:
                expected.append(loss_of(reference, rank, step))
            parts.append(tape.gradient(expected[-1], reference.trainable_variables))
        means = [(a + b) / 2 for a, b in zip(*parts, strict=True)]
        optimizers[1].apply_gradients(zip(means, reference.trainable_variables, strict=True))
        assert loss.numpy() == expected[hvd.rank()].numpy(), step

    model = make()
    optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.Adam(0.01))
    model.compile(optimizer, "mse", jit_compile=False)
    inputs, targets = batch(hvd.rank(), 0)
    model.fit(inputs, targets, batch_size=4, epochs=2, shuffle=False, verbose=0)
    weights = hvd.allgather_object([weight.tolist() for weight in model.get_weights()])
    assert weights[0] == weights[1]
    hvd.shutdown()


@pytest.mark.parametrize("part", [operations, training])
def test_on_two_ranks(tmp_path: Path, part: Callable[[], None]) -> None:
    run(tmp_path, __file__, part.__name__)


def test_the_example_learns(tmp_path: Path) -> None:
    first, _ = run(tmp_path, str(EXAMPLE))
    losses = [float(line.split()[-1]) for line in first.splitlines() if "loss" in line]
    assert len(losses) == 3
    assert losses[2] < 0.5 * losses[0]


if __name__ == "__main__":
    {"operations": operations, "training": training}[sys.argv[1]]()
    assert "torch" not in sys.modules
