"""The shipped configuration, as the package that `pkg://mpframe.conf` names.

In a clone mpframe/conf is a link to this folder; the wheel has the folder itself. Hydra imports
the package when it looks for a file in it, and so gets the schema, with which every configuration
begins.
"""

from mpframe.config import schema as _  # noqa: F401
