"""The project's folder, and the folder of modules that the tests' programs import."""

from pathlib import Path

HELPERS = Path(__file__).resolve().parent
ROOT = HELPERS.parents[1]
