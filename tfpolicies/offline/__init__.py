"""Recorded experience: reads and writes tables of steps."""

from tfpolicies.offline.experience_io import ExperienceReader, ExperienceWriter, IOContext
from tfpolicies.offline.input_registry import register_input

__all__ = ["ExperienceReader", "ExperienceWriter", "IOContext", "register_input"]
