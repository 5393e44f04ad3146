"""Fluent configuration with frozen, validated sections."""
