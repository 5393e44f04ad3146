"""Where ONNX Runtime runs exports: on the CPU, or on a GPU that is asked for."""

import numpy as np
import onnxruntime
import pytest
from gymnasium import spaces

from helpers.factories import make, rows_of
from tfpolicies import import_policy
from tfpolicies.cli import main
from tfpolicies.errors import UsageError
from tfpolicies.export import player
from tfpolicies.export.player import OnnxPolicy, get_providers, require_providers

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
IMAGES = spaces.Box(0, 255, (12, 12, 1), np.uint8)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    policy = make()
    folder = tmp_path_factory.mktemp("exports") / "policy"
    policy.export_model(folder, onnx=True)
    return policy, folder


@pytest.fixture
def without_cuda(monkeypatch):
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CPU])


@pytest.mark.core
def test_an_export_runs_on_the_providers_that_are_named(exported):
    policy, folder = exported
    obs = rows_of(policy.observation_space, 5)
    expected = policy.compute_actions(obs, explore=False).actions
    for values in (None, [CPU]):
        player = OnnxPolicy(folder, providers=values)
        assert player._model.session.get_providers() == [CPU]
        np.testing.assert_array_equal(player.act(obs), expected)
        imported = import_policy(folder, providers=values)
        np.testing.assert_array_equal(imported.compute_actions(obs).actions, expected)


@pytest.mark.core
def test_a_provider_that_is_missing_is_named_with_what_to_install(exported, without_cuda):
    _, folder = exported
    words = r"CUDAExecutionProvider.*pip uninstall onnxruntime.*pip install onnxruntime-gpu"
    with pytest.raises(ValueError, match=words):
        OnnxPolicy(folder, providers=[CUDA, CPU])
    with pytest.raises(UsageError, match=words):
        import_policy(folder, providers=[CUDA])
    with pytest.raises(ValueError, match="NoneExecutionProvider"):
        require_providers(["NoneExecutionProvider"])
    for wrong in (CPU, []):
        with pytest.raises(ValueError, match="must be a list of names"):
            require_providers(wrong)


@pytest.mark.core
def test_devices_are_lists_of_providers(monkeypatch, without_cuda):
    assert get_providers("cpu") == get_providers("auto") == [CPU]
    with pytest.raises(ValueError, match="onnxruntime-gpu"):
        get_providers("cuda")
    with pytest.raises(ValueError, match="cpu, cuda, auto"):
        get_providers("tpu")
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, CPU])
    assert [get_providers(x) for x in ("cpu", "cuda", "auto")] == [[CPU], [CUDA], [CUDA, CPU]]


@pytest.mark.core
def test_a_gpu_that_cannot_be_used_is_an_error_unless_the_cpu_will_do(exported, monkeypatch):
    _, folder = exported
    monkeypatch.setattr(player, "require_providers", lambda names: [*names])
    opened = player._open_session

    def without_gpu(model, threads, limited, providers=(CPU,)):
        return opened(model, threads, limited, [CPU])  # as ONNX Runtime does where CUDA fails

    monkeypatch.setattr(player, "_open_session", without_gpu)
    with pytest.raises(ValueError, match="could not start it"):
        OnnxPolicy(folder, providers=[CUDA])
    assert OnnxPolicy(folder, providers=[CUDA, CPU])._model.session.get_providers() == [CPU]


def test_providers_are_for_onnx_files_alone(tmp_path):
    make().export_model(tmp_path / "saved")
    with pytest.raises(UsageError, match="for ONNX files"):
        import_policy(tmp_path / "saved", providers=[CPU])


@pytest.mark.core
def test_the_player_says_on_the_command_line_what_is_missing(exported, without_cuda, capsys):
    _, folder = exported
    words = ["--model", str(folder), "--env", "CartPole-v1", "--device"]
    with pytest.raises(SystemExit) as ended:
        player.main([*words, "cuda"])
    assert "--device cuda" in str(ended.value)
    assert "onnxruntime-gpu" in str(ended.value)


@pytest.mark.serve
def test_the_server_says_on_the_command_line_what_is_missing(exported, without_cuda, capsys):
    _, folder = exported
    assert main(["serve", str(folder), "--device", "cuda"]) == 2
    assert "pip install onnxruntime-gpu" in capsys.readouterr().err


def test_triton_runs_convolutions_on_a_gpu_and_all_else_on_the_cpu(tmp_path):
    images = make(obs=IMAGES, model={"conv_filters": [[2, 4, 4], [2, 3, 1]]})
    for name, policy, kind in (("mlp", make(), "KIND_CPU"), ("cnn", images, "KIND_AUTO")):
        policy.export_model(tmp_path / name, onnx=True, layout="triton")
        config = (tmp_path / name / "config.pbtxt").read_text()
        assert f"instance_group {{ kind: {kind} }}" in config
