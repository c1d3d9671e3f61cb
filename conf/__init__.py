"""The shipped configuration, as the package that `pkg://mpframe.conf` names.

In a clone mpframe/conf is a link to this folder; the wheel has the folder itself.
"""
