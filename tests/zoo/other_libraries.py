"""A small model of each library whose habits once broke a cast or a master, and twenty steps.

fp32 must give torch's losses bit for bit. In the other modes the losses may be as far from fp32 as
torch's own are, as in comparison.py:

    rms(loss - loss_fp32)  <=  4 max(under torch.autocast bfloat16, with weights rounded to it)

What each of them does that a plain model does not:

    rotary_embedding_torch     keeps a cache in a buffer and its length in a plain attribute
    x_transformers             switches autocast off around its rotary positions
    lightly                    moves a frozen momentum copy after each step
    pytorch_metric_learning    casts a parameter's `.data` to its input's dtype in the forward pass
    nflows                     fills parameters by `.data` in its first forward pass
    peft                       trains adapters beside frozen weights
    torch_geometric            scatters messages by index
    diffusers                  asks for fp32 in time embeddings and norms
    transformers               computes rotary positions and routers with autocast switched off
    e3nn                       generates code that takes one dtype, behind autocast switched off
    gpytorch                   factorises matrices likewise, fills parameters in the first pass
    vit_pytorch                rearranges with einops, keeps a position embedding
"""

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from comparison import FACTOR, MODES
from torch import Tensor, nn
from training import AUTOCAST, Steps, by_mpframe, by_torch, round_weights

STEPS = 20


@dataclass(frozen=True)
class Case:
    """What is trained: an fp32 model on the CPU, and what it needs.

    loss(model, step) is that of a batch of its own. after_step is called with the model behind
    every applied step.
    """

    model: nn.Module
    loss: Callable[[Any, int], Tensor]
    after_step: Callable[[Any], object] = lambda model: None


class _Net(nn.Module):
    """Modules by their names, and forward(net, *inputs)."""

    def __init__(self, forward: Callable[..., Tensor], **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self._called = forward

    def forward(self, *inputs: Tensor) -> Tensor:
        return self._called(self, *inputs)


def _fitted(model: nn.Module, *inputs: Tensor, to: Tensor, loss: Any = F.mse_loss) -> Case:
    """The distance of the outputs, in fp32, to the targets `to`."""
    return Case(model, lambda m, n: loss(m(*(own[n] for own in inputs)).float(), to[n]))


def _noise(*shape: int, seed: int = 4) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _tokens(*shape: int, top: int = 32, seed: int = 6) -> Tensor:
    return torch.randint(0, top, shape, generator=torch.Generator().manual_seed(seed))


def rotary_embedding_torch() -> Case:
    from rotary_embedding_torch import RotaryEmbedding

    def forward(net: Any, x: Tensor) -> Tensor:
        parts = net.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        q, k = (net.rotary.rotate_queries_or_keys(part) for part in parts[:2])
        mixed = F.scaled_dot_product_attention(q, k, parts[2], is_causal=True)
        return net.out(mixed.transpose(1, 2).flatten(2))

    rotary = RotaryEmbedding(dim=8)
    net = _Net(forward, rotary=rotary, qkv=nn.Linear(32, 96), out=nn.Linear(32, 32))
    return _fitted(net, _noise(STEPS, 2, 16, 32), to=_noise(STEPS, 2, 16, 32, seed=5))


def x_transformers() -> Case:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    layers = Decoder(dim=32, depth=2, heads=2, attn_dim_head=16, rotary_pos_emb=True)
    inner = TransformerWrapper(num_tokens=32, max_seq_len=16, attn_layers=layers)
    tokens = _tokens(STEPS, 2, 16)
    return Case(AutoregressiveWrapper(inner), lambda m, step: m(tokens[step]))


def lightly() -> Case:
    from copy import deepcopy

    from lightly.loss import NegativeCosineSimilarity
    from lightly.models import modules, utils

    def forward(net: Any, view: Tensor, other: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = net.teacher(other)
        return loss(net.prediction(net.projection(net.backbone(view))), wanted)

    def move(model: Any) -> None:
        utils.update_momentum(model.backbone, model.teacher[0], m=0.99)
        utils.update_momentum(model.projection, model.teacher[1], m=0.99)

    loss = NegativeCosineSimilarity()
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU())
    projection = modules.BYOLProjectionHead(32, 32, 16)
    prediction = modules.BYOLPredictionHead(16, 32, 16)
    teacher = deepcopy(nn.Sequential(backbone, projection))
    utils.deactivate_requires_grad(teacher)
    net = _Net(
        forward, backbone=backbone, projection=projection, prediction=prediction, teacher=teacher
    )
    views, others = _noise(STEPS, 16, 3, 8, 8), _noise(STEPS, 16, 3, 8, 8, seed=5)
    return Case(net, lambda m, step: m(views[step], others[step]), move)


def pytorch_metric_learning() -> Case:
    from pytorch_metric_learning.losses import ArcFaceLoss

    net = _Net(
        lambda net, x, labels: net.head(net.body(x), labels),
        body=nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)),
        head=ArcFaceLoss(num_classes=4, embedding_size=16),
    )
    inputs, labels = _noise(STEPS, 16, 16), _tokens(STEPS, 16, top=4)
    return Case(net, lambda m, step: m(inputs[step], labels[step]))


def nflows() -> Case:
    from nflows import transforms
    from nflows.distributions import StandardNormal
    from nflows.flows import Flow

    layers = []
    for _ in range(2):
        layers += [transforms.ActNorm(4), transforms.ReversePermutation(4)]
        layers.append(transforms.MaskedAffineAutoregressiveTransform(4, hidden_features=16))
    flow = Flow(transforms.CompositeTransform(layers), StandardNormal([4]))
    net = _Net(lambda net, x: -net.flow.log_prob(x).mean(), flow=flow)
    inputs = _noise(STEPS, 32, 4)
    return Case(net, lambda m, step: m(2 * inputs[step] + 1))


def peft() -> Case:
    from peft import LoraConfig, get_peft_model

    case = transformers()
    options = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    return Case(get_peft_model(case.model, options), case.loss)


def torch_geometric() -> Case:
    from torch_geometric.nn.models import GAT

    model = GAT(in_channels=16, hidden_channels=16, num_layers=2, out_channels=4, heads=2)
    edges, nodes = _tokens(STEPS, 2, 64, top=24), _noise(STEPS, 24, 16)
    labels = _tokens(STEPS, 24, top=4, seed=5)
    return _fitted(model, nodes, edges, to=labels, loss=F.cross_entropy)


def diffusers() -> Case:
    from diffusers_models import build

    example = build("UNet2DConditionModel")
    named: Any = example.named
    noise = _noise(STEPS, *named["sample"].shape)

    def loss(model: Any, step: int) -> Tensor:
        given = {**named, "sample": named["sample"] + noise[step]}
        return F.mse_loss(model(**given).sample.float(), noise[step])

    return Case(example.model, loss)


def transformers() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    options = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024, pad_token_id=0,
    )  # fmt: skip
    tokens = _tokens(STEPS, 2, 64)
    # Far along the text, where positions in half would be off by whole turns.
    places = torch.arange(900, 964).expand(2, -1)
    return Case(
        LlamaForCausalLM(options).train(),
        lambda m, step: m(tokens[step], position_ids=places, labels=tokens[step]).loss,
    )


def e3nn() -> Case:
    """A convolution over points: a network of distances gives the weights of the product."""
    from e3nn import o3

    def forward(net: Any, x: Tensor, place: Tensor) -> Tensor:
        weights = net.weights(place.norm(dim=-1, keepdim=True))
        with torch.autocast("cpu", enabled=False):  # Its generated code takes one dtype.
            sphere = o3.spherical_harmonics("0e + 1o + 2e", place, normalize=True)
            return net.product(x, sphere, weights.float())

    kinds = "4x0e + 2x1o", "0e + 1o + 2e", "4x0e + 1o"
    product = o3.FullyConnectedTensorProduct(*kinds, shared_weights=False)
    last = nn.Linear(16, product.weight_numel)
    net = _Net(forward, product=product, weights=nn.Sequential(nn.Linear(1, 16), nn.SiLU(), last))
    inputs, places = _noise(STEPS, 32, 10), _noise(STEPS, 32, 3, seed=5)
    return _fitted(net, inputs, places, to=_noise(STEPS, 32, 7, seed=8))


def gpytorch() -> Case:
    """A Gaussian process over the features of a network: deep kernel learning."""
    import gpytorch as gp

    class Process(gp.models.ApproximateGP):  # type: ignore[misc]
        def __init__(self) -> None:
            points = torch.linspace(-2, 2, 8).unsqueeze(-1)
            distribution = gp.variational.CholeskyVariationalDistribution(8)
            super().__init__(gp.variational.VariationalStrategy(self, points, distribution))
            self.mean_module = gp.means.ConstantMean()
            self.covariance = gp.kernels.ScaleKernel(gp.kernels.RBFKernel())

        def forward(self, x: Tensor) -> Any:
            return gp.distributions.MultivariateNormal(self.mean_module(x), self.covariance(x))

    def forward(net: Any, x: Tensor) -> Tensor:
        features = net.features(x)
        bound = gp.mlls.VariationalELBO(net.likelihood, net.process, num_data=64)
        with torch.autocast("cpu", enabled=False):  # A factorisation in half may not exist.
            return -bound(net.process(features.float()), x.sum(-1).sin())

    features = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    likelihood = gp.likelihoods.GaussianLikelihood()
    net = _Net(forward, features=features, process=Process(), likelihood=likelihood)
    inputs = _noise(STEPS, 32, 4)
    return Case(net, lambda m, step: m(inputs[step]))


def vit_pytorch() -> Case:
    from vit_pytorch import ViT

    sizes = {"image_size": 16, "patch_size": 4, "num_classes": 4, "dim": 32, "depth": 2}
    model = ViT(**sizes, heads=2, mlp_dim=64, channels=1)
    labels = _tokens(STEPS, 8, top=4)
    return _fitted(model, _noise(STEPS, 8, 1, 16, 16), to=labels, loss=F.cross_entropy)


LIBRARIES: dict[str, Callable[[], Case]] = {
    make.__name__: make
    for make in (
        *(rotary_embedding_torch, x_transformers, lightly, pytorch_metric_learning, nflows, peft),
        *(torch_geometric, diffusers, transformers, e3nn, gpytorch, vit_pytorch),
    )
}


def differences(name: str) -> list[str]:
    """Return a line for each mode in which the library's model does not train as torch does."""
    plain = _by_torch(_made(name), nullcontext)
    allowed = FACTOR * max(_torchs_own(name, plain))
    found = []
    for mode, (kind, half) in MODES.items():
        case = _made(name)
        try:
            losses = by_mpframe(_steps(case), kind, half, partial(_forward, case)).losses
        except Exception as error:
            found.append(f"{mode}: {type(error).__name__}: {str(error).splitlines()[0]}")
            continue
        size = _distance(losses, plain)
        if kind == "fp32" and losses != plain:
            found.append("fp32 is not bit for bit torch's")
        elif not size <= allowed:
            found.append(f"{mode}: {size:.2g} from fp32, allowed {allowed:.2g}")
    return found


def _torchs_own(name: str, plain: list[float]) -> Iterator[float]:
    """Yield how far torch is from fp32 with rounded weights, and under autocast if that runs."""
    rounded = _made(name)
    round_weights(rounded.model)
    yield _distance(_by_torch(rounded, nullcontext), plain)
    with suppress(RuntimeError):
        yield _distance(_by_torch(_made(name), AUTOCAST), plain)


def _made(name: str) -> Case:
    torch.manual_seed(0)
    return LIBRARIES[name]()


def _by_torch(case: Case, context: Callable[[], Any]) -> list[float]:
    return by_torch(_steps(case), context).losses


def _steps(case: Case) -> Steps:
    return Steps(case.model, partial(_forward, case), STEPS, case.after_step)


def _forward(case: Case, model: Any, step: int = 0) -> Any:
    torch.manual_seed(step)
    return case.loss(model, step)


def _distance(losses: list[float], plain: list[float]) -> float:
    """Return the root mean square of the differences."""
    squares = [(a - b) ** 2 for a, b in zip(losses, plain, strict=True)]
    return math.sqrt(sum(squares) / len(squares))
