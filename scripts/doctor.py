"""Say before training what will go wrong, and which option fixes it:

    python scripts/doctor.py experiment=digits_mlp dtype=mixed loss_scaling=static
    python scripts/doctor.py -m dtype=fp32,mixed,amp

Takes what scripts/train.py takes; leaves nothing behind. Exit code 1 if there is an error.
"""

from mpframe.cli.doctor import main

if __name__ == "__main__":
    main()
