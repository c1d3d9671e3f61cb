"""Train: python scripts/train.py [GROUP=CHOICE] [option=value] ...

python scripts/train.py dtype=mixed loss_scaling=Backoff
python scripts/train.py -m dtype=fp32,mixed,amp loss_scaling=Backoff,LogMax seed=1,2,3
python scripts/train.py --help
"""

from mpframe.cli.train import main

if __name__ == "__main__":
    main()
