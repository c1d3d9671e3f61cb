"""The commands, one file each; scripts/ has a few lines over each of them.

Begin with train.py: Hydra composes, the job is checked, job.py runs it. The other commands take
`option=value` words and compose by themselves. Each runs within `program()`: the current folder is
importable, and an error of ours ends in one line. May import everything but bench/.
"""
