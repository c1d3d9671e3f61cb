"""One training run, from the checked options to objects, and from those to summary.json.

Begin with `Run` in run.py, which does everything in order, then `build_trainer` in trainer.py.

    target     calls what a `_target_` names             folder       the lock, the first files
    parts      model, data, precision, callbacks         resume       where a run starts from
    optimizer  optimizers and schedules                  outcome      the final test, the summary
    trainer    puts the parts together                   description  log, TensorBoard, usage
    footprint  bytes that many ranks would hold, send    process      memory, console, Slurm
    fit        a trainer made in Python, trained

Only this package instantiates a `_target_`, and only cli starts runs.
"""
