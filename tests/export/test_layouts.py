"""Layouts for engines: what they read is there, whole, and does what the policy does."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
import tensorflow as tf
import yaml
from google.protobuf import text_format
from google.protobuf.empty_pb2 import Empty
from google.protobuf.unknown_fields import UnknownFieldSet
from gymnasium import spaces
from tensorflow.core.framework.tensor_pb2 import TensorProto

from helpers import factories
from helpers.diverged import make_diverged
from helpers.kubernetes_schemas import find_faults
from tfpolicies import __version__
from tfpolicies.cli import serve
from tfpolicies.cli.arguments import parse
from tfpolicies.errors import ExportError
from tfpolicies.export.formats import LAYOUTS
from tfpolicies.export.layouts.triton import START
from tfpolicies.program.runtimes.onnx import make_cpu_session

pytestmark = pytest.mark.usefixtures("kept_programs")

CAMERA = spaces.Box(0, 255, (4, 4, 1), np.uint8)
MIXED = spaces.Dict(camera=CAMERA, gear=spaces.Discrete(3), lamps=spaces.MultiBinary(2))
ACTIONS = spaces.Dict(move=spaces.Discrete(3), arm=spaces.Box(-2.0, 2.0, (2,), np.float32))
MEMORY = {"fcnet_hiddens": [4], "use_lstm": True, "lstm_cell_size": 4, "max_seq_len": 5}


@pytest.fixture(scope="module")
def mixed():
    return factories.varied(factories.make(obs=MIXED, actions=ACTIONS))


@pytest.fixture(scope="module")
def recurrent():
    return factories.varied(factories.make(model=MEMORY))


@pytest.fixture(params=["mixed", "recurrent"])
def policy(request):
    return request.getfixturevalue(request.param)


def fields(content):
    """Returns the numbers and contents of a message's fields, as Protocol Buffers reads them."""
    message = Empty()
    message.ParseFromString(content)
    return [(field.field_number, field.data) for field in UnknownFieldSet(message)]


def read_requests(folder):
    """Returns model, signature and inputs of each warm-up request, read by their field numbers."""
    path = folder / "assets.extra" / "tf_serving_warmup_requests"
    for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
        ((six, predict_log),) = fields(record)
        ((one, request),) = fields(predict_log)
        assert (six, one) == (6, 1)
        parts = fields(request)
        model = dict(fields(parts[0][1]))
        assert [number for number, _ in parts] == [1, *[2] * (len(parts) - 1)]
        inputs = {}
        for _, entry in parts[1:]:
            named = dict(fields(entry))
            inputs[named[1].decode()] = tf.make_ndarray(TensorProto.FromString(named[2]))
        yield model[1].decode(), model[3].decode(), inputs


def test_the_requests_that_warm_up_tensorflow_serving_run_on_the_model(policy, tmp_path):
    result = policy.export_model(tmp_path / "arm", layout="tf-serving")
    assert result.path == tmp_path / "arm" / "1"
    assert "--model_name=arm " in result.use
    signature = tf.saved_model.load(str(result.path)).signatures["serving_default"]
    sizes = []
    for model, name, inputs in read_requests(result.path):
        assert (model, name) == ("arm", "serving_default")
        outputs = signature(**{key: tf.constant(x) for key, x in inputs.items()})
        sizes.append(len(outputs["action_logp"]))
    assert sizes == [1, 8, 32, 128]


def read_config(folder):
    from tritonclient.grpc import model_config_pb2

    text = (folder / "config.pbtxt").read_text()
    return text_format.Parse(text, model_config_pb2.ModelConfig()), model_config_pb2


def shape_for_triton(value):
    return [axis.dim_value for axis in value.type.tensor_type.shape.dim[1:]]


def test_the_config_for_triton_says_of_each_tensor_what_the_graph_has(mixed, tmp_path):
    result = mixed.export_model(tmp_path / "arm", layout="triton")
    config, published = read_config(tmp_path / "arm")
    assert result.path == tmp_path / "arm" / "1"
    assert config.backend == "onnxruntime"
    assert config.max_batch_size == 256
    assert config.HasField("dynamic_batching")
    graph = onnx.load(str(result.path / "model.onnx")).graph
    for tensors, values in ((config.input, graph.input), (config.output, graph.output)):
        assert [tensor.name for tensor in tensors] == [value.name for value in values]
        for tensor, value in zip(tensors, values, strict=True):
            shape = shape_for_triton(value)
            assert list(tensor.dims) == (shape or [1])
            assert tensor.HasField("reshape") == (not shape)
            kind = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type).name
            name = published.DataType.Name(tensor.data_type).removeprefix("TYPE_")
            assert name.replace("FP", "FLOAT") == kind.upper()


def serve_as_triton(folder, requests):
    """Answers requests `(sequence, begins, observation)` as Triton does, several in one call."""
    config, _ = read_config(folder)
    batcher = config.sequence_batching
    (control,) = batcher.control_input
    session = make_cpu_session((folder / "1" / "model.onnx").read_bytes())
    kept: dict[str, dict[str, np.ndarray]] = {}
    for batch in requests:
        rows = []
        for name, begins, _ in batch:
            fresh = {s.input_name: np.full(s.dims, np.nan, np.float32) for s in batcher.state}
            rows.append(fresh if begins else kept[name])
        feed = {key: np.stack([row[key] for row in rows]) for key in rows[0]}
        feed["obs"] = np.stack([obs for _, _, obs in batch])
        values = control.control[0].int32_false_true
        feed[control.name] = np.array([[values[begins]] for _, begins, _ in batch], np.int32)
        names = [output.name for output in config.output]
        names += [state.output_name for state in batcher.state]
        outputs = dict(zip(names, session.run(names, feed), strict=True))
        for i, (name, _, _) in enumerate(batch):
            kept[name] = {s.input_name: outputs[s.output_name][i] for s in batcher.state}
        yield outputs["action_dist_inputs"]


def test_triton_keeps_the_memory_of_sequences_that_go_on_in_any_company(recurrent, tmp_path):
    recurrent.export_model(tmp_path / "walker", layout="triton")
    config, published = read_config(tmp_path / "walker")
    states = config.sequence_batching.state
    assert [x.input_name for x in states] == ["state_in_0", "state_in_1"]
    assert all(x.initial_state[0].zero_data and list(x.dims) == [4] for x in states)
    assert config.sequence_batching.HasField("oldest")
    assert [tensor.name for tensor in config.input] == ["obs"]
    kind = config.sequence_batching.control_input[0].control[0].kind
    start = published.ModelSequenceBatching.Control.CONTROL_SEQUENCE_START
    assert (config.sequence_batching.control_input[0].name, kind) == (START.name, start)

    seen = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    batches = [
        [("a", True, seen[0])],
        [("b", True, seen[1]), ("a", False, seen[2])],
        [("a", True, seen[3]), ("b", False, seen[4])],  # begins anew, with what is in its memory
    ]
    sequences = {"a": [0, 2], "b": [1, 4], "anew": [3]}
    answers = np.concatenate([*serve_as_triton(tmp_path / "walker", batches)])
    for steps in sequences.values():
        state = [x[None] for x in recurrent.get_initial_state()]
        for step in steps:
            _, state, extras = recurrent.compute_actions(seen[step][None], state, explore=False)
            expected = extras["action_dist_inputs"][0]
            np.testing.assert_allclose(answers[step], expected, atol=1e-6)


def test_a_second_export_for_triton_is_the_next_version(mixed, tmp_path):
    paths = [mixed.export_model(tmp_path / "arm", layout="triton").path.name for _ in range(2)]
    assert paths == ["1", "2"]
    spec = json.loads((tmp_path / "arm" / "2" / "policy_spec.json").read_text())
    model = (tmp_path / "arm" / "2" / "model.onnx").read_bytes()
    assert spec["sha256"] == {"model.onnx": hashlib.sha256(model).hexdigest()}
    assert (spec["artefact"], spec["layout"]) == ("onnx", "triton")


def test_the_settings_for_mlserver_describe_the_file_that_its_runtime_runs(policy, tmp_path):
    result = policy.export_model(tmp_path, layout="mlserver", onnx=15)
    assert result.path == tmp_path
    settings = json.loads((tmp_path / "model-settings.json").read_text())
    assert settings["implementation"] == "policy_runtime.PolicyRuntime"
    assert ("max_batch_size" in settings) == (not policy.is_recurrent())
    model = onnx.load(str(tmp_path / settings["parameters"]["extra"]["file"]))
    assert model.opset_import[0].version == 15
    graph = model.graph
    for message, values in ((settings["inputs"], graph.input), (settings["outputs"], graph.output)):
        assert [tensor["name"] for tensor in message] == [value.name for value in values]
        for tensor, value in zip(message, values, strict=True):
            axes = value.type.tensor_type.shape.dim
            assert tensor["shape"] == [-1 if x.dim_param else x.dim_value for x in axes]
            kind = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type).name
            assert tensor["datatype"].replace("FP", "FLOAT") == kind.upper()


def test_the_runtime_for_mlserver_imports_neither_tensorflow_nor_this_package(mixed, tmp_path):
    mixed.export_model(tmp_path, layout="mlserver")
    code = (tmp_path / "policy_runtime.py").read_text()
    names = re.findall(r"^\s*(?:from|import) (\w+)", code, re.MULTILINE)
    assert set(names) == {"__future__", "pathlib", "numpy", "onnxruntime", "mlserver"}


def test_a_service_of_kserve_runs_the_repository_beside_it_on_triton(policy, tmp_path):
    result = policy.export_model(tmp_path / "Arm_2", layout="kserve")
    service = yaml.safe_load((tmp_path / "Arm_2" / "inference_service.yaml").read_text())
    assert service["metadata"]["name"] == "arm-2"
    predictor = service["spec"]["predictor"]
    assert predictor["model"]["modelFormat"]["name"] == "triton"
    assert predictor["model"]["storageUri"] == "s3://YOUR-BUCKET/arm-2/models"
    assert predictor.get("maxReplicas") == (1 if policy.is_recurrent() else None)
    assert result.path == tmp_path / "Arm_2" / "models" / "arm-2" / "1"
    assert (result.path.parent / "config.pbtxt").exists()


def kubernetes_objects(folder):
    results = [*yaml.safe_load_all((folder / "kubernetes.yaml").read_text())]
    assert [find_faults(each) for each in results] == [[]] * len(results)
    return {each["kind"]: each for each in results}


def test_kubernetes_gets_a_deployment_that_its_schemas_know(policy, tmp_path):
    result = policy.export_model(tmp_path / "Arm_2", layout="kubernetes")
    assert result.path == tmp_path / "Arm_2"
    objects = kubernetes_objects(result.path)
    assert all(each["metadata"]["name"] == "arm-2" for each in objects.values())
    spec = objects["Deployment"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    labels = spec["template"]["metadata"]["labels"]
    service = objects["Service"]["spec"]
    assert spec["selector"]["matchLabels"] == labels == service["selector"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": 8000, "grpc": 8001}
    assert {port["targetPort"]: port["port"] for port in service["ports"]} == ports
    probes = {kind: container[f"{kind}Probe"]["httpGet"] for kind in ("readiness", "liveness")}
    assert probes["readiness"] == {"path": "/v2/health/ready", "port": "http"}
    assert probes["liveness"] == {"path": "/v2/health/live", "port": "http"}
    if policy.is_recurrent():
        assert spec["replicas"] == 1
        assert "HorizontalPodAutoscaler" not in objects
    else:
        assert "replicas" not in spec  # the autoscaler sets it
        target = objects["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
        assert target == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "arm-2"}
        assert "cpu" in container["resources"]["requests"]  # which its metric is a share of


def test_the_image_for_kubernetes_serves_the_files_beside_it_and_may_finish(mixed, tmp_path):
    mixed.export_model(tmp_path / "arm", layout="kubernetes")
    lines = (tmp_path / "arm" / "Dockerfile").read_text().splitlines()
    instructions = dict(line.split(" ", 1) for line in lines)
    _, *files, place = instructions["COPY"].split()
    assert all((tmp_path / "arm" / file).is_file() for file in files)
    assert {"model.onnx", "model_sample.onnx", "policy_spec.json"} == {*files}
    program, *words = json.loads(instructions["ENTRYPOINT"])
    args = parse(words)
    assert (program, args.sources, args.host) == ("tfpolicies", ["arm=/models/arm"], "0.0.0.0")
    assert (instructions["WORKDIR"], place) == ("/models/arm", "./")
    assert lines.index("WORKDIR /models/arm") < lines.index(f"COPY {instructions['COPY']}")  # else
    # --chmod is also the mode of the new folder, which could not be entered then
    assert instructions["RUN"].endswith(f"'tfpolicies-serve=={__version__}'")
    assert (args.port, args.grpc_port) == (8000, 8001)
    pod = kubernetes_objects(tmp_path / "arm")["Deployment"]["spec"]["template"]["spec"]
    probe = pod["containers"][0]["readinessProbe"]
    assert args.drain_seconds >= 2 * probe["periodSeconds"] * probe["failureThreshold"]
    assert pod["terminationGracePeriodSeconds"] >= args.drain_seconds + 40
    assert pod["securityContext"]["runAsUser"] == int(instructions["USER"].partition(":")[0])
    assert serve._find_or_make_export(tmp_path / "arm", tmp_path / "own") == tmp_path / "arm"


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (("spec", "replica"), "Deployment.spec.replica is unknown"),
        (("spec", "template", "spec", "containers"), "no list"),
        (("metadata", "name"), "Deployment.metadata.name: 1"),
    ],
)
def test_the_schemas_find_faults(change, fault, mixed, tmp_path):
    mixed.export_model(tmp_path / "arm", layout="kubernetes")
    deployment = next(yaml.safe_load_all((tmp_path / "arm" / "kubernetes.yaml").read_text()))
    place = deployment
    for name in change[:-1]:
        place = place[name]
    place[change[-1]] = 1
    assert re.search(fault, " ".join(find_faults(deployment)))
    del deployment["spec"]
    assert "Deployment.spec is missing" in find_faults(deployment)


def read_files(folder):
    return {str(x.relative_to(folder)): x.read_bytes() for x in folder.rglob("*") if x.is_file()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_policy_that_cannot_be_exported_leaves_the_folder_as_it_was(layout, tmp_path):
    with pytest.raises(ExportError, match="not finite"):
        make_diverged(factories.make()).export_model(tmp_path / "new" / "place", layout=layout)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("layout", "file"), [("triton", "config.pbtxt"), ("kserve", "inference_service.yaml")]
)
def test_files_go_back_where_the_version_cannot_be_placed(
    layout, file, mixed, tmp_path, monkeypatch
):
    mixed.export_model(tmp_path, layout=layout)
    (tmp_path / file).write_text("mine")
    before = read_files(tmp_path)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tfpolicies.export.layouts.triton.publish_version", full)
    with pytest.raises(ExportError, match="No space left"):
        mixed.export_model(tmp_path, layout=layout)
    assert read_files(tmp_path) == before


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"layout": "torchserve"}, r"layout must be one of \['tf-serving', 'triton'"),
        ({"layout": "tf-serving", "onnx": True}, r"onnx=True and layout='tf-serving' are two"),
        ({"layout": "triton", "litert": True}, r"layout='triton' and litert=True are two formats"),
        ({"litert": True, "onnx": 13}, r"onnx=13 and litert=True are two formats"),
        ({"layout": "triton", "web": True}, r"layout='triton' and web=True are two formats"),
        ({"litert": True, "web": True}, r"litert=True and web=True are two formats"),
        ({"litert": "int4"}, r"one of \['float32', 'float16', 'int8'\], got 'int4'"),
        ({"onnx": True, "observations": [[0.0]]}, "but litert is False"),
        ({"layout": "triton", "onnx": "13"}, "an integer from 11 to 18, got .13."),
    ],
)
def test_forms_that_contradict_each_other_are_refused(form, message, mixed, tmp_path):
    with pytest.raises(ExportError, match=message):
        mixed.export_model(tmp_path / "out", **form)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_command_line_knows_every_layout(layout):
    words = ["export", "run", "--to", "out", "--layout", layout]
    assert parse(words).layout == layout


def test_an_algorithm_hands_the_form_on(tmp_path, small_algorithm):
    result = small_algorithm.export_policy_model(tmp_path / "pole", layout="tf-serving")
    first = next(read_requests(result.path))
    assert first[2]["obs"].shape == (1, 4)


FORMS = {
    "SavedModel": {},
    "onnx": {"onnx": True},
    "web": {"web": True},
    "litert": {"litert": True},
    **{layout: {"layout": layout} for layout in LAYOUTS},
}
TOGETHER = {"SavedModel", "tf-serving", "onnx", "web"}
"""Forms that may lie in one folder: versions of a SavedModel, and the files of ONNX."""


@pytest.fixture(scope="module")
def exported(mixed, tmp_path_factory):
    """The folder of folders with an export of each form."""
    home = tmp_path_factory.mktemp("forms")
    for form, options in FORMS.items():
        mixed.export_model(home / form, **options)
    return home


@pytest.mark.parametrize("first", FORMS)
def test_forms_that_would_mix_in_one_folder_are_refused(exported, first, mixed):
    before = read_files(exported / first)
    for second, options in FORMS.items():
        if second != first and not {first, second} <= TOGETHER:
            with pytest.raises(ExportError, match=r"another format \(.*\).*a separate folder"):
                mixed.export_model(exported / first, **options)
    assert read_files(exported / first) == before


PARTS = {
    "SavedModel": ("1", "1/variables"),
    "tf-serving": ("1", "1/assets.extra"),
    "triton": ("1",),
    "kserve": ("models", "models/kserve", "models/kserve/1", "models/another"),
}


@pytest.mark.parametrize("first", PARTS)
def test_no_form_is_written_into_a_part_of_an_export(exported, first, mixed):
    before = read_files(exported / first)
    for part in PARTS[first]:
        for second, options in FORMS.items():
            if (second, part) in (("triton", "models/kserve"), ("triton", "models/another")):
                continue  # an entry of the repository
            written = "SavedModel" if second == "tf-serving" else second
            with pytest.raises(ExportError, match="a separate folder") as refused:
                mixed.export_model(exported / first / part, **options)
            named = str(refused.value).replace("saved_model", "SavedModel")
            assert written.replace("web", "onnx") in named
            assert first.replace("tf-serving", "SavedModel") in named
    assert read_files(exported / first) == before


def test_a_version_of_another_form_is_noticed_below_the_newest_number(exported, mixed, tmp_path):
    shutil.copytree(exported / "triton", tmp_path / "entry")
    (tmp_path / "entry" / "2").mkdir()
    with pytest.raises(ExportError, match=r"another format \(triton\), and saved_model would mix"):
        mixed.export_model(tmp_path / "entry")


@pytest.mark.parametrize(
    ("first", "second"),
    [*((form, form) for form in FORMS), ("SavedModel", "web"), ("onnx", "tf-serving")],
)
def test_a_form_again_and_versions_beside_files_go_into_the_same_folder(
    exported, first, second, mixed, tmp_path
):
    shutil.copytree(exported / first, tmp_path / first, symlinks=True)
    written = mixed.export_model(tmp_path / first, **FORMS[second])
    assert written.path.exists()
    assert mixed.export_model(tmp_path / first, **FORMS[first]).path.exists()


@pytest.mark.parametrize("content", ["{}", "[" * 100_000, '{"layout": null, "artefact": 3}', "x"])
def test_a_spec_that_tells_no_form_is_nobodys(content, mixed, tmp_path):
    (tmp_path / "policy_spec.json").write_text(content)
    assert mixed.export_model(tmp_path, onnx=True).path.exists()


def test_the_exports_of_the_page_can_be_made_as_they_stand_there(mixed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "howto" / "engines.md").read_text()
    (block,) = re.findall(r"```python\n(policy.export_model.*?)```", page, re.DOTALL)[:1]
    exec(block, {"policy": mixed})
    names = {"tf_serving", "triton", "mlserver", "kserve", "kubernetes"}
    assert {path.name for path in tmp_path.iterdir()} == names
