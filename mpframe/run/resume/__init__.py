"""`resume`: which checkpoint a run goes on from, and what then differs.

    resuming           finds the checkpoint, verifies it, and loads all of it or nothing
    callback_states    gives the callbacks their states, by name
    exactness          whether the resumed run can equal the undisturbed one bit for bit

Begin with `Resume` in resuming.py.
"""
