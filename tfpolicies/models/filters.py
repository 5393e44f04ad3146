import tensorflow as tf


def normalize(x, mean, scale, clip=10.0):
    return tf.clip_by_value((x - mean) * scale, -clip, clip)


def filtered_leaves(space):
    return ()
