"""A small model of each library whose habits once broke a cast or a master, with twenty batches.

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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STEPS = 20


@dataclass(frozen=True)
class Case:
    """What is trained.

    Attributes:
        model: fp32, on the CPU, with random weights.
        loss: loss(model, step) -> 0-d, on the batch of step 0 to STEPS - 1.
        after_step: called with the model behind every applied step.
    """

    model: nn.Module
    loss: Callable[[Any, int], Tensor]
    after_step: Callable[[Any], object] = lambda model: None


def rotary_embedding_torch() -> Case:
    from rotary_embedding_torch import RotaryEmbedding

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rotary = RotaryEmbedding(dim=8)
            self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            parts = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
            q, k = (self.rotary.rotate_queries_or_keys(part) for part in parts[:2])
            mixed = F.scaled_dot_product_attention(q, k, parts[2], is_causal=True)
            return self.out(mixed.transpose(1, 2).flatten(2))

    inputs, targets = _noise(STEPS, 2, 16, 32), _noise(STEPS, 2, 16, 32, seed=5)
    return Case(Attention(), lambda m, step: F.mse_loss(m(inputs[step]).float(), targets[step]))


def x_transformers() -> Case:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    layers = Decoder(dim=32, depth=2, heads=2, attn_dim_head=16, rotary_pos_emb=True)
    model = AutoregressiveWrapper(
        TransformerWrapper(num_tokens=32, max_seq_len=16, attn_layers=layers)
    )
    tokens = _tokens(STEPS, 2, 16)
    return Case(model, lambda m, step: m(tokens[step]))


def lightly() -> Case:
    from copy import deepcopy

    from lightly.loss import NegativeCosineSimilarity
    from lightly.models.modules import BYOLPredictionHead, BYOLProjectionHead
    from lightly.models.utils import deactivate_requires_grad, update_momentum

    class BYOL(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU())
            self.projection = BYOLProjectionHead(32, 32, 16)
            self.prediction = BYOLPredictionHead(16, 32, 16)
            self.teacher = deepcopy(nn.Sequential(self.backbone, self.projection))
            deactivate_requires_grad(self.teacher)

        def forward(self, view: Tensor, other: Tensor) -> Tensor:
            with torch.no_grad():
                wanted = self.teacher(other)
            return loss(self.prediction(self.projection(self.backbone(view))), wanted)

    def move(model: Any) -> None:
        update_momentum(model.backbone, model.teacher[0], m=0.99)
        update_momentum(model.projection, model.teacher[1], m=0.99)

    loss = NegativeCosineSimilarity()
    views, others = _noise(STEPS, 16, 3, 8, 8), _noise(STEPS, 16, 3, 8, 8, seed=5)
    return Case(BYOL(), lambda m, step: m(views[step], others[step]), move)


def pytorch_metric_learning() -> Case:
    from pytorch_metric_learning.losses import ArcFaceLoss

    class Embedder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
            self.head = ArcFaceLoss(num_classes=4, embedding_size=16)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return self.head(self.body(x), labels)

    inputs, labels = _noise(STEPS, 16, 16), _tokens(STEPS, 16, top=4)
    return Case(Embedder(), lambda m, step: m(inputs[step], labels[step]))


def nflows() -> Case:
    from nflows.distributions import StandardNormal
    from nflows.flows import Flow
    from nflows.transforms import (
        ActNorm,
        CompositeTransform,
        MaskedAffineAutoregressiveTransform,
        ReversePermutation,
    )

    class LogProbability(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = []
            for _ in range(2):
                layers += [ActNorm(4), ReversePermutation(4)]
                layers.append(MaskedAffineAutoregressiveTransform(4, hidden_features=16))
            self.flow = Flow(CompositeTransform(layers), StandardNormal([4]))

        def forward(self, x: Tensor) -> Tensor:
            return -self.flow.log_prob(x).mean()

    inputs = _noise(STEPS, 32, 4)
    return Case(LogProbability(), lambda m, step: m(2 * inputs[step] + 1))


def peft() -> Case:
    from peft import LoraConfig, get_peft_model

    case = transformers()
    options = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    return Case(get_peft_model(case.model, options), case.loss)  # type: ignore[arg-type]


def torch_geometric() -> Case:
    from torch_geometric.nn.models import GAT

    model = GAT(in_channels=16, hidden_channels=16, num_layers=2, out_channels=4, heads=2)
    edges, nodes = _tokens(STEPS, 2, 64, top=24), _noise(STEPS, 24, 16)
    labels = _tokens(STEPS, 24, top=4, seed=5)

    def loss(model: Any, step: int) -> Tensor:
        return F.cross_entropy(model(nodes[step], edges[step]).float(), labels[step])

    return Case(model, loss)


def diffusers() -> Case:
    from diffusers_models import build

    model, named = build("UNet2DConditionModel").model, build("UNet2DConditionModel").named
    assert named is not None
    noise = _noise(STEPS, *named["sample"].shape)

    def loss(model: Any, step: int) -> Tensor:
        given = {**named, "sample": named["sample"] + noise[step]}
        return F.mse_loss(model(**given).sample.float(), noise[step])

    return Case(model, loss)


def transformers() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    options = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        pad_token_id=0,
    )
    tokens = _tokens(STEPS, 2, 64)

    def loss(model: Any, step: int) -> Tensor:
        # Far along the text, where positions in half would be off by whole turns.
        places = torch.arange(900, 964).expand(2, -1)
        result: Tensor = model(tokens[step], position_ids=places, labels=tokens[step]).loss
        return result

    return Case(LlamaForCausalLM(options).train(), loss)


def e3nn() -> Case:
    from e3nn import o3

    class Equivariant(nn.Module):
        """A convolution over points: a network of distances gives the weights of the product."""

        def __init__(self) -> None:
            super().__init__()
            self.product = o3.FullyConnectedTensorProduct(
                "4x0e + 2x1o", "0e + 1o + 2e", "4x0e + 1o", shared_weights=False
            )
            count = self.product.weight_numel
            self.weights = nn.Sequential(nn.Linear(1, 16), nn.SiLU(), nn.Linear(16, count))

        def forward(self, x: Tensor, place: Tensor) -> Tensor:
            weights = self.weights(place.norm(dim=-1, keepdim=True))
            with torch.autocast("cpu", enabled=False):  # Its generated code takes one dtype.
                sphere = o3.spherical_harmonics("0e + 1o + 2e", place, normalize=True)
                result: Tensor = self.product(x, sphere, weights.float())
            return result

    inputs, places = _noise(STEPS, 32, 10), _noise(STEPS, 32, 3, seed=5)
    targets = _noise(STEPS, 32, 7, seed=8)

    def loss(model: Any, step: int) -> Tensor:
        return F.mse_loss(model(inputs[step], places[step]).float(), targets[step])

    return Case(Equivariant(), loss)


def gpytorch() -> Case:
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

    class Deep(nn.Module):
        """A Gaussian process over the features of a network: deep kernel learning."""

        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
            self.process, self.likelihood = Process(), gp.likelihoods.GaussianLikelihood()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            features = self.features(x)
            bound = gp.mlls.VariationalELBO(self.likelihood, self.process, num_data=64)
            with torch.autocast("cpu", enabled=False):  # A factorisation in half may not exist.
                result: Tensor = -bound(self.process(features.float()), y)
            return result

    inputs = _noise(STEPS, 32, 4)
    return Case(Deep(), lambda m, step: m(inputs[step], inputs[step].sum(-1).sin()))


def vit_pytorch() -> Case:
    from vit_pytorch import ViT

    model = ViT(
        image_size=16, patch_size=4, num_classes=4, dim=32, depth=2, heads=2, mlp_dim=64, channels=1
    )
    inputs, labels = _noise(STEPS, 8, 1, 16, 16), _tokens(STEPS, 8, top=4)
    return Case(model, lambda m, step: F.cross_entropy(m(inputs[step]).float(), labels[step]))


LIBRARIES: dict[str, Callable[[], Case]] = {
    make.__name__: make
    for make in (
        *(rotary_embedding_torch, x_transformers, lightly, pytorch_metric_learning, nflows, peft),
        *(torch_geometric, diffusers, transformers, e3nn, gpytorch, vit_pytorch),
    )
}


def _noise(*shape: int, seed: int = 4) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _tokens(*shape: int, top: int = 32, seed: int = 6) -> Tensor:
    return torch.randint(0, top, shape, generator=torch.Generator().manual_seed(seed))
