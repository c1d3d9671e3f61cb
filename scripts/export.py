"""Export a checkpoint as a file for anybody; the formats and options are in mpframe/cli/export.py:

python scripts/export.py checkpoint=runs/2026-11-21/05-45-42 out=model.safetensors
python scripts/export.py checkpoint=runs/mine out=model.onnx format=onnx weights=ema
"""

from mpframe.cli.export import main

if __name__ == "__main__":
    main()
