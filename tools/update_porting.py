"""Copies the tables of `tfpolicies/base/porting_tables.md` into `docs/migrate`."""

from pathlib import Path

from tfpolicies.base.porting_tables import update_tables

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "migrate"
GUIDES = [FOLDER / f"{name}.md" for name in ("rllib", "sb3", "keras")]

if __name__ == "__main__":
    for guide in GUIDES:
        guide.write_text(update_tables(guide.read_text()))
