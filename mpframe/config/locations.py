"""Where the shipped configuration lies: beside the package, or inside it if it is installed."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
CONF = next(p for p in (_PACKAGE / "conf", _PACKAGE.parent / "conf") if (p / "ops").is_dir())
