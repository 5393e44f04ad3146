"""Leaves out what needs the packages of a server, where they are not installed."""

import importlib.util

SERVING = ("orjson", "prometheus_client", "starlette", "tritonclient", "uvicorn")

collect_ignore_glob = (
    []
    if all(importlib.util.find_spec(name) for name in SERVING)
    else ["tfpolicies/serving/*", "tests/test_serving*"]
)
