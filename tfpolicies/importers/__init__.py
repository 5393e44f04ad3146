"""Policies that act with imported third-party models."""
