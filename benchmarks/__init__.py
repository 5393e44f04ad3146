"""Measurements of tfpolicies against its peers and against the bare environment."""
