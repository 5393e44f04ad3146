"""The workers of a run, in this process or in others."""
