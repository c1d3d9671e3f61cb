"""The command line: which command is meant, and what all commands share.

Begin with main.py, which finds the command, and commands/train.py: Hydra composes, the job is
checked, job.py runs it. The other commands take `option=value` words and compose by themselves.

    commands/      one file for each command
    main           `mpframe COMMAND ...`, its help, version and tab completion
    program        the frame of every command: options, and errors in one line
    job            the function that Hydra calls for each job of `train`
    sweep          keeps the table of a sweep while it runs
    restored       a checkpoint's model, for evaluate and predict
"""
