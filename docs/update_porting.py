"""Copies the tables of `tfpolicies/base/porting_tables.md` into `docs/porting.md`."""

from pathlib import Path

from tfpolicies.base.porting_tables import update_tables

GUIDE = Path(__file__).parent / "porting.md"

if __name__ == "__main__":
    GUIDE.write_text(update_tables(GUIDE.read_text()))
