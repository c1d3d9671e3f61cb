"""The autopsy: replays a failed step to find out why it failed.

    callback    notices a failed step during a run; examination: what it then does
    evidence    saves the step, and reads it back; plain_batch: its batches without classes
    case        the step, ready to be replayed
    replay      replays it: as it was, at other scales, with more in fp32, all in fp32
    watch       observes every op of a replay, forward and backward; magnitudes: as few numbers
    culprit     where a value first left the range; underflow: gradients below the normal range
    diagnosis   one of six, with a remedy that was tried
    report      puts the diagnosis into words

Begin with diagnosis.py.
"""
