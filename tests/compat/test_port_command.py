"""Changes of imports in scripts for RLlib, and the command `tfpolicies port`."""

import runpy
import stat

import pytest

import tfpolicies
from tfpolicies import compat
from tfpolicies.cli import main
from tfpolicies.compat.port import port_script
from tfpolicies.compat.rllib_names import ALTERNATIVES, MODULES, REPLACEMENTS
from tfpolicies.errors import UsageError


def port(text):
    return port_script(text.encode()).source.decode()


def get_unchanged(text):
    return [remark.name for remark in port_script(text.encode()).remarks]


@pytest.mark.parametrize(
    ("text", "old", "new"),
    [
        ("from HERE import PPO, PPOConfig as C  # both", "ray.rllib.algorithms.ppo", "tfpolicies"),
        (
            "from  HERE  import (  # noqa: F401\n  SampleBatch ,# rows\n)",
            "ray.rllib.policy.sample_batch",
            "tfpolicies",
        ),
        (
            "HERE EnvContext, \\\n    VectorEnv as V",
            "from ray.rllib.env import MultiAgentEnv, \\\n   ",
            "from tfpolicies import MultiAgentEnv\nfrom tfpolicies.compat import",
        ),
        (
            "import HERE as ppo, os\nppo.PPOConfig()",
            "ray.rllib.algorithms.ppo",
            "tfpolicies.algorithms.ppo",
        ),
        ("from HERE import dqn as q\nq.DQN", "ray.rllib.algorithms", "tfpolicies.algorithms"),
        ("import HERE as ppo\nppo.PPOTrainer()", "ray.rllib.agents.ppo", "tfpolicies.compat"),
        (
            "from HERE\nppo.PPOTrainer()",
            "ray.rllib.agents import ppo",
            "tfpolicies import compat as ppo",
        ),
        ("from HERE import tune\nprint(tune)", "ray", "tfpolicies.compat"),
        ("import HERE as t", "ray.tune", "tfpolicies.compat.tune"),
        (
            "from HERE, tune\nair.RunConfig()",
            "ray import air",
            "tfpolicies.compat import tune as air",
        ),
        ("from HERE", "ray import air", "tfpolicies.compat import tune as air"),
        ("import HERE as a\na.FailureConfig", "ray.air", "tfpolicies.compat.tune"),
        (
            "from HERE\ntrain.report({})\ntrain.get_context()",
            "ray import train",
            "tfpolicies.compat import tune as train",
        ),
        (
            "from ray.tune import grid_searchHERE Tuner",
            ",",
            "\nfrom tfpolicies.compat.tune import",
        ),
        (
            "if a: from HERE MultiAgentEnv; print(1)",
            "ray.rllib.env import EnvContext,",
            "tfpolicies.compat import EnvContext; from tfpolicies import",
        ),
    ],
)
def test_an_import_changes_its_module_and_nothing_else(text, old, new):
    assert port(text.replace("HERE", old)) == text.replace("HERE", new)
    assert get_unchanged(text.replace("HERE", old)) == []


def test_names_of_several_modules_keep_the_comments_next_to_them():
    old = """\
from ray.rllib.env import (  # noqa: F401
    # what is given to creators
    EnvContext,  # with an index
    MultiAgentEnv,
    # of many
    VectorEnv as Many,  # (in one)
    ExternalEnv,
)  # the end
"""
    new = """\
from tfpolicies.compat import (  # noqa: F401
    # what is given to creators
    EnvContext,  # with an index
    # of many
    VectorEnv as Many,  # (in one)
)
from tfpolicies import (  # noqa: F401
    MultiAgentEnv,
)
from ray.rllib.env import (  # noqa: F401
    ExternalEnv,
)  # the end
"""
    assert port(old) == new
    assert get_unchanged(old) == ["ray.rllib.env.ExternalEnv"]
    one_line = "from ray.rllib.env import (EnvContext, MultiAgentEnv, ExternalEnv,)"
    assert port(one_line).splitlines() == [
        "from tfpolicies.compat import (EnvContext)",
        "from tfpolicies import (MultiAgentEnv)",
        "from ray.rllib.env import (ExternalEnv,)",
    ]


def test_imports_in_functions_and_conditions_are_changed_in_place():
    old = '''\
try:
    from ray.rllib.env import EnvContext, MultiAgentEnv
except ImportError:
\tfrom ray.rllib.policy import Policy

def make():
    """Makes one."""
    from ray.rllib.algorithms.sac import SACConfig

    return SACConfig()
'''
    new = '''\
try:
    from tfpolicies.compat import EnvContext
    from tfpolicies import MultiAgentEnv
except ImportError:
\tfrom tfpolicies import Policy

def make():
    """Makes one."""
    from tfpolicies import SACConfig

    return SACConfig()
'''
    assert port(old) == new


@pytest.mark.parametrize(
    "source",
    [
        b"\xef\xbb\xbffrom ray.rllib.policy import Policy\r\nx = '\xc3\xa9'\r\n",
        b"# coding: latin-1\nx = '\xe9'; from ray.rllib.policy import Policy  # \xe9\x0c\n",
        b"x = '\\d'\nfrom ray.rllib.policy import Policy",  # Python warns about it
        b"x = '''\r\n'''\nfrom ray.rllib.policy import Policy\n\x0c\n  \n# no line end",
    ],
)
def test_every_other_byte_stays(source):
    assert port_script(source).source == source.replace(b"ray.rllib.policy", b"tfpolicies")


def test_names_of_several_modules_keep_the_line_ends_of_the_script():
    old = "from ray.rllib.env import (\r\n    EnvContext,\r\n    MultiAgentEnv,\r\n)\r\n"
    assert port(old) == (
        "from tfpolicies.compat import (\r\n    EnvContext,\r\n)\r\n"
        "from tfpolicies import (\r\n    MultiAgentEnv,\r\n)\r\n"
    )


def test_a_ported_script_is_not_changed_again():
    source = b"import numpy\nfrom . import ray\nfrom .ray.rllib import Policy\nimport rays as ray\n"
    assert port_script(source) == (source, [], [], [])
    once = port("from ray.rllib.policy import Policy\nPolicy.x._counters\n")
    assert port(once) == once


def test_imports_that_cannot_be_changed_safely_are_refused():
    with pytest.raises(UsageError, match=r"mine\.py cannot be ported: invalid syntax"):
        port_script(b"import = 1", "mine.py")
    for text in (
        "from ray . rllib.policy import Policy",
        "if a: \\\n  from ray.rllib.env import EnvContext, MultiAgentEnv",
    ):
        with pytest.raises(UsageError, match=r"changed safely|unexpected indent|invalid syntax"):
            port(text)


@pytest.mark.parametrize("name", ["_counters", "loss_initialized", "kl_coeff", "_mean_kl_loss"])
def test_names_that_compat_makes_known_get_its_import(name):
    old = f'"""Doc."""\nfrom __future__ import annotations\n\n# Ours\n@f\ndef g(a):\n    a.{name}\n'
    lazy = "def h():\n    from ray.rllib.env import EnvContext\n"
    new = lazy.replace("ray.rllib.env", "tfpolicies.compat")
    hooked = old.replace("# Ours\n", "# Ours\nimport tfpolicies.compat\n")
    assert port(old) == old
    assert port(old + lazy) == hooked + new
    at_top = "from ray.rllib.env import EnvContext\n"
    assert "import tfpolicies.compat\n" not in port(at_top + old.partition("\n\n")[2])


@pytest.mark.parametrize(
    ("text", "name", "advice"),
    [
        ("from ray.rllib.policy import *", "ray.rllib.policy.*", "write `from ray.rllib.policy"),
        ("import ray.rllib.env", "ray.rllib.env", "write `from ray.rllib.env import NAME`"),
        ("from ray import rllib", "ray.rllib", 'see "Names"'),
        (
            "from ray.rllib.models.torch.fcnet import FullyConnectedNetwork",
            "ray.rllib.models.torch.fcnet.FullyConnectedNetwork",
            'see "Not offered"',
        ),
        (
            "from ray.rllib.models.tf.tf_action_dist import SlateMultiCategorical",
            "ray.rllib.models.tf.tf_action_dist.SlateMultiCategorical",
            "Use MultiCategorical, which picks for each place by itself",
        ),
        (
            "import ray.rllib.policy.sample_batch as rows\nrows.SampleBatch, rows.compressed",
            "ray.rllib.policy.sample_batch",
            'see "A custom policy"',
        ),
        ("x(ray.rllib.env.EnvContext)", "ray.rllib.env.EnvContext", 'see "Env'),
        ("config(env='ray.rllib.examples.env.E')", "ray.rllib.examples.env.E", 'see "Names"'),
        (
            "from ray.tune.registry import ENV_CREATOR",
            "ray.tune.registry.ENV_CREATOR",
            'see "Ray Tune"',
        ),
    ],
)
def test_a_name_without_a_replacement_stays_with_advice(text, name, advice):
    source, (remark,), *_ = port_script(text.encode())
    assert source == text.encode()
    assert remark.name == name
    assert advice in remark.advice


def test_missing_names_of_a_changed_module_are_named():
    old = "import ray.rllib.algorithms.ppo as ppo\nppo.PPO(ppo.DEFAULT_CONFIG, ppo.Other)"
    new = "import tfpolicies.algorithms.ppo as ppo\nppo.PPO(ppo.DEFAULT_CONFIG, ppo.Other)"
    assert port(old) == new
    remarks = {remark.name: remark.advice for remark in port_script(old.encode()).remarks}
    assert remarks["ray.rllib.algorithms.ppo.DEFAULT_CONFIG"] == (
        "use `tfpolicies.compat.PPO_DEFAULT_CONFIG`"
    )
    assert remarks["ray.rllib.algorithms.ppo.Other"].startswith('see "Not offered"')
    mixed = "import ray.rllib.agents.ppo as ppo\nppo.PPOTrainer(ppo.DEFAULT_CONFIG)"
    assert port(mixed) == mixed
    assert get_unchanged(mixed) == ["ray.rllib.agents.ppo"]
    names = "from ray.rllib.agents.ppo import PPOTrainer, DEFAULT_CONFIG\n"
    assert port(names) == (
        "from tfpolicies.compat import PPOTrainer, PPO_DEFAULT_CONFIG as DEFAULT_CONFIG\n"
    )
    air = "from ray import air\nair.RunConfig(), air.session.report({})\n"
    assert port(air).startswith("from tfpolicies.compat import tune as air\n")
    assert get_unchanged(air) == ["ray.air.session"]
    assert get_unchanged("from ray.air import session, RunConfig") == ["ray.air.session"]
    assert get_unchanged("from ray.air.integrations.wandb import WandbLoggerCallback") == []


SCRIPT = """\
from ray.rllib.algorithms.pg import PGConfig
from ray.rllib.env.external_env import ExternalEnv
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    path.chmod(0o755)
    return path


def test_files_are_changed_where_they_are(script, capsys):
    assert main(["port", "script.py", "--check"]) == 1
    assert main(["port", "script.py", "--diff"]) == 0
    assert script.read_text() == SCRIPT
    assert "-from ray.rllib.algorithms.pg import PGConfig\n+from tfp" in capsys.readouterr().out
    assert main(["port", "script.py"]) == 0
    assert script.read_text().startswith("from tfpolicies import PGConfig\n")
    assert stat.S_IMODE(script.stat().st_mode) == 0o755
    assert capsys.readouterr().out == (
        "script.py:2: ray.rllib.env.external_env.ExternalEnv was not changed: "
        'see "Environments" on the page "From RLlib\'s TensorFlow stack"\nChanged: 1 of 1.\n'
    )
    assert main(["port", "script.py", "--check"]) == 1  # for the name that stays
    assert "ExternalEnv was not changed" in capsys.readouterr().out
    script.write_text("from tfpolicies import PGConfig\n")
    assert main(["port", "script.py", "--check"]) == 0
    assert capsys.readouterr().out == "Would change: 0 of 1.\n"


def test_no_file_is_changed_if_one_cannot_be(script, capsys):
    (script.parent / "broken.py").write_text("def")
    for other, message in (("broken.py", "cannot be ported"), ("absent.py", "No such file")):
        assert main(["port", "script.py", other]) == 2
        assert message in capsys.readouterr().err
    assert script.read_text() == SCRIPT


def test_a_script_runs_after_the_command(script):
    script.write_text(
        "import ray.rllib.algorithms.pg as pg\n"
        "from ray.rllib.utils.framework import try_import_tf\n"
        "_, tf, _ = try_import_tf()\n"
        "config = pg.PGConfig().environment('CartPole-v1').training(gamma=float(tf.ones(())))\n"
    )
    assert main(["port", "script.py"]) == 0
    assert runpy.run_path(str(script))["config"].gamma == 1.0


def test_a_package_adds_a_command(tmp_path, monkeypatch, capsys):
    info = tmp_path / "greetings-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: greetings\nVersion: 2.0\n")
    (info / "entry_points.txt").write_text(
        "[tfpolicies.commands]\ngreet = greet_command\nlost = greet_lost\nodd = json\ntrain = json"
    )
    (tmp_path / "greet_command.py").write_text(
        'SUMMARY = "say hello"\n'
        'def add_arguments(parser):\n    parser.add_argument("name")\n'
        'def run(args):\n    print("Hello", args.name)\n    return 7\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["greet", "Ada"]) == 7
    assert capsys.readouterr().out == "Hello Ada\n"
    assert main(["--help"]) == 0
    output = capsys.readouterr().out
    assert "a command of greetings" in output
    assert "change the imports of scripts" in output
    assert main(["lost"]) == main(["odd"]) == main(["train"]) == 2
    errors = capsys.readouterr().err
    assert "The command 'lost' of the package greetings 2.0 cannot be imported" in errors
    assert "The command 'odd' of the package greetings 2.0 lacks SUMMARY, add_arguments" in errors
    assert "train takes an environment" in errors


def test_every_public_name_is_in_the_table():
    names = {name for _, name in REPLACEMENTS.values()}
    new = {  # which RLlib has nothing like
        *("__version__", "import_policy", "record_video", "compare_runs", "diagnose", "tune"),
        *("KerasCallbacks", "MLflowLogger", "WandbLogger"),
    }
    assert names >= {*compat.__all__, *tfpolicies.__all__} - new
    assert not ALTERNATIVES.keys() & names


def test_every_module_of_the_table_has_its_name():
    pytest.importorskip("ray.tune")
    for (module, name), (home, new_name) in REPLACEMENTS.items():
        new_home = __import__(home, fromlist=[new_name])
        assert hasattr(new_home, new_name), (home, new_name)
        if module in MODULES and name == new_name:
            new_module = __import__(MODULES[module], fromlist=[name])
            assert getattr(new_module, name) is getattr(new_home, name)


def test_imports_of_recorded_experience_change_and_the_rest_has_advice():
    old = """\
from ray.rllib.offline import IOContext, JsonReader
from ray.rllib.offline.json_writer import JsonWriter
from ray.rllib.offline.d4rl_reader import D4RLReader
from ray.rllib.offline.estimators import ImportanceSampling
from ray.rllib.algorithms.cql import CQLConfig
from ray.rllib.algorithms.marwil import MARWILConfig, MARWILTF2Policy
from ray.rllib.algorithms.bc.bc import BC
from ray.tune.registry import register_input
"""
    assert port(old).splitlines() == [
        "from tfpolicies.compat import IOContext, JsonReader",
        "from tfpolicies.compat import JsonWriter",
        "from ray.rllib.offline.d4rl_reader import D4RLReader",
        "from ray.rllib.offline.estimators import ImportanceSampling",
        "from ray.rllib.algorithms.cql import CQLConfig",
        "from tfpolicies import MARWILConfig, MARWILTF2Policy",
        "from tfpolicies import BC",
        "from tfpolicies.compat import register_input",
    ]
    d4rl, estimator, cql = [remark.advice for remark in port_script(old.encode()).remarks]
    assert d4rl.startswith("Use Minari: offline_data(input_=")
    assert d4rl.endswith('see "Recorded experience" on the page "From RLlib\'s TensorFlow stack"')
    assert estimator.startswith("Set evaluation(evaluation_interval=...) with an environment")
    assert cql.startswith("Use SAC or BC with offline_data(input_=...).")


def test_settings_that_need_ray_are_named(script, capsys):
    script.write_text(
        "from ray.rllib.algorithms.pg import PGConfig\n"
        "config = PGConfig().rollouts(num_rollout_workers=2)\n"
        "config.update_from_dict({'evaluation_num_workers': 1, 'num_workers': 0})\n"
        "config.rollouts(num_rollout_workers=count)\n"
    )
    assert main(["port", "script.py"]) == 0
    advice = "install `tfpolicies[ray]`, or set it to 0 to sample in one process."
    assert capsys.readouterr().out == (
        f"script.py:2: num_rollout_workers=2 needs Ray: {advice}\n"
        f"script.py:3: evaluation_num_workers=1 needs Ray: {advice}\n"
        "Changed: 1 of 1.\n"
    )
    assert main(["port", "script.py", "--check"]) == 0  # nothing is left to change


def test_statements_that_only_start_ray_are_named(script, capsys):
    start = "import ray\nfrom ray.rllib.algorithms.pg import PGConfig\nray.init()\n"
    script.write_text(f"{start}ray.shutdown()\n")
    assert main(["port", "script.py"]) == 0
    expected = [(1, "import ray"), (3, "ray.init()"), (4, "ray.shutdown()")]
    lines = [f"script.py:{line}: `{x}` is not needed: remove it.\n" for line, x in expected]
    assert capsys.readouterr().out == "".join([*lines, "Changed: 1 of 1.\n"])
    assert main(["port", "script.py", "--check"]) == 1

    script.write_text(f"{start}actor = ray.remote(object)\n")  # needs the import
    assert port_script(script.read_bytes()).unneeded == [(3, "ray.init()")]
