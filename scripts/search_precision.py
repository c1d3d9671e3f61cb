"""Find the smallest set of modules that must stay in fp32, and prove it.

python scripts/search_precision.py experiment=digits_mlp dtype=mixed
python scripts/search_precision.py experiment=cifar10_small dtype=amp target=0.01 batches=2 prove=50
"""

from mpframe.cli.search import main

if __name__ == "__main__":
    main()
