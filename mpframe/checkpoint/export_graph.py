"""Weights in one format, and a model with them as one graph, which runs without the model's code.

The weights are the fp32 masters (or their averages), rounded once:

    w = round_to_half(m),  |m| beyond the format's range -> its end

so that no weight becomes inf. The number of such values is reported. Floating buffers are written
in the same format, except that an export in fp32 changes only half buffers. Integer and boolean
buffers are written unchanged.

The graph computes in the format of its weights and casts nothing, so an export in float16 takes
float16 inputs. The first dimension of each input is the batch, of any size. The other dimensions of
integer and boolean inputs, such as the length of a text, may have any size unless the model's code
fixes them.
"""

import inspect
import io
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from mpframe.checkpoint.export import KEY
from mpframe.core.errors import CheckpointError, ConfigError, UserCodeError, first_line
from mpframe.core.tree import HALVES, dtype_name, fields_of, tensors_in
from mpframe.core.user_code import describe_error, name_of

DTYPES = {"fp32": torch.float32, **HALVES}


@dataclass(frozen=True)
class Exported:
    """Converted weights that share no memory, and how many values of each were clamped."""

    tensors: dict[str, Tensor]
    saturated: dict[str, int]


def convert_weights(weights: Mapping[str, Tensor], dtype: str) -> Exported:
    """Round parameters and buffers once to `fp32`, `float16` or `bfloat16`.

    ConfigError: another format. CheckpointError: a weight is nan, inf, complex or double.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"weights_dtype={dtype}: choose {', '.join(DTYPES)}")
    tensors, saturated = {}, {}
    for name, tensor in weights.items():
        _refuse_unfit(name, tensor)
        tensors[name], beyond = _round(tensor, DTYPES[dtype])
        if beyond:
            saturated[name] = beyond
    return Exported(tensors, saturated)


def _round(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, int]:
    """Return a copy in `dtype`, and how many values were clamped to its range."""
    if not tensor.is_floating_point():
        return tensor.clone(memory_format=torch.contiguous_format), 0
    limit = torch.finfo(dtype).max
    rounded = tensor.to(dtype)
    beyond = int((~torch.isfinite(rounded)).sum())
    clamped = rounded.clamp(-limit, limit)
    return clamped.clone(memory_format=torch.contiguous_format), beyond


def _refuse_unfit(name: str, tensor: Tensor) -> None:
    if tensor.is_complex() or tensor.dtype == torch.float64:
        raise CheckpointError(
            f"{name} is {tensor.dtype}, which no export format holds; export fp32 weights"
        )
    if not bool(torch.isfinite(tensor).all()):
        raise CheckpointError(f"{name} holds nan or inf; export an older checkpoint")


log = logging.getLogger(__name__)

_LABELS = ("labels", "start_positions", "end_positions")  # as Hugging Face's models call them
_MOST_VALUES = 2**26  # of one input's example: 256 MB in fp32


def trace_model(
    model: nn.Module, weights: Exported, dtype: str, inputs: Sequence[Mapping[str, Any]]
) -> torch.export.ExportedProgram:
    """Export a model on the CPU as a graph, with torch.export, and leave it in evaluation mode.

    weights: all parameters and buffers, in `dtype`. inputs: a sidecar's.

    The outputs are tensors, or tuples, lists and dicts of them, so that torch can load the graph
    without the model's classes. CheckpointError: the weights are another model's. UserCodeError:
    the model cannot be traced.
    """
    _load(model.to(DTYPES[dtype]), weights)
    model.register_forward_hook(lambda module, given, output: _plain_output(output))
    # Two samples of zeros, which are valid indexes of any table.
    examples = {
        one["name"]: torch.zeros(_sizes(one), dtype=getattr(torch, one["dtype"])) for one in inputs
    }
    batch = torch.export.Dim("batch")
    sizes = {
        name: ({0: batch} if held.dim() else {}) | _lengths(held) for name, held in examples.items()
    }
    call: tuple[Any, ...] = (), examples, sizes
    if len(examples) == 1:
        call = tuple(examples.values()), {}, tuple(sizes.values())
    try:
        with _quiet():
            program = torch.export.export(model.eval(), *call[:2], dynamic_shapes=call[2])
    except Exception as error:  # Whatever the tracer or the user's model raises.
        raise UserCodeError(
            f"model: {name_of(model)} cannot be traced into a graph: {describe_error(error)}; use "
            "format=safetensors, or write its forward so that torch.export takes it"
        ) from error
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # It names folders of this machine.
    return program


def describe_inputs(
    program: torch.export.ExportedProgram, inputs: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Describe the inputs of a graph, with null for each size that may vary.

    Warns of a length that the model's code fixes.
    """
    nodes = {node.name: node for node in program.graph.nodes}
    described = []
    for one, node in zip(inputs, program.graph_signature.user_inputs, strict=True):
        held, shape = nodes[node].meta["val"], list(one["shape"])
        for dim in _lengths(held):
            least, most = _bounds(held.shape[dim])
            if least == most:
                log.warning(
                    "warning: the graph takes %s of size %d in dimension %d only, because the "
                    "model's code fixes it",
                    *(one["name"], least, dim),
                )
            elif least < (shape[dim] or 2):  # Otherwise the model reads columns by number.
                shape[dim] = None
        described.append({**one, "shape": shape})
    return described


def as_pt2(program: torch.export.ExportedProgram, words: str) -> bytes:
    """Return the content of a `.pt2` file with `words` as its extra file `mpframe`."""
    file = io.BytesIO()
    torch.export.save(program, file, extra_files={KEY: words})
    return file.getvalue()


def as_onnx(program: torch.export.ExportedProgram, words: str) -> bytes:
    """Return the content of an `.onnx` file with `words` as its metadata property `mpframe`."""
    require_onnx()
    spec: Any = program.call_spec.out_spec
    by_name = spec.type is dict and spec.num_leaves == len(spec.context)
    names = spec.context if by_name else None
    try:
        with _quiet():
            made: Any = torch.onnx.export(program, dynamo=True, verbose=False, output_names=names)
    except Exception as error:
        raise UserCodeError(
            f"format=onnx: the graph cannot be written as ONNX: {first_line(error):.200}; use "
            "format=torch_export or safetensors"
        ) from error
    made.model.metadata_props[KEY] = words
    for node in made.model.graph.all_nodes():
        node.metadata_props.clear()  # Stack traces, with folders of this machine.
    content: bytes = made.model_proto.SerializeToString()
    return content


def require_onnx() -> None:
    """Refuse to write ONNX without the packages that do it, naming the extra."""
    for package in ("onnx", "onnxscript"):
        if find_spec(package) is None:
            raise ConfigError(
                f"format=onnx: {package} is not installed; get it with pip install mpframe[onnx], "
                "or use format=torch_export"
            )


def graph_inputs(facts: Mapping[str, Any], dtype: str) -> list[dict[str, Any]]:
    """Return the sidecar's inputs, plain tensors, the floating ones in `dtype`."""
    inputs = facts["inputs"]
    if not inputs or not isinstance(inputs, list) or not all(map(_is_plain, inputs)):
        raise CheckpointError(
            "the checkpoint does not say that its model is called with plain tensors, which a "
            "graph needs; use format=safetensors"
        )
    name = dtype_name(DTYPES[dtype])
    return [
        {**one, "dtype": name} if getattr(torch, one["dtype"]).is_floating_point else one
        for one in inputs
    ]


def without_labels(inputs: list[dict[str, Any]], model: nn.Module) -> list[dict[str, Any]]:
    """Return the inputs without labels that only the model's loss needed."""
    parameters = inspect.signature(model.forward).parameters
    left_out = {
        name
        for name in _LABELS
        if name in parameters and parameters[name].default is not inspect.Parameter.empty
    }
    return [one for one in inputs if one["name"] not in left_out]


@contextmanager
def _quiet() -> Iterator[None]:
    """Log nothing in the block, because the tracer writes the whole graph if it fails."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def _is_plain(described: Any) -> bool:
    """Return whether this untrusted value describes an input of a moderate size."""
    try:
        sizes = _sizes(described)
        dtype = getattr(torch, described["dtype"])
        named = described["name"].isidentifier()
    except (TypeError, KeyError, AttributeError):
        return False
    whole = all(type(size) is int and size > 0 for size in sizes)
    return named and whole and math.prod(sizes) <= _MOST_VALUES and isinstance(dtype, torch.dtype)


def _lengths(example: Tensor) -> dict[int, Any]:
    """Return the dimensions behind the batch that torch.export may leave open."""
    if example.is_floating_point():
        return {}
    return dict.fromkeys(range(1, example.dim()), torch.export.Dim.AUTO)


def _bounds(size: Any) -> tuple[Any, Any]:
    """Return the smallest and the largest value of a size in a graph."""
    if isinstance(size, int):
        return size, size
    allowed = size.node.shape_env.bound_sympy(size.node.expr)
    return allowed.lower, allowed.upper


def _plain_output(output: Any) -> Any:
    """Return an output with dicts for dataclasses and the like, without fields without tensors."""
    fields = fields_of(output)
    if fields:
        return {str(k): _plain_output(v) for k, v in fields.items() if [*tensors_in(v)]}
    if isinstance(output, tuple | list):
        items = [_plain_output(item) for item in output]
        return tuple(items) if isinstance(output, tuple) else items
    return output


def _sizes(described: Mapping[str, Any]) -> list[Any]:
    return [2 if size is None else size for size in described["shape"]]


def _load(model: nn.Module, weights: Exported) -> None:
    try:
        model.load_state_dict(weights.tensors)
    except RuntimeError as error:
        raise CheckpointError(
            f"model: its weights are not those of {name_of(model)}: {first_line(error)}; give the "
            "options of model that the run had"
        ) from None
