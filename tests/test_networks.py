"""The networks of the examples: shapes, numbers of parameters, and initial weights."""

import pytest
import torch
from torch import nn

from ddp_loop.networks import denoising_autoencoder, digit_classifier, surface_network


def parameters_of(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


@pytest.mark.covers("B1")
def test_the_digit_network_has_123_090_parameters_in_14_tensors_and_6_state_tensors() -> None:
    network = digit_classifier()
    assert parameters_of(network) == 123_090
    assert len(list(network.parameters())) == 14
    assert sum(buffer.is_floating_point() for buffer in network.buffers()) == 6


def test_a_digit_classifier_of_another_width_has_so_many_channels() -> None:
    network = digit_classifier(classes=3, width=4)
    assert network(torch.zeros(2, 1, 28, 28)).shape == (2, 3)
    assert {tuple(one.shape[:1]) for one in network[:9].parameters()} == {(4,)}


@pytest.mark.covers("B1")
def test_the_digit_network_has_three_normed_convolutions_and_one_linear_layer() -> None:
    network = digit_classifier()
    block = [nn.Conv2d, nn.BatchNorm2d, nn.ReLU]
    assert [type(layer) for layer in network] == [*block, *block, *block, type(network[9]), nn.Linear]
    shapes = [tuple(layer.weight.shape) for layer in network if isinstance(layer, nn.Conv2d | nn.Linear)]
    assert shapes == [(20, 1, 5, 5), (20, 20, 3, 3), (20, 20, 3, 3), (10, 20 * 24 * 24)]
    images = torch.rand(3, 1, 28, 28)
    # Only the first convolution has no padding: 28 - 5 + 1 = 24.
    assert network[:3](images).shape == network[:9](images).shape == (3, 20, 24, 24)
    assert network(images).shape == (3, 10)


@pytest.mark.covers("J12")
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("samples", [3, 0])
def test_flattened_values_are_those_of_torch_and_their_gradient_has_the_format_of_the_values(
    memory_format: torch.memory_format, samples: int
) -> None:
    given = torch.randn(samples, 4, 3, 3).contiguous(memory_format=memory_format)
    values, weight = given.clone().requires_grad_(), torch.randn(samples, 36)
    gradients: list[torch.Tensor] = []
    for flatten in (digit_classifier()[9], nn.Flatten()):
        flat = flatten(values)
        assert torch.equal(flat, given.flatten(1))
        gradients += torch.autograd.grad((flat.square() * weight).sum(), values, create_graph=True)
    assert torch.equal(*gradients)
    assert gradients[0].is_contiguous(memory_format=memory_format)
    second = [torch.autograd.grad(one.square().sum(), values)[0] for one in gradients]
    assert torch.equal(*second)


def test_the_autoencoder_has_12_609_parameters_and_72_weights_in_its_first_convolution() -> None:
    network = denoising_autoencoder()
    assert parameters_of(network) == 12_609
    first = network[0]
    assert isinstance(first, nn.Conv2d)
    assert first.weight.numel() == 72


def test_the_autoencoder_squeezes_32x32_into_4x4_and_back_and_clips_at_0_and_1() -> None:
    network = denoising_autoencoder()
    images = 100 * torch.randn(16, 1, 32, 32)
    assert network[:9](images).shape == (16, 32, 4, 4)
    cleaned = network(images)
    assert cleaned.shape == images.shape
    end = network[15]
    assert isinstance(end, nn.Conv2d)
    nn.init.normal_(end.weight, std=100)
    assert torch.equal(network(images), network[:16](images).clamp(0, 1))
    assert network(images).min() == 0
    assert network(images).max() == 1


def test_the_autoencoder_starts_with_a_gradient_in_every_tensor_whatever_the_seed() -> None:
    # With torch's default for the last bias nearly half of the seeds give 0 everywhere; here none of twenty does.
    images = torch.rand(8, 1, 32, 32)
    for seed in range(20):
        torch.manual_seed(seed)
        network = denoising_autoencoder()
        network(images).square().mean().backward()
        assert all(p.grad is not None and p.grad.abs().max() > 0 for p in network.parameters()), seed


@pytest.mark.covers("B3")
@pytest.mark.parametrize("linear_end", [False, True])
def test_the_surface_network_has_171_parameters_with_either_end(linear_end: bool) -> None:
    network = surface_network(linear_end)
    assert parameters_of(network) == 171
    widths = [(layer.in_features, layer.out_features) for layer in network if isinstance(layer, nn.Linear)]
    assert widths == [(2, 20), (20, 5), (5, 1)]
    assert network(torch.zeros(4, 2)).shape == (4, 1)
    assert [type(layer) for layer in list(network)[1::2]] == [nn.ReLU] * (2 if linear_end else 3)


@pytest.mark.covers("B3")
def test_the_surface_network_has_negative_outputs_only_with_a_linear_end() -> None:
    networks = {linear_end: surface_network(linear_end) for linear_end in (False, True)}
    for network in networks.values():
        end = [layer for layer in network if isinstance(layer, nn.Linear)][-1]
        nn.init.zeros_(end.weight)
        nn.init.constant_(end.bias, -1.0)
    heights = {linear_end: network(torch.zeros(1, 2)).item() for linear_end, network in networks.items()}
    assert heights == {False: 0.0, True: -1.0}


@pytest.mark.parametrize("make", [digit_classifier, denoising_autoencoder, surface_network])
def test_a_network_depends_on_the_seed(make: type[nn.Module]) -> None:
    def weights(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return nn.utils.parameters_to_vector(make().parameters())

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))
