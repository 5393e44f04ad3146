"""Tensor code of a Program: networks, distributions, preprocessing."""
