"""A script for horovod.tensorflow: the import of hvd is the only line that differs.

mpirun -np 2 python docs/examples/horovod_tensorflow_short.py
"""

import tensorflow as tf

import deepytorch.integrations.horovod_tensorflow as hvd  # was: import horovod.tensorflow as hvd

hvd.init()
tf.random.set_seed(7)
centres = tf.random.normal([3, 8])
labels = tf.random.uniform([960], maxval=3, dtype=tf.int32)
points = tf.gather(centres, labels) + 0.3 * tf.random.normal([960, 8])
dataset = tf.data.Dataset.from_tensor_slices((points, labels))
dataset = dataset.shard(hvd.size(), hvd.rank()).batch(32)

model = tf.keras.Sequential([tf.keras.layers.Dense(64, "relu"), tf.keras.layers.Dense(3)])
model.build([None, 8])
optimizer = tf.keras.optimizers.SGD(0.05 * hvd.size(), momentum=0.9)
loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@tf.function
def training_step(batch: tf.Tensor, target: tf.Tensor) -> tf.Tensor:
    """One step on this rank's batch; the gradients are those of all ranks."""
    with tf.GradientTape() as tape:
        loss = loss_of(target, model(batch, training=True))
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


for epoch in range(3):
    for number, (batch, target) in enumerate(dataset):
        loss = training_step(batch, target)
        if epoch == number == 0:
            hvd.broadcast_variables(model.variables, root_rank=0)
            hvd.broadcast_variables(optimizer.variables, root_rank=0)
    average = hvd.allreduce(loss)
    if hvd.rank() == 0:
        print(f"epoch {epoch}: loss {average.numpy():.4f}")
hvd.shutdown()
