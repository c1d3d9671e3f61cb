"""The jobs of a sweep: what they are made of, what they are called, what is left of them.

    values.py    the values of each option that is swept, checked before the first job
    job_name.py  the name of a job, which is its folder in the sweep's
    earlier.py   whether a job's folder already holds its run, or another one
    again.py     the command that continues a sweep that was stopped

Hydra's sweepers make the jobs. Begin with job_name.py.
"""
