"""Models of other packages that recompute: the gradients of their plain run, without any help."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_recompute import RUNS, backward_here, backward_in_another_thread
from torch import Tensor, nn
from vocabulary import same_bits

from mpframe import Precision

TOKENS = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(0))
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32}
SIZES |= {"intermediate_size": 32, "max_position_embeddings": 16}


def language_model(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            n_embd=16, n_layer=2, n_head=2, vocab_size=32, n_positions=16
        )
        return transformers.GPT2LMHeadModel(config)
    if kind == "bert":
        return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def gradients(
    precision: Precision,
    make: Callable[[], nn.Module],
    loss_of: Callable[[nn.Module], Tensor],
    backward: Callable[[Tensor], None] = backward_here,
) -> list[Tensor]:
    model: Any = make().train()
    precision.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    torch.manual_seed(0)
    with precision.cast():
        loss = loss_of(model)
    backward(loss)
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert found
    return found


def within(precision: Precision) -> Callable[[Tensor], None]:
    """A backward pass in a block of the forward pass's precision."""

    def backward(loss: Tensor) -> None:
        with precision.cast():
            loss.backward()

    return backward


def language_loss(model: Any) -> Tensor:
    return model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
@pytest.mark.parametrize("use_reentrant", [None, True])
@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama"])
@pytest.mark.parametrize(("mode", "half", "compute"), RUNS)
def test_transformers(
    mode: str, half: str, compute: str, kind: str, use_reentrant: bool | None
) -> None:
    precision = Precision(mode, half, compute=compute)

    def checkpointed() -> nn.Module:
        model: Any = language_model(kind)
        chosen = None if use_reentrant is None else {"use_reentrant": use_reentrant}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=chosen)
        return model

    # A reentrant checkpoint adds up the gradients of its input in another order than a plain run,
    # under torch.autocast too. Its own backward pass within the block is what it is compared with.
    expected = (
        gradients(precision, checkpointed, language_loss, within(precision))
        if use_reentrant
        else gradients(precision, lambda: language_model(kind), language_loss)
    )
    found = gradients(precision, checkpointed, language_loss, backward_in_another_thread)
    assert same_bits(found, expected)


@pytest.mark.parametrize(("mode", "half", "compute"), RUNS)
def test_densenet(mode: str, half: str, compute: str) -> None:
    torchvision = pytest.importorskip("torchvision")
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))

    def net(memory_efficient: bool) -> nn.Module:
        torch.manual_seed(0)
        return torchvision.models.DenseNet(  # type: ignore[no-any-return]
            8, (2, 2), 8, bn_size=2, num_classes=4, memory_efficient=memory_efficient
        )

    precision = Precision(mode, half, compute=compute)
    plain = gradients(precision, lambda: net(False), lambda m: m(images).float().square().mean())
    efficient = gradients(
        precision,
        lambda: net(True),
        lambda m: m(images).float().square().mean(),
        backward_in_another_thread,
    )
    assert same_bits(efficient, plain)


@pytest.mark.parametrize(("mode", "half", "compute"), RUNS)
def test_diffusers(mode: str, half: str, compute: str) -> None:
    diffusers = pytest.importorskip("diffusers")
    sample = torch.rand(1, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    words = torch.rand(1, 3, 8, generator=torch.Generator().manual_seed(1))

    def net(checkpointing: bool) -> nn.Module:
        torch.manual_seed(0)
        model = diffusers.UNet2DConditionModel(
            sample_size=8,
            in_channels=2,
            out_channels=2,
            layers_per_block=1,
            block_out_channels=(8, 16),
            norm_num_groups=4,
            cross_attention_dim=8,
            attention_head_dim=4,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        )
        if checkpointing:
            model.enable_gradient_checkpointing()
        return model  # type: ignore[no-any-return]

    def loss(model: Any) -> Tensor:
        return model(sample, 1, words).sample.float().square().mean()

    precision = Precision(mode, half, compute=compute)
    plain = gradients(precision, lambda: net(False), loss)
    assert same_bits(
        gradients(precision, lambda: net(True), loss, backward_in_another_thread), plain
    )


@pytest.mark.parametrize(("mode", "half", "compute"), RUNS)
def test_reformer(mode: str, half: str, compute: str) -> None:
    """Its layers are reversible: the backward pass computes what the forward pass did not keep.

    There is no plain run to compare with: outside the block, and in another thread, its gradients
    are those of a backward pass within the block.
    """
    transformers = pytest.importorskip("transformers")

    def net() -> nn.Module:
        torch.manual_seed(0)
        config = transformers.ReformerConfig(
            attention_head_size=8,
            attn_layers=["local", "local"],
            axial_pos_embds=False,
            feed_forward_size=16,
            hidden_dropout_prob=0.0,
            local_attention_probs_dropout_prob=0.0,
            hidden_size=16,
            is_decoder=True,
            local_attn_chunk_length=4,
            max_position_embeddings=16,
            num_attention_heads=2,
            vocab_size=32,
        )
        return transformers.ReformerModelWithLMHead(config)

    precision = Precision(mode, half, compute=compute)

    found = [
        gradients(precision, net, language_loss, backward)
        for backward in (within(precision), backward_here, backward_in_another_thread)
    ]
    assert same_bits(found[1], found[0])
    assert same_bits(found[2], found[0])


@pytest.mark.parametrize(("mode", "half", "compute"), RUNS)
def test_a_hand_written_backward_pass(mode: str, half: str, compute: str) -> None:
    """YOSO's attention keeps fp32 beside half for its backward pass, and multiplies them there."""
    transformers = pytest.importorskip("transformers")

    def net() -> nn.Module:
        torch.manual_seed(0)
        sizes = {**SIZES, "use_expectation": True, "max_position_embeddings": 16}
        return transformers.YosoForMaskedLM(transformers.YosoConfig(**sizes))

    def loss(model: Any) -> Tensor:
        return model(input_ids=TOKENS, labels=TOKENS).loss

    precision = Precision(mode, half, compute=compute)
    here = gradients(precision, net, loss)
    assert same_bits(gradients(precision, net, loss, backward_in_another_thread), here)
