"""timm's families: of each of its model files the member with the smallest name.

Names say sizes. Where none does, the first of the alphabet is taken.
"""

import torch
from comparison import Example, NotBuiltError, called, images

SIZES = ("test", "atto", "femto", "pico", "zepto", "nano", "xxs", "micro", "xxtiny", "xtiny")
SIZES += ("xs", "tiny", "mini", "s0", "b0", "m0", "t0", "small", "s12", "s", "18", "0", "b16")
SIDES = (64, 96, 128, 160, 192, 224, 256)
LARGEST = 30_000_000
CLASSES = 5


def names() -> list[str]:
    import timm

    return sorted({_smallest(timm.list_models(module=m)) for m in timm.list_modules()} - {""})


def build(name: str) -> Example:
    import timm

    with torch.device("meta"):
        size = sum(p.numel() for p in timm.create_model(name).parameters())
    if size > LARGEST:
        raise NotBuiltError(f"{size} parameters")
    for side in SIDES:
        for sized in ({"img_size": side}, {}):
            torch.manual_seed(0)
            try:
                model = timm.create_model(name, num_classes=CLASSES, **sized).train()
                model(images(side, count=4))
                return called(model, images(side, count=4))
            except Exception as error:
                refusal = error
    raise NotBuiltError(f"{type(refusal).__name__}: {refusal}")


def _smallest(candidates: list[str]) -> str:
    def size(name: str) -> tuple[int, int, str]:
        words = set(name.replace(".", "_").split("_"))
        rank = next((rank for rank, size in enumerate(SIZES) if size in words), len(SIZES))
        return rank, len(name), name

    return min(candidates, key=size, default="")
