"""A server of the exports that are named, for `benchmarks.serving.serving`.

Beside each model it serves its echo, `NAME-echo`, which goes the same way but for the policy: what
comes in goes out. It prints the ports of HTTP and gRPC, and serves until SIGTERM.
"""

import sys
from functools import partial
from pathlib import Path

from tfpolicies.serving.access import AccessRules
from tfpolicies.serving.infer_requests import InferRequest, InferResponse
from tfpolicies.serving.repository import ModelRepository
from tfpolicies.serving.served_model import ServedModel
from tfpolicies.serving.server import ServerAddress, run


class Echo(ServedModel):
    """Answers with what it was given."""

    async def infer(self, call: InferRequest) -> InferResponse:
        return InferResponse(self.version.name, call.inputs)


def main(paths: list[str]) -> None:
    folders = {Path(path).name: Path(path) for path in paths}
    folders |= {f"{name}-echo": folder for name, folder in folders.items()}
    repository = ModelRepository(folders, log=lambda line: print(line, flush=True))
    for name, model in repository.models.items():
        if name.endswith("-echo"):
            model.__class__ = Echo
    address, access = ServerAddress(port=0, grpc_port=0), AccessRules(control=True)
    say = partial(print, flush=True)
    run(repository, address, access, say, drain_seconds=0)


if __name__ == "__main__":
    main(sys.argv[1:])
