"""The dtype mode with its op lists."""

from dataclasses import replace

from mpframe.config.schema import Config
from mpframe.precision import OpLists, Precision, Recipe


def build_precision(config: Config) -> Precision:
    """The dtype mode with its op lists."""
    dtype, ops = config.dtype, config.ops
    lists = OpLists.from_mapping(
        {
            "allow": ops.allow,
            "deny": ops.deny,
            "infer": ops.infer,
            "move": ops.move,
            "modules": ops.modules,
        }
    )
    return Precision(
        dtype.mode,
        dtype.half,
        ops=lists,
        compute=dtype.compute,
        master_weights={"on": True, "off": False}.get(str(dtype.master_weights), "split"),
        products=dtype.products,
        recipes={name: Recipe.from_mapping(name, node) for name, node in dtype.recipes.items()},
    )


def build_eval_precision(config: Config) -> Precision | None:
    """The mode to validate in: fp32, or fp32 weights with ops cast by the default lists."""
    dtype = config.trainer.eval_dtype
    if dtype is None:
        return None
    return Precision() if dtype == "fp32" else Precision("amp", dtype, compute=config.dtype.compute)


def in_fp32(config: Config) -> Config:
    """The same options in fp32, where neither lists nor pins cast anything."""
    return replace(config, dtype=replace(config.dtype, mode="fp32", products="none"))
