"""The reference of the public API: a page for each group of names, filled by mkdocstrings."""

from __future__ import annotations

GROUPS = {
    "policies": ("Policies", ("Policy", "TFPolicy", "PolicySpec", "PolicyMap", "import_policy")),
    "algorithms": ("Algorithms", ("Algorithm", "record_video")),
    "config": ("Configs", ("AlgorithmConfig",)),
    "callbacks": ("Callbacks", ("DefaultCallbacks",)),
    "sampling": ("Sampling", ("RolloutWorker", "WorkerSet", "MultiAgentEnv")),
    "batches": (
        "Batches",
        (
            *("SampleBatch", "MultiAgentBatch", "concat_samples", "compute_advantages"),
            "ViewRequirement",
        ),
    ),
    "PPO": ("PPO", ("PPO", "PPOConfig", "PPOTF2Policy", "PPOTF1Policy")),
    "A2C": ("A2C", ("A2C", "A2CConfig", "A2CTF2Policy", "A2CTF1Policy")),
    "PG": ("PG", ("PG", "PGConfig", "PGTF2Policy", "PGTF1Policy")),
    "DQN": ("DQN", ("DQN", "DQNConfig", "DQNTF2Policy", "DQNTF1Policy")),
    "SAC": ("SAC", ("SAC", "SACConfig", "SACTF2Policy", "SACTF1Policy")),
    "TD3": ("TD3", ("TD3", "TD3Config", "TD3TF2Policy", "TD3TF1Policy")),
    "DDPG": ("DDPG", ("DDPG", "DDPGConfig", "DDPGTF2Policy", "DDPGTF1Policy")),
    "MARWIL": ("MARWIL", ("MARWIL", "MARWILConfig", "MARWILTF2Policy", "MARWILTF1Policy")),
    "BC": ("BC", ("BC", "BCConfig", "BCTF2Policy", "BCTF1Policy")),
}
"""Titles and names of `tfpolicies` by page."""

MODULES = {
    "extending": ("Custom algorithms and policies", "tfpolicies.extending"),
    "connectors": ("Connectors", "tfpolicies.connectors"),
    "testing": ("Testing", "tfpolicies.testing"),
}
"""Titles and modules by page; a page has the names in the module's `__all__`."""


def make_api_pages() -> dict[str, str]:
    """Returns the pages by their path in the site's source."""
    import importlib

    import tfpolicies

    pages = {}
    for page, (title, names) in GROUPS.items():
        paths = [_get_path(getattr(tfpolicies, name)) for name in names]
        pages[f"reference/api/{page}.md"] = _make_page(title, paths)
    for page, (title, module_name) in MODULES.items():
        module = importlib.import_module(module_name)
        public = [
            getattr(module, name) for name in getattr(module, "__all__", None) or vars(module)
        ]
        paths = [_get_path(item) for item in public if hasattr(item, "__qualname__")]
        pages[f"reference/api/{page}.md"] = _make_page(title, paths)
    return pages


def _get_path(item: object) -> str:
    return f"{item.__module__}.{item.__qualname__}"  # type: ignore[attr-defined]


def _make_page(title: str, paths: list[str]) -> str:
    directives = "".join(f"\n::: {path}\n" for path in dict.fromkeys(paths))
    return f"# {title}\n{directives}"
