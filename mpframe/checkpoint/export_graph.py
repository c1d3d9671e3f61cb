"""Weights in one format, and a model with them as one graph, which runs without the model's code.

The weights are the fp32 masters or their averages, rounded once. Values beyond the format's range
become its end and are counted. Integer and boolean buffers are written unchanged.

The graph computes in the format of its weights and casts nothing, so an export in float16 takes
float16 inputs. The first dimension of each input is the batch, of any size. `open_sizes` decides
which others may vary.
"""

import inspect
import io
import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from mpframe.checkpoint.export import KEY
from mpframe.core.errors import CheckpointError, ConfigError, UserCodeError, first_line
from mpframe.core.tree import HALVES, dtype_name, fields_of, tensors_in
from mpframe.core.user_code import describe_error, name_of

DTYPES = {"fp32": torch.float32, **HALVES}
Inputs = Sequence[Mapping[str, Any]]  # as a sidecar describes them
OpenSizes = Mapping[str, Mapping[int, str | None]]
"""By input, the dimensions that may vary besides the batch, and the name of each that must."""


def convert_weights(
    weights: Mapping[str, Tensor], dtype: str
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Round parameters and buffers once to `fp32`, `float16` or `bfloat16`.

    Return tensors that share no memory, and how many values of each were clamped, if any.

    CheckpointError: a weight is nan, inf, complex or double.
    """
    tensors, saturated = {}, {}
    for name, tensor in weights.items():
        if tensor.is_complex() or tensor.dtype == torch.float64:
            raise CheckpointError(
                f"{name} is {tensor.dtype}, which no export format holds; export fp32 weights"
            )
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"{name} holds nan or inf; export an older checkpoint")
        rounded = tensor.to(DTYPES[dtype]) if tensor.is_floating_point() else tensor
        if beyond := int(rounded.isinf().sum()):
            saturated[name] = beyond
        tensors[name] = rounded.nan_to_num().contiguous()  # A copy, with the range's end for inf.
    return tensors, saturated


log = logging.getLogger(__name__)

_LABELS = ("labels", "start_positions", "end_positions")  # as Hugging Face's models call them
_AXES = {"length": 1, "height": 2, "width": 3}
_MOST_VALUES = 2**26  # of one input's example: 256 MB in fp32


def open_sizes(inputs: Inputs, dynamic: Any = None) -> OpenSizes:
    """Return the sizes that may vary.

    dynamic: `[length]`, `[height, width]`, or names by input and dimension as in
    `{words: {1: length}}`. If None, those of integer and boolean inputs that the model's code does
    not fix. ConfigError: it names no size, or one name has two sizes.
    """
    shapes = {one["name"]: one["shape"] for one in inputs}
    if dynamic is None:
        whole = {one["name"] for one in inputs if "float" not in one["dtype"]}
        return {n: dict.fromkeys(range(1, len(shapes[n]) * (n in whole))) for n in shapes}
    sizes, found = dynamic, set()
    with suppress(AttributeError, IndexError, KeyError, TypeError):
        if not isinstance(dynamic, Mapping):
            axes = {_AXES[name]: name for name in dynamic}
            sizes = {n: {k: axes[k] for k in axes if k < len(shapes[n])} for n in shapes}
        found = {(sizes[n][k], shapes[n][k]) for n in sizes for k in sizes[n]}
    if not found or len(found) > len(dict(found)):
        shown = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ConfigError(
            f"dynamic={dynamic}: names no size of {shown}, or several alike; choose length, "
            "height, width, or name them by input and dimension, as in {words: {1: length}}"
        )
    return {**{name: {} for name in shapes}, **sizes}


def trace_model(model: nn.Module, inputs: Inputs, sizes: OpenSizes) -> ExportedProgram:
    """Export a model on the CPU as a graph, with torch.export, and leave it in evaluation mode.

    The outputs are tensors, or tuples, lists and dicts of them, so that torch can load the graph
    without the model's classes. UserCodeError: the model cannot be traced, or fixes a size that
    must vary.
    """
    model.register_forward_hook(lambda module, given, output: _plain_output(output))
    # Two samples of zeros, which are valid indexes of any table.
    examples = {
        one["name"]: torch.zeros(_sizes(one), dtype=getattr(torch, one["dtype"])) for one in inputs
    }
    batch, kinds = torch.export.Dim("batch"), (torch.export.Dim.AUTO, torch.export.Dim.DYNAMIC)
    dims = {
        name: {dim: kinds[label is not None] for dim, label in sizes[name].items()}
        | ({0: batch} if held.dim() else {})
        for name, held in examples.items()
    }
    # Several inputs are called by their names.
    call = ((), examples) if len(examples) > 1 else (tuple(examples.values()), {})
    try:
        with quiet():
            program = torch.export.export(model.eval(), *call, dynamic_shapes=dims)
            _run_doubled(program, sizes)
    except Exception as error:  # Whatever the tracer or the user's model raises.
        names = dict.fromkeys(name for dims in sizes.values() for name in dims.values() if name)
        option = f"dynamic=[{','.join(names)}]" if names else "model"
        raise UserCodeError(
            f"{option}: {name_of(model)} cannot be traced into a graph: {describe_error(error)}; "
            "use format=safetensors, or write its forward so that torch.export takes it"
            + " with any size"
            * bool(names)
        ) from error
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # It names folders of this machine.
    return program


def _run_doubled(program: ExportedProgram, sizes: OpenSizes) -> None:
    """Run a graph with its named sizes doubled, because the tracer does not prove all of them."""
    arguments, keywords = program.example_inputs
    given = [*arguments, *keywords.values()]
    for n, (traced, names) in enumerate(zip(_traced_inputs(program), sizes.values(), strict=True)):
        shape = list(given[n].shape)
        for dim in filter(names.get, names):
            shape[dim] = int(min(2 * shape[dim], _bounds(traced.shape[dim])[1]))
        given[n] = given[n].new_zeros(shape)
    named = dict(zip(reversed(keywords), reversed(given), strict=False))
    program.module()(*given[: len(arguments)], **named)


def _traced_inputs(program: ExportedProgram) -> list[Any]:
    """Return a graph's inputs, whose shapes have a symbol for each size that may vary."""
    nodes = {node.name: node.meta.get("val") for node in program.graph.nodes}
    return [nodes[name] for name in program.graph_signature.user_inputs]


def describe_inputs(
    program: ExportedProgram, inputs: Inputs, sizes: OpenSizes
) -> list[dict[str, Any]]:
    """Describe the inputs of a graph, with the name of each size that may vary, or null.

    Warns of a length that the model's code fixes.
    """
    described = []
    for one, held in zip(inputs, _traced_inputs(program), strict=True):
        shape = list(one["shape"])
        for dim, label in sizes[one["name"]].items():
            least, most = _bounds(held.shape[dim])
            if label is not None:
                shape[dim] = label
            elif least == most:
                log.warning(
                    "warning: the graph takes %s of size %d in dimension %d only, because the "
                    "model's code fixes it",
                    *(one["name"], least, dim),
                )
            elif least < (shape[dim] or 2):  # Otherwise the model reads columns by number.
                shape[dim] = None
        described.append({**one, "shape": shape})
    return described


def as_pt2(program: ExportedProgram, words: str) -> bytes:
    """Return the content of a `.pt2` file with `words` as its extra file `mpframe`."""
    file = io.BytesIO()
    torch.export.save(program, file, extra_files={KEY: words})
    return file.getvalue()


def as_onnx(program: ExportedProgram, words: str, inputs: Inputs) -> bytes:
    """Return an `.onnx` file's content: the names of sizes in `inputs`, `words` as metadata."""
    spec: Any = program.call_spec.out_spec
    by_name = spec.type is dict and spec.num_leaves == len(spec.context)
    names = spec.context if by_name else None
    sizes = {
        one["name"]: {
            k: n or "batch" for k, n in enumerate(one["shape"]) if k == 0 or type(n) is str
        }
        for one in inputs
    }
    options: Any = {"output_names": names, "dynamic_shapes": sizes}
    try:
        with quiet():
            made: Any = torch.onnx.export(program, dynamo=True, verbose=False, **options)
    except Exception as error:
        raise UserCodeError(
            f"format=onnx: the graph cannot be written as ONNX: {first_line(error):.200}; use "
            "format=torch_export or safetensors"
        ) from error
    made.model.metadata_props[KEY] = words
    for node in made.model.graph.all_nodes():
        node.metadata_props.clear()  # Stack traces, with folders of this machine.
    return bytes(made.model_proto.SerializeToString())


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
    parameters = inspect.signature(model.forward).parameters.values()
    left_out = {p.name for p in parameters if p.name in _LABELS and p.default is not p.empty}
    return [one for one in inputs if one["name"] not in left_out]


@contextmanager
def quiet() -> Iterator[None]:
    """Log nothing in the block, because the tracer writes the whole graph if it fails."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with redirect_stderr(io.StringIO()), warnings.catch_warnings(action="ignore"):
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


def load_exported(model: nn.Module, tensors: Mapping[str, Tensor], dtype: str) -> None:
    """Load weights in `dtype` into a model. CheckpointError: they are another model's."""
    try:
        model.to(DTYPES[dtype])
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise CheckpointError(
            f"model: its weights are not those of {name_of(model)}: {first_line(error)}; give the "
            "options of model that the run had"
        ) from None
