"""Strategies that turn a policy's distribution and noise into actions."""
