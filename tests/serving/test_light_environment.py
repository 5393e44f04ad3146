"""The distribution `tfpolicies-serve`, in an environment with nothing but what it depends on."""

import importlib.metadata
import json
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet as pq
import pytest

from helpers.serving import HOME, Server, export, inputs_of, policy_of, without_python_path
from helpers.serving_clients import CLIENTS, ask, compute_outputs, make_client
from tfpolicies.errors import UsageError
from tfpolicies.system.installed_distributions import check_same_version

pytestmark = [pytest.mark.serve, pytest.mark.usefixtures("kept_programs")]

LACKING = ["tensorflow", "keras", "gymnasium", "rich", "onnx", "tf2onnx", "matplotlib", "h5py"]
LACKING += ["cloudpickle", "tensorboard", "pyarrow"]


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The interpreter of an environment where the distribution is installed."""
    folder = tmp_path_factory.mktemp("environment")
    uv, result = [sys.executable, "-m", "uv", "-q"], folder / "bin" / "python"
    subprocess.run([*uv, "venv", "--python", sys.executable, "--clear", folder], check=True)
    install = ["pip", "install", "--python", result, HOME / "distributions" / "serve"]
    subprocess.run([*uv, *install], check=True, env=without_python_path())
    return result


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    home = tmp_path_factory.mktemp("exports")
    policies = {kind: policy_of(kind) for kind in ("mlp", "mixed")}
    return {kind: (policy, export(policy, home / kind)) for kind, policy in policies.items()}


def run(python, *words, folder, **variables):
    """Runs an interpreter of the environment; returns how it ended and all that it said."""
    done = subprocess.run(
        [python, *map(str, words)],
        cwd=folder,
        env={**without_python_path(), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def command(python, *words, folder, **variables):
    return run(python, "-m", "tfpolicies", *words, folder=folder, **variables)


def test_nothing_else_is_installed(python, tmp_path):
    code = (
        "import importlib.util, json, tfpolicies; from importlib.metadata import distribution as d;"
        f"found = [x for x in {LACKING} if importlib.util.find_spec(x)];"
        "print(json.dumps([found, tfpolicies.__file__, d('tfpolicies-serve').requires]))"
    )

    _, said = run(python, "-c", code, folder=tmp_path)

    result, place, requires = json.loads(said)
    assert result == []
    assert Path(place).is_relative_to(python.parent.parent)
    config = ConfigParser(interpolation=None)
    config.read(HOME / "setup.cfg")
    needed = config["options"]["install_requires"].split()
    base = [x for x in needed if x.startswith(("numpy", "onnxruntime", "psutil"))]
    serve = config["options.extras_require"]["serve"].split()
    assert [x for x in requires if "extra" not in x] == [*base, *serve]


def test_it_serves_what_policies_do_over_http_and_grpc(python, exports, tmp_path):
    folders = [str(folder) for _, folder in exports.values()]
    with Server(*folders, folder=tmp_path, python=python) as server:
        for kind, (policy, _) in exports.items():
            arrays = inputs_of(policy, 5)
            for protocol in CLIENTS:
                outputs, _ = ask(make_client(server, protocol), kind, arrays)
                for name, array in compute_outputs(policy, arrays).items():
                    np.testing.assert_allclose(outputs[name], array, atol=1e-5)
        assert server.end() == 0


def test_help_and_version_need_nothing_more(python, tmp_path):
    status, said = command(python, "--help", folder=tmp_path)
    assert (status, "serve exported policies" in said) == (0, True), said
    status, said = command(python, "--version", folder=tmp_path)
    assert (status, said) == (0, f"tfpolicies {importlib.metadata.version('tfpolicies')}\n")
    status, said = command(python, "serve", "--help", folder=tmp_path)
    assert (status, "--drain-seconds" in said) == (0, True), said
    assert command(python, "port", "--help", folder=tmp_path)[0] == 0


@pytest.mark.parametrize(
    "words",
    ["train CartPole-v1", "evaluate runs", "play-exported x --env CartPole-v1", "import-rllib x y"],
)
def test_commands_that_need_more_say_what_to_install(python, tmp_path, words):
    status, said = command(python, *words.split(), folder=tmp_path)

    assert status == 2, said
    assert f"`tfpolicies {words.split()[0]}` needs the package " in said
    assert "tfpolicies-serve only serves exports" in said
    assert "pip install tfpolicies==" in said
    assert "Traceback" not in said


def test_names_that_need_more_say_what_to_install(python, tmp_path):
    _, said = run(python, "-c", "import tfpolicies; tfpolicies.PPOConfig", folder=tmp_path)

    assert "tfpolicies.PPOConfig needs the package " in said
    assert "tfpolicies-serve only serves exports; tfpolicies depends on TensorFlow" in said


def test_a_run_is_not_exported_there(python, tmp_path):
    (tmp_path / "runs" / "a").mkdir(parents=True)

    status, said = command(python, "serve", "runs/a", folder=tmp_path)

    assert status == 2
    assert "runs/a is not an ONNX export, and exporting a run needs TensorFlow" in said
    assert "`tfpolicies export RUN --to DIR --onnx`" in said


def test_python_code_acts_with_an_export(python, exports, tmp_path):
    policy, folder = exports["mlp"]
    obs = inputs_of(policy, 4)["obs"]
    code = (
        "from tfpolicies.export.player import OnnxPolicy; import numpy as np;"
        f"print(OnnxPolicy({str(folder)!r}).act(np.array({obs.tolist()}, 'float32')).tolist())"
    )

    _, said = run(python, "-c", code, folder=tmp_path)

    assert json.loads(said) == policy.predict(obs).tolist()


def test_predict_needs_only_pyarrow_besides(python, exports, tmp_path):
    policy, folder = exports["mlp"]
    obs = inputs_of(policy, 4)["obs"]
    pq.write_table(pyarrow.table({"obs": obs.tolist()}), tmp_path / "rows.parquet")

    status, said = command(python, "predict", folder, "rows.parquet", folder=tmp_path)
    assert (status, "pip install 'tfpolicies-serve[data]'" in said) == (2, True), said

    added = tmp_path / "added"
    added.mkdir()
    (added / "pyarrow").symlink_to(Path(pyarrow.__file__).parent)
    words = ("predict", folder, "rows.parquet")
    status, said = command(python, *words, folder=tmp_path, PYTHONPATH=str(added))
    assert status == 0, said
    actions = pq.read_table(tmp_path / "rows.actions.parquet")["action"].to_pylist()
    assert actions == policy.predict(obs).tolist()


def test_two_versions_in_one_environment_are_refused_with_the_way_out(tmp_path, monkeypatch):
    for name, version in (("tfpolicies", "2.0"), ("tfpolicies_serve", "1.9")):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        name = name.replace("_", "-")
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    with pytest.raises(UsageError, match=r"tfpolicies 2\.0 and tfpolicies-serve 1\.9 are both"):
        check_same_version()
