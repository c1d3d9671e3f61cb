"""The autopsy: why a step failed, found by running it again.

callback    notices that a run is in trouble
evidence    what is saved of the failing step, and read back
case        the step, ready to be run again
replay      runs it: as it was, at other scales, with more in fp32, all in fp32
watch       sees every op of a replay, forward and backward
findings    the first place out of range; lost: what falls out at the small end
verdict     one of six, and a remedy that was tried
report      says so
"""
