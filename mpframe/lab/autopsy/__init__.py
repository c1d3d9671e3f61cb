"""The autopsy: replays a failed step to find out why it failed.

    callback    notices a failed step during a run
    evidence    saves the step, and reads it back
    replay      replays it: as it was, at other scales, with more in fp32, all in fp32
    watch       observes every op of a replay, forward and backward
    diagnosis   where a value first left the range, and a remedy that was tried
    remedy      words for the command line that mend the step
    report      puts the diagnosis into words, and writes it

Begin with diagnosis.py.
"""
