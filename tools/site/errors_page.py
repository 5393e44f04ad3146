"""The reference of errors, from their classes."""

from __future__ import annotations

import inspect

from tfpolicies import errors

_INTRODUCTION = """# Errors

All errors of this package are subclasses of `tfpolicies.errors.TfPoliciesError`. Each is also one
of Python's errors, so code that catches those keeps working. A message names the argument, the
rule, the value and the next step.

| error | is also | when |
|---|---|---|
"""


def make_errors_page() -> dict[str, str]:
    """Returns the page by its path in the site's source."""
    classes = [
        item
        for _, item in inspect.getmembers(errors, inspect.isclass)
        if issubclass(item, errors.TfPoliciesError) and item.__module__ == errors.__name__
    ]
    classes.sort(key=lambda item: inspect.getsourcelines(item)[1])
    return {"reference/errors.md": _INTRODUCTION + "".join(map(_make_row, classes))}


def _make_row(error: type) -> str:
    bases = [base for base in error.__bases__ if base not in (errors.TfPoliciesError, Exception)]
    parents = ", ".join(f"`{base.__name__}`" for base in bases)
    summary = (inspect.getdoc(error) or "").partition("\n\n")[0].replace("\n", " ")
    return f"| `{error.__name__}` | {parents} | {summary} |\n"
