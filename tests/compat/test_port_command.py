"""`tfpolicies port` changes the imports of scripts that were written for RLlib."""

import runpy
import stat
from pathlib import Path

import pytest

import tfpolicies
from tfpolicies import compat
from tfpolicies.cli import main
from tfpolicies.compat.port import port_script
from tfpolicies.compat.rllib_names import ALTERNATIVES, MODULES, REPLACEMENTS
from tfpolicies.errors import UsageError


def ported(text: str) -> str:
    return port_script(text.encode()).source.decode()


def left(text: str) -> list[str]:
    return [remark.name for remark in port_script(text.encode()).remarks]


# -- imports ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "from ray.rllib.algorithms.ppo import PPO, PPOConfig as C  # both",
            "from tfpolicies import PPO, PPOConfig as C  # both",
        ),
        (
            "from  ray.rllib.policy.sample_batch  import (  # noqa: F401\n  SampleBatch ,# rows\n)",
            "from  tfpolicies  import (  # noqa: F401\n  SampleBatch ,# rows\n)",
        ),
        (
            "from ray.rllib.env import MultiAgentEnv, \\\n    EnvContext, \\\n    VectorEnv as V",
            "from tfpolicies import MultiAgentEnv\n"
            "from tfpolicies.compat import EnvContext, \\\n    VectorEnv as V",
        ),
        (
            "import ray.rllib.algorithms.ppo as ppo, os\nppo.PPOConfig()",
            "import tfpolicies.algorithms.ppo as ppo, os\nppo.PPOConfig()",
        ),
        (
            "from ray.rllib.algorithms import dqn as q\nq.DQN",
            "from tfpolicies.algorithms import dqn as q\nq.DQN",
        ),
        (
            "import ray.rllib.agents.ppo as ppo\nppo.PPOTrainer()",
            "import tfpolicies.compat as ppo\nppo.PPOTrainer()",
        ),
        (
            "from ray.rllib.agents import ppo\nppo.PPOTrainer()",
            "from tfpolicies import compat as ppo\nppo.PPOTrainer()",
        ),
        ("from ray import tune\nprint(tune)", "from tfpolicies.compat import tune\nprint(tune)"),
        ("import ray.tune as t", "import tfpolicies.compat.tune as t"),
        (
            "from ray import air, tune\nair.RunConfig()",
            "from tfpolicies.compat import tune as air, tune\nair.RunConfig()",
        ),
        ("from ray import air", "from tfpolicies.compat import tune as air"),
        (
            "import ray.air as a\na.FailureConfig",
            "import tfpolicies.compat.tune as a\na.FailureConfig",
        ),
        (
            "from ray import train\ntrain.report({})\ntrain.get_context()",
            "from tfpolicies.compat import tune as train\ntrain.report({})\ntrain.get_context()",
        ),
        (
            "from ray.tune import grid_search, Tuner",
            "from ray.tune import grid_search\nfrom tfpolicies.compat.tune import Tuner",
        ),
        (
            "if a: from ray.rllib.env import EnvContext, MultiAgentEnv; print(1)",
            "if a: from tfpolicies.compat import EnvContext; "
            "from tfpolicies import MultiAgentEnv; print(1)",
        ),
    ],
)
def test_an_import_is_written_as_it_was_from_another_module(old: str, new: str) -> None:
    assert ported(old) == new
    assert left(old) == []


def test_names_that_part_keep_the_comments_beside_them() -> None:
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
    assert (
        ported(old)
        == """\
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
    )
    assert left(old) == ["ray.rllib.env.ExternalEnv"]
    one_line = "from ray.rllib.env import (EnvContext, MultiAgentEnv, ExternalEnv,)"
    assert ported(one_line).splitlines() == [
        "from tfpolicies.compat import (EnvContext)",
        "from tfpolicies import (MultiAgentEnv)",
        "from ray.rllib.env import (ExternalEnv,)",
    ]


def test_imports_in_functions_and_conditions_are_changed_where_they_are() -> None:
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
    assert (
        ported(old)
        == '''\
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
    )


@pytest.mark.parametrize(
    "source",
    [
        b"\xef\xbb\xbffrom ray.rllib.policy import Policy\r\nx = '\xc3\xa9'\r\n",
        b"# coding: latin-1\nx = '\xe9'; from ray.rllib.policy import Policy  # \xe9\x0c\n",
        b"x = '''\r\n'''\nfrom ray.rllib.policy import Policy\n\x0c\n  \n# no line end",
    ],
)
def test_every_other_byte_stays(source: bytes) -> None:
    assert port_script(source).source == source.replace(b"ray.rllib.policy", b"tfpolicies")


def test_names_that_part_keep_the_line_ends_of_the_script() -> None:
    old = "from ray.rllib.env import (\r\n    EnvContext,\r\n    MultiAgentEnv,\r\n)\r\n"
    assert ported(old) == (
        "from tfpolicies.compat import (\r\n    EnvContext,\r\n)\r\n"
        "from tfpolicies import (\r\n    MultiAgentEnv,\r\n)\r\n"
    )


def test_what_python_warns_of_in_a_script_stays_as_it_is() -> None:
    assert ported("x = '\\d'\nfrom ray.rllib.policy import Policy").startswith("x = '\\d'\n")


def test_a_ported_script_is_not_changed_again() -> None:
    source = b"import numpy\nfrom . import ray\nfrom .ray.rllib import Policy\nimport rays as ray\n"
    assert port_script(source) == (source, [])
    once = ported("from ray.rllib.policy import Policy\nPolicy.x._counters\n")
    assert ported(once) == once


def test_what_cannot_be_changed_safely_is_refused() -> None:
    with pytest.raises(UsageError, match=r"mine\.py cannot be ported: invalid syntax"):
        port_script(b"import = 1", "mine.py")
    for text in (
        "from ray . rllib.policy import Policy",
        "if a: \\\n  from ray.rllib.env import EnvContext, MultiAgentEnv",
    ):
        with pytest.raises(UsageError, match=r"changed safely|unexpected indent|invalid syntax"):
            ported(text)


# -- the hook -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["_counters", "loss_initialized", "kl_coeff", "_mean_kl_loss"])
def test_names_that_compat_makes_known_get_its_import(name: str) -> None:
    old = f'"""Doc."""\nfrom __future__ import annotations\n\n# Ours\n@f\ndef g(a):\n    a.{name}\n'
    lazy = "def h():\n    from ray.rllib.env import EnvContext\n"
    new = lazy.replace("ray.rllib.env", "tfpolicies.compat")
    hooked = old.replace("# Ours\n", "# Ours\nimport tfpolicies.compat\n")
    assert ported(old) == old
    assert ported(old + lazy) == hooked + new
    at_top = "from ray.rllib.env import EnvContext\n"
    assert "import tfpolicies.compat\n" not in ported(at_top + old.partition("\n\n")[2])


# -- what stays ---------------------------------------------------------------------------------


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
def test_what_has_no_place_stays_and_is_told_with_what_helps(
    text: str, name: str, advice: str
) -> None:
    source, remarks = port_script(text.encode())
    assert source == text.encode()
    assert [remark.name for remark in remarks] == [name]
    assert advice in remarks[0].advice


def test_what_a_module_lacks_is_told_when_it_is_changed() -> None:
    old = "import ray.rllib.algorithms.ppo as ppo\nppo.PPO(ppo.DEFAULT_CONFIG)"
    source, remarks = port_script(old.encode())
    assert source == b"import tfpolicies.algorithms.ppo as ppo\nppo.PPO(ppo.DEFAULT_CONFIG)"
    assert [remark.name for remark in remarks] == ["ray.rllib.algorithms.ppo.DEFAULT_CONFIG"]


def test_what_ray_air_lacks_is_named() -> None:
    source, remarks = port_script(b"from ray import air\nair.RunConfig(), air.session.report({})\n")
    assert source.startswith(b"from tfpolicies.compat import tune as air\n")
    assert [remark.name for remark in remarks] == ["ray.air.session"]
    assert left("from ray.air import session, RunConfig") == ["ray.air.session"]
    assert left("from ray.air.integrations.wandb import WandbLoggerCallback") == []


# -- the command --------------------------------------------------------------------------------

SCRIPT = """\
from ray.rllib.algorithms.pg import PGConfig
from ray.rllib.env.external_env import ExternalEnv
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    path.chmod(0o755)
    return path


def test_files_are_changed_where_they_are(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["port", "script.py", "--check"]) == 1
    assert main(["port", "script.py", "--diff"]) == 0
    assert script.read_text() == SCRIPT
    assert "-from ray.rllib.algorithms.pg import PGConfig\n+from tfp" in capsys.readouterr().out
    assert main(["port", "script.py"]) == 0
    assert script.read_text().startswith("from tfpolicies import PGConfig\n")
    assert stat.S_IMODE(script.stat().st_mode) == 0o755
    assert capsys.readouterr().out == (
        "script.py:2: ray.rllib.env.external_env.ExternalEnv was not changed: "
        'see "Environments" in docs/porting.md\nChanged: 1 of 1.\n'
    )
    assert main(["port", "script.py", "--check"]) == 1  # for the name that stays
    assert "ExternalEnv was not changed" in capsys.readouterr().out
    script.write_text("from tfpolicies import PGConfig\n")
    assert main(["port", "script.py", "--check"]) == 0
    assert capsys.readouterr().out == "Would change: 0 of 1.\n"


def test_no_file_is_changed_if_one_cannot_be(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (script.parent / "broken.py").write_text("def")
    for other, message in (("broken.py", "cannot be ported"), ("absent.py", "No such file")):
        assert main(["port", "script.py", other]) == 2
        assert message in capsys.readouterr().err
    assert script.read_text() == SCRIPT


def test_a_script_runs_by_the_command_alone(script: Path) -> None:
    script.write_text(
        "import ray.rllib.algorithms.pg as pg\n"
        "from ray.rllib.utils.framework import try_import_tf\n"
        "_, tf, _ = try_import_tf()\n"
        "config = pg.PGConfig().environment('CartPole-v1').training(gamma=float(tf.ones(())))\n"
    )
    assert main(["port", "script.py"]) == 0
    assert runpy.run_path(str(script))["config"].gamma == 1.0


def test_a_package_adds_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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
    shown = capsys.readouterr().out
    assert "a command of greetings" in shown
    assert "change the imports of scripts" in shown
    assert main(["lost"]) == main(["odd"]) == main(["train"]) == 2
    said = capsys.readouterr().err
    assert "The command 'lost' of the package greetings 2.0 cannot be imported" in said
    assert "The command 'odd' of the package greetings 2.0 lacks SUMMARY, add_arguments" in said
    assert "train takes an environment" in said


# -- the table ----------------------------------------------------------------------------------


def test_every_name_that_is_here_for_ported_code_is_in_the_table() -> None:
    here = {name for _, name in REPLACEMENTS.values()}
    new = {"__version__", "import_policy", "record_video"}  # which RLlib has nothing like
    assert here >= {*compat.__all__, *tfpolicies.__all__} - new
    assert not ALTERNATIVES.keys() & here


def test_every_place_of_the_table_has_its_name() -> None:
    pytest.importorskip("ray.tune")
    for module, name in {*REPLACEMENTS.values()}:
        imported = __import__(module, fromlist=[name])
        assert hasattr(imported, name), (module, name)
    for (module, name), (home, _) in REPLACEMENTS.items():
        if module in MODULES:
            own = __import__(MODULES[module], fromlist=[name])
            assert getattr(own, name) is getattr(__import__(home, fromlist=[name]), name)
