"""Write docs/options.md from the schema: python scripts/options.py"""

from pathlib import Path

from mpframe.config.options_page import options_page

if __name__ == "__main__":
    Path(__file__).parent.parent.joinpath("docs", "options.md").write_text(options_page())
