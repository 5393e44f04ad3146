"""A server of the exports that are named, for `benchmarks.serving.serving`.

Beside each model it serves its echo, `NAME-echo`, which goes the same way but for the policy: what
comes in goes out. It prints the ports of HTTP and gRPC, and serves until SIGTERM.
"""

import sys
from functools import partial
from pathlib import Path

from tfpolicies.serving.access import Access
from tfpolicies.serving.calls import Answer, Call
from tfpolicies.serving.repository import Repository
from tfpolicies.serving.served import ServedModel
from tfpolicies.serving.server import Address, run


class Echo(ServedModel):
    """Answers with what it was given."""

    async def infer(self, call: Call) -> Answer:
        return Answer(self.version.name, call.inputs)


def main(paths: list[str]) -> None:
    folders = {Path(path).name: Path(path) for path in paths}
    folders |= {f"{name}-echo": folder for name, folder in folders.items()}
    repository = Repository(folders, say=lambda line: print(line, flush=True))
    for name, model in repository.models.items():
        if name.endswith("-echo"):
            model.__class__ = Echo
    address, access = Address(port=0, grpc_port=0), Access(control=True)
    say = partial(print, flush=True)
    run(repository, address, access, say, drain_seconds=0)


if __name__ == "__main__":
    main(sys.argv[1:])
