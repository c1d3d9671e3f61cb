"""Export a checkpoint as a file for anybody, with a sidecar FILE.json that says how to use it:

    python scripts/export.py checkpoint=runs/2026-11-21/05-45-42 out=model.safetensors
    python scripts/export.py checkpoint=runs/mine out=half.safetensors weights_dtype=float16
    python scripts/export.py checkpoint=runs/mine out=model.onnx format=onnx weights=ema
    python scripts/export.py checkpoint=runs/mine out=model.pt2 format=torch_export

format: safetensors (default) and state_dict hold weights; onnx and torch_export hold the model as
    a graph, which runs without its code, for any batch size. onnx needs pip install mpframe[onnx].
weights_dtype: fp32 (default), float16 or bfloat16, rounded once from the fp32 masters; a graph
    takes inputs of this format and computes in it.
weights: trained (default) or ema, the averages of trainer.ema_decay.
overwrite: true replaces a file that exists.
model...: for a graph, options of the model; a class that is not mpframe's own is named again, as in
    model._target_=my_pkg.Net.
"""

from mpframe.cli.export import main

if __name__ == "__main__":
    main()
