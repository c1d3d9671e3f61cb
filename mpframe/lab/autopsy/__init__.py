"""The autopsy: replays a failed step to find out why it failed.

    callback    notices a failed step during a run
    evidence    saves the step, and reads it back
    replay      replays it: as it was, at other scales, with more in fp32, all in fp32
    watch       observes every op of a replay, forward and backward
    diagnosis   where a value first left the range, and a remedy that was tried
    report      puts the diagnosis and its remedy into words, and writes them

Begin with diagnosis.py.
"""
