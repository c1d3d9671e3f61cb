"""Export a checkpoint's weights as safetensors, with plain names:

    python scripts/export.py checkpoint=runs/2026-11-21/05-45-42 out=model.safetensors
    python scripts/export.py checkpoint=runs/mine out=half.safetensors format=float16 weights=ema

format: fp32 (default), float16 or bfloat16, rounded once from the fp32 masters.
weights: trained (default) or ema, the averages of trainer.ema_decay.
"""

from mpframe.cli.export import main

if __name__ == "__main__":
    main()
