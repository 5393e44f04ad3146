"""Exported policies in Chromium: offline, with the policy's own actions, and a pole that stays up.

`tests/browser/prepare.sh FOLDER` installs the tools; set `BROWSER_TOOLS=FOLDER` to use them.
`tox -e browser` does both.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import gymnasium as gym
import numpy as np
import onnx
import pytest
from gymnasium import spaces

from helpers import factories
from helpers.chromium import served
from helpers.onnx_graphs import disguise
from tfpolicies import DQNTF2Policy
from tfpolicies.export import web
from tfpolicies.export.verify import draw_observations
from tfpolicies.models.spaces import unflatten

pytestmark = [pytest.mark.browser, pytest.mark.usefixtures("kept_programs")]

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[1] / "examples" / "cartpole_in_the_browser"
CARTPOLE = gym.make("CartPole-v1")
CAMERA = spaces.Box(0, 255, (10, 10, 2), np.uint8)
PARTS = spaces.Dict(
    camera=CAMERA,
    pair=spaces.Tuple([spaces.Discrete(3, start=-1), spaces.MultiDiscrete([2, 4])]),
    speed=spaces.Box(-np.inf, np.inf, (2,), np.float32),
)
CHOICES = spaces.Dict(
    gas=spaces.Box(0.0, 3.0, (2,)), keys=spaces.MultiBinary(3), move=spaces.Discrete(3, start=1)
)
MASKED = spaces.Dict(action_mask=spaces.MultiBinary(5), observations=factories.OBS)
LSTM = {"use_lstm": True, "lstm_cell_size": 8, "fcnet_hiddens": [8]}
PREVIOUS = {"lstm_use_prev_action": True, "lstm_use_prev_reward": True}
CONV = {"conv_filters": [[4, [4, 4], 2], [8, [5, 5], 1]]}
POLICIES = {
    "mlp": lambda: factories.make(obs=CARTPOLE.observation_space),
    "box": lambda: factories.make(actions=spaces.Box(-2.0, 2.0, (2,))),
    "dict": lambda: factories.make(obs=PARTS, actions=CHOICES),
    "mask": lambda: factories.make(obs=MASKED, actions=spaces.Discrete(5)),
    "masks": lambda: factories.make(obs=MASKED, actions=spaces.MultiDiscrete([2, 3])),
    "cnn": lambda: factories.make(obs=CAMERA, actions=spaces.Discrete(6), model=CONV),
    "dqn": lambda: factories.make(DQNTF2Policy),
    "lstm": lambda: factories.make(model={**LSTM, **PREVIOUS}, actions=spaces.Discrete(3)),
}

PAIR = "{{camera: Array(200).fill(0), pair: [{}, [0, {}]], speed: [0, 0]}}"
MASK = "{{action_mask: [{}], observations: [0, 0, 0]}}"
READY = "!document.querySelector('main').hidden || !document.getElementById('fault').hidden"
LOAD = """
    const { Policy } = await import("./policy.js");
    const policy = await Policy.load("model.onnx");
"""
DECIDE = """
    const results = [];
    for (const [obs, reward] of given) {
        const { action, value } = await policy.decide(obs, { reward });
        results.push([action, value]);
    }
    return results;
"""


@pytest.fixture(scope="module")
def dist(browser_tools):
    return browser_tools / "node_modules" / "onnxruntime-web" / "dist"


@pytest.fixture(scope="module")
def exported(tmp_path_factory, dist):
    """Gives a policy by name, and the address of its page, which needs nothing from elsewhere."""
    root, made = tmp_path_factory.mktemp("pages"), {}

    def export(name):
        if name not in made:
            made[name] = factories.varied(POLICIES[name]())
            made[name].export_model(root / name, web=True, ort_web=dist)
        return made[name], f"{address}{name}/"

    with served(root) as address:
        yield export


def plain(x):
    """Returns an observation as JSON has it."""
    if isinstance(x, dict):
        return {key: plain(part) for key, part in x.items()}
    return [plain(part) for part in x] if isinstance(x, tuple) else np.asarray(x).tolist()


def observations(policy, count):
    """Draws observations as an environment gives them, one after the other."""
    rng = np.random.default_rng(0)
    ports = policy.program.ports
    leaves = draw_observations(policy.program.spec.obs_leaves, count, rng)
    rows = [[leaf[i] for leaf in leaves] for i in range(count)]
    if any(ports.is_mask):
        for row in rows:
            row[0][:] = rng.random(5) < 0.6
            row[0][rng.integers(2)] = row[0][rng.integers(2, 5)] = 1
    return [unflatten(policy.observation_space, row) for row in rows]


def test_the_pinned_hashes_are_those_of_the_package(dist):
    results = {
        part: web.compute_integrity(dist / name) for part, name in web._RUNTIME_FILES.items()
    }
    assert results == web._PINNED_INTEGRITY
    package = json.loads((dist.parent / "package.json").read_text())
    assert f"{package['name']}@{package['version']}" == web.RUNTIME


@pytest.mark.parametrize("name", POLICIES)
def test_a_page_acts_offline_and_complains_of_nothing(chromium, exported, name):
    policy, url = exported(name)
    chromium.do("open", url=url, width=390, height=844)
    chromium.do("wait", until=READY)
    chromium.do("click", at="#random")
    if policy.is_recurrent():
        chromium.do("click", at="#act")
    chromium.do("wait", until="document.querySelectorAll('#action .track').length > 0")
    chromium.do("click", at=".modes label:last-child")
    chromium.do("click", at="#act")
    chromium.do("wait", until="document.querySelectorAll('#action .track').length > 0")
    assert chromium.do("run", script="return document.title").startswith(type(policy).__name__)
    assert "agreed with the policy on" in chromium.do("text", at="#about")
    assert chromium.do("run", script="return document.getElementById('fault').hidden")
    assert chromium.do("run", script="return document.body.scrollWidth") <= 390
    assert chromium.do("complaints") == []


@pytest.mark.parametrize("name", POLICIES)
def test_actions_are_the_policys_own(chromium, exported, name):
    policy, url = exported(name)
    seen = observations(policy, 100)
    rewards = np.linspace(-1.0, 1.0, 100).tolist()
    chromium.do("open", url=url)
    steps = [[plain(obs), reward] for obs, reward in zip(seen, rewards, strict=True)]
    result = chromium.do("run", script=LOAD + DECIDE, given=steps)
    session = policy.session()
    for obs, reward, (action, value) in zip(seen, rewards, result, strict=True):
        earned = reward if name == "lstm" else None
        assert_same(action, plain(session.act(obs, earned, explore=False)))
        if name not in ("lstm", "dqn"):
            extras = policy.compute_single_action(obs, explore=False)[2]
            assert value == pytest.approx(extras["vf_preds"], rel=1e-4, abs=1e-5)


def assert_same(actual, expected):
    if isinstance(expected, dict):
        assert list(actual) == list(expected)
        for key, part in expected.items():
            assert_same(actual[key], part)
    else:
        np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5)


def test_probabilities_and_spreads_are_those_of_the_distribution(chromium, exported):
    policy, url = exported("dict")
    (obs,) = observations(policy, 1)
    chromium.do("open", url=url)
    script = f"{LOAD} return (await policy.decide(given)).parts;"
    parts = chromium.do("run", script=script, given=plain(obs))
    inputs = policy.compute_single_action(obs, explore=False)[2]["action_dist_inputs"]
    mean, std = inputs[:2], np.exp(inputs[2:4])
    ends = np.clip(np.stack([mean - std, mean + std], axis=-1) * 1.5 + 1.5, 0.0, 3.0)
    logits = np.exp(inputs[7:10])
    np.testing.assert_allclose(parts[0]["spreads"], ends, atol=1e-5)
    np.testing.assert_allclose(parts[1]["probabilities"], 1 / (1 + np.exp(-inputs[4:7])), atol=1e-5)
    np.testing.assert_allclose(parts[2]["probabilities"][0], logits / logits.sum(), atol=1e-5)


def test_sampled_actions_are_as_frequent_as_their_probabilities(chromium, exported):
    _, url = exported("mlp")
    chromium.do("open", url=url)
    script = """
        const [ones, obs] = [[], [0.1, 0.2, 0.1, -0.3]];
        for (let i = 0; i < 2000; i++) ones.push(await policy.act(obs, { sample: true }));
        const { parts } = await policy.decide(obs);
        return [ones.reduce((a, b) => a + b) / ones.length, parts[0].probabilities[0][1]];
    """
    share, probability = chromium.do("run", script=LOAD + script)
    assert abs(share - probability) < 0.05  # more than four standard deviations
    assert 0.05 < probability < 0.95


def test_calls_that_overlap_are_steps_in_their_order_and_reset_forgets(chromium, exported):
    policy, url = exported("lstm")
    seen = [plain(obs) for obs in observations(policy, 12)]
    script = """
        const told = (step) => [step.action, step.logp];
        const together = (await Promise.all(given.map((obs) => policy.decide(obs)))).map(told);
        policy.reset();
        const again = [];
        for (const obs of given) again.push(told(await policy.decide(obs)));
        return [together, again, told(await policy.decide(given[0])), policy.remembers];
    """
    chromium.do("open", url=url)
    together, again, later, remembers = chromium.do("run", script=LOAD + script, given=seen)
    assert together == again
    assert later != again[0]
    assert remembers


@pytest.mark.parametrize(
    ("name", "obs", "words"),
    [
        ("mlp", "[1, 2]", "The observation must have 4 numbers, got 2"),
        ("mlp", "[0, 0, NaN, 0]", "The observation must be numbers, got NaN"),
        ("mlp", "null", "The observation is missing"),
        ("cnn", "Array(200).fill(256)", "The observation must fit uint8, got 256"),
        ("dict", PAIR.format(-2, 3), "part pair/0 must be from -1 to 1, got -2"),
        ("dict", PAIR.format(1, 4), "part pair/1 must be from 0 to 3, got 4"),
        ("mask", MASK.format("0, 0, 0, 0, 0"), "mask allows no action in its columns 0 to 4"),
        ("masks", MASK.format("0, 1, 0, 0, 0"), "mask allows no action in its columns 2 to 4"),
    ],
)
def test_a_wrong_observation_is_named_and_the_next_one_is_answered(
    chromium, exported, name, obs, words
):
    policy, url = exported(name)
    (good,) = observations(policy, 1)
    chromium.do("open", url=url)
    script = f"""
        const fault = await policy.act({obs}).catch((error) => error.message);
        return [fault, await policy.act(given)];
    """
    fault, action = chromium.do("run", script=LOAD + script, given=plain(good))
    assert words in fault
    assert_same(action, plain(policy.session().act(good, explore=False)))


def test_a_typed_number_changes_the_bars_and_an_empty_field_is_told(chromium, exported):
    _, url = exported("mlp")
    chromium.do("open", url=url)
    chromium.do("wait", until=READY)
    numbers = "return [...document.querySelectorAll('#action .number')].map((x) => x.innerText)"
    before = json.dumps(chromium.do("run", script=numbers), separators=(",", ":"))
    chromium.do("fill", at="#observation input[type=number]", text="3.5")
    now = f"JSON.stringify((() => {{ {numbers} }})())"
    chromium.do("wait", until=f"{now} !== {json.dumps(before)}")
    chromium.do("fill", at="#observation input[type=number]", text="")
    chromium.do("wait", until="!document.getElementById('fault').hidden")
    assert "must be numbers, got NaN" in chromium.do("text", at="#fault")
    chromium.do("click", at="#blank")
    chromium.do("wait", until="document.getElementById('fault').hidden")


def test_a_page_filled_at_random_always_has_an_action(chromium, exported):
    _, url = exported("masks")
    chromium.do("open", url=url)
    chromium.do("wait", until=READY)
    script = """
        for (let i = 0; i < 40; i++) {
            document.getElementById("random").click();
            await new Promise((done) => setTimeout(done, 20));
            if (!document.getElementById("fault").hidden) return i;
        }
        return "never";
    """
    assert chromium.do("run", script=script) == "never"


def test_what_a_cdn_serves_is_run_only_if_it_is_the_pinned_file(chromium, dist, tmp_path, exported):
    policy, _ = exported("mlp")
    policy.export_model(tmp_path / "page", web=True)
    start = f"https://cdn.jsdelivr.net/npm/{web.RUNTIME}/dist/"
    with served(tmp_path / "page") as url:
        chromium.do("open", url=url, elsewhere={start: str(dist)})
        chromium.do("wait", until=READY)
        assert chromium.do("text", at="#title") == "PPOTF2Policy"
        assert chromium.do("complaints") == []
        for part, name in web._RUNTIME_FILES.items():
            other = tmp_path / part
            other.mkdir()
            for file in web._RUNTIME_FILES.values():
                shutil.copy(dist / file, other)
            (other / name).write_bytes((dist / name).read_bytes() + b"\n")
            chromium.do("open", url=url, elsewhere={start: str(other)})
            chromium.do("wait", until=READY)
            fault = chromium.do("text", at="#fault")
            assert f"{start}{name} cannot be loaded, or is not the file" in fault


@pytest.fixture
def page(tmp_path, dist):
    factories.make().export_model(tmp_path / "page", web=True, ort_web=dist)
    return tmp_path / "page"


@pytest.fixture
def read_fault(chromium, page):
    """Returns a function that opens the page and returns the fault that it shows."""
    with served(page) as url:

        def open_page():
            chromium.do("open", url=url)
            chromium.do("wait", until=READY)
            return chromium.do("text", at="#fault")

        yield open_page


def test_a_model_that_the_spec_does_not_describe_is_not_run(page, read_fault):
    content = (page / "model.onnx").read_bytes()
    (page / "model.onnx").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "model.onnx cannot be loaded, or is not the file" in read_fault()


def of_another_domain(content):
    model = onnx.load_from_string(content)
    body = onnx.helper.make_graph(
        [onnx.helper.make_node("Gelu", ["obs"], ["x"], domain="com.microsoft")], "body", [], []
    )
    model.graph.node.append(onnx.helper.make_node("If", ["obs"], ["x"], then_branch=body))
    return model.SerializeToString()


def with_other_file(content):
    model = onnx.load_from_string(content)
    model.graph.initializer[0].external_data.add(key="location", value="secret.bin")
    return model.SerializeToString()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (disguise, "model.onnx is in the format of ONNX Runtime"),
        (of_another_domain, 'model.onnx has operators of "com.microsoft"'),
        (with_other_file, "model.onnx has weights in other files"),
        (lambda content: content[:-1], "model.onnx is damaged"),
    ],
)
def test_a_model_that_the_server_refuses_is_not_run(page, read_fault, change, words):
    content = change((page / "model.onnx").read_bytes())
    (page / "model.onnx").write_bytes(content)
    spec = json.loads((page / "policy_spec.json").read_text())
    spec["sha256"]["model.onnx"] = hashlib.sha256(content).hexdigest()
    (page / "policy_spec.json").write_text(json.dumps(spec))
    assert words in read_fault()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"files": {"serving_default": "../model.onnx"}}, "which is not a file in its folder"),
        ({"files": {"serving_default": "//evil.example/model.onnx"}}, "not a file in its folder"),
        ({"noise": {"blocks": [["gumbel", 2_000_000]]}}, "noise of [2000000] numbers"),
        ({"noise": {"blocks": [["gumbel", -1], ["normal", 3]]}}, "each must be at least 0"),
        ({"noise": {"blocks": [["cauchy", 2]]}}, "noise of the kind cauchy"),
        ({"noise": {"blocks": [["gumbel", 900_000]]}}, "but the input takes 2"),
        ({"views": [{"name": "a", "inputs": [], "shifts": [1]}]}, "a view of the steps 1"),
    ],
)
def test_a_spec_that_the_server_refuses_is_not_followed(page, read_fault, change, words):
    path = page / "policy_spec.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert words in read_fault()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shape": ["batch", 10**6, 10**6]}, "1000000000000 numbers"),
        ({"dtype": "complex64"}, 'arrays of "complex64"'),
    ],
)
def test_a_spec_with_arrays_that_no_policy_has_is_not_followed(page, read_fault, change, words):
    path = page / "policy_spec.json"
    spec = json.loads(path.read_text())
    spec["signatures"]["serving_default"]["inputs"][0] |= change
    path.write_text(json.dumps(spec))
    assert words in read_fault()


# -- the example ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def balancing(tmp_path_factory, dist):
    """The folder of the example, with weights by hand that follow the pole."""
    folder = tmp_path_factory.mktemp("cartpole")
    model = {"fcnet_hiddens": [], "vf_share_layers": True}
    policy = factories.make(obs=CARTPOLE.observation_space, model=model)
    weights = policy.get_weights()
    for name, array in weights.items():
        if array.shape == (4, 2):
            right = np.float32([0.1, 0.35, 5.0, 1.0])
            weights[name] = np.stack([-right, right], axis=1)
        elif array.shape == (2,):
            weights[name] = np.zeros(2, np.float32)
    policy.set_weights(weights)
    policy.export_model(folder, web=True, ort_web=dist)
    for name in ("cartpole.html", "cartpole.js", "play.js"):
        shutil.copy(EXAMPLE / name, folder)
    return folder


def test_the_physics_are_those_of_gymnasium(chromium, balancing):
    env = gym.make("CartPole-v1").unwrapped
    env.reset(seed=3)
    start = env.state.tolist()
    actions = np.random.default_rng(0).integers(2, size=60).tolist()
    script = """
        const { CartPole } = await import("./cartpole.js");
        const world = Object.assign(new CartPole(), { state: given.start });
        return given.actions.map((action) => [world.step(action), world.isOver]);
    """
    with served(balancing) as url:
        chromium.do("open", url=f"{url}cartpole.html")
        result = chromium.do("run", script=script, given={"start": start, "actions": actions})
    fallen = False
    for action, (state, is_over) in zip(actions, result, strict=True):
        if fallen:
            break
        _, _, fallen, _, _ = env.step(action)
        np.testing.assert_allclose(state, env.state, rtol=0, atol=1e-12)
        assert is_over == fallen
    assert fallen


def test_the_pole_stays_up_for_500_steps_and_falls_when_it_is_pushed(chromium, balancing):
    steps = "Number(document.getElementById('steps').innerText)"
    with served(balancing) as url:
        chromium.do("open", url=f"{url}cartpole.html")
        chromium.do("wait", until=f"{steps} >= 500")
        assert chromium.do("text", at="#verdict") == "Solved, and still going"
        chromium.do("click", at="#pause")
        chromium.do("click", at="#again")
        chromium.do("wait", until=f"{steps} === 0")
        chromium.do("click", at="#pause")
        push = "document.getElementById('push-right').click();"
        falling = "document.getElementById('verdict').innerText.startsWith('It fell')"
        chromium.do("wait", until=f"() => {{ {push} return {falling}; }}")
        assert chromium.do("complaints") == []
