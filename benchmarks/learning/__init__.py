"""Whole training runs beside Stable-Baselines3 and SBX, with the same hyperparameters."""
