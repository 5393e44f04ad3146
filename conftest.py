"""Leaves out the doctests of what needs packages that are not installed here."""

import importlib.util

SERVING = ("orjson", "prometheus_client", "starlette", "tritonclient", "uvicorn")

collect_ignore_glob = (
    [] if all(importlib.util.find_spec(name) for name in SERVING) else ["tfpolicies/serving/*"]
)
