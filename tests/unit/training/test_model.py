"""The network of the usual MNIST example: its files load elsewhere, and others' load here."""

import hashlib

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchvision.transforms.functional import normalize

from elastic_mnist.training.model import ConvNet, SeededDropout, build, normalise, weights_sha256

KEYS = [
    "features.0.weight",
    "features.0.bias",
    "features.2.weight",
    "features.2.bias",
    "classifier.0.weight",
    "classifier.0.bias",
    "classifier.3.weight",
    "classifier.3.bias",
]


class UsualNet(nn.Module):
    """The network as an MNIST script writes it, with torch's own dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25)
        )
        self.classifier = nn.Sequential(nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10))

    def forward(self, images: Tensor) -> Tensor:
        """Return log-probabilities."""
        hidden: Tensor = self.features(images)
        return torch.log_softmax(self.classifier(torch.flatten(hidden, 1)), dim=1)


@pytest.fixture
def images() -> Tensor:
    """A few random images, as the network takes them."""
    return torch.randn(5, 1, 28, 28, generator=torch.Generator().manual_seed(1))


def test_the_network_has_the_documented_number_of_parameters() -> None:
    """1,199,882."""
    assert sum(parameter.numel() for parameter in build(0).parameters()) == 1_199_882


def test_the_state_dict_has_the_documented_keys_and_no_others() -> None:
    """features.{0,2} and classifier.{0,3}, weight and bias."""
    assert list(build(0).state_dict()) == KEYS


def test_our_weights_serve_the_usual_network(images: Tensor) -> None:
    """Its strict load takes our state_dict, and in eval mode it gives our log-probabilities."""
    ours, usual = build(3), UsualNet().eval()
    usual.load_state_dict(ours.state_dict(), strict=True)
    torch.testing.assert_close(usual(images), ours(images))


def test_the_usual_networks_weights_serve_ours(images: Tensor) -> None:
    """Our strict load takes its state_dict, and gives its log-probabilities in eval mode."""
    usual, ours = UsualNet().eval(), ConvNet()
    ours.load_state_dict(usual.state_dict(), strict=True)
    torch.testing.assert_close(ours(images), usual(images))


def test_the_output_is_a_distribution_over_the_digits(images: Tensor) -> None:
    """(n, 10) log-probabilities whose exponentials sum up to 1."""
    outputs = build(0)(images)
    assert outputs.shape == (5, 10)
    torch.testing.assert_close(outputs.exp().sum(dim=1), torch.ones(5))


def test_equal_seeds_build_equal_weights() -> None:
    """Twice the same seed, bit for bit the same weights."""
    assert all(torch.equal(*pair) for pair in zip(build(3).parameters(), build(3).parameters(), strict=True))


def test_other_seeds_build_other_weights() -> None:
    """No tensor is the same under another seed."""
    assert not any(torch.equal(*pair) for pair in zip(build(3).parameters(), build(4).parameters(), strict=True))


def test_the_initial_weights_are_those_that_torch_gives_the_usual_network() -> None:
    """After manual_seed the usual network has the very weights that `build` has."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        usual = UsualNet()
    assert all(torch.equal(*pair) for pair in zip(usual.parameters(), build(3).parameters(), strict=True))


def test_building_leaves_the_process_random_state_alone() -> None:
    """Torch's global generator stands where it stood."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)
        before = torch.get_rng_state()
        build(3)
        assert torch.equal(torch.get_rng_state(), before)


def test_without_a_generator_nothing_is_random(images: Tensor) -> None:
    """Twice the same images, bit for bit the same output, in train mode too."""
    model = build(0).train()
    assert torch.equal(model(images), model(images))


def test_with_a_generator_its_seed_decides(images: Tensor) -> None:
    """Generators of equal seeds give equal outputs."""
    model = build(0)
    first, second = (model(images, torch.Generator().manual_seed(7)) for _ in range(2))
    assert torch.equal(first, second)


def test_with_another_generator_the_output_is_another(images: Tensor) -> None:
    """Dropout is really done."""
    model = build(0)
    assert not torch.equal(
        model(images, torch.Generator().manual_seed(7)), model(images, torch.Generator().manual_seed(8))
    )


def test_eval_mode_does_not_switch_dropout(images: Tensor) -> None:
    """The generator alone says whether there is dropout."""
    model = build(0).eval()
    assert not torch.equal(model(images, torch.Generator().manual_seed(7)), model(images))


def test_dropout_draws_from_the_given_generator_alone(images: Tensor) -> None:
    """Torch's global generator stands where it stood."""
    before = torch.get_rng_state()
    build(0)(images, torch.Generator().manual_seed(7))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("probability", [0.25, 0.5])
def test_dropout_zeroes_the_share_that_it_says(probability: float) -> None:
    """Of 100,000 values, the share of zeros is the probability, within five standard deviations."""
    outputs = SeededDropout(probability)(torch.ones(100_000), torch.Generator().manual_seed(1))
    deviation = (probability * (1 - probability) / 100_000) ** 0.5
    assert float((outputs == 0).float().mean()) == pytest.approx(probability, abs=5 * deviation)


@pytest.mark.parametrize("probability", [0.25, 0.5])
def test_dropout_scales_the_others_up(probability: float) -> None:
    """Each value that is kept is divided by the probability to keep it."""
    outputs = SeededDropout(probability)(torch.full((1000,), 3.0), torch.Generator().manual_seed(1))
    torch.testing.assert_close(outputs[outputs != 0].unique(), torch.tensor([3 / (1 - probability)]))


def test_pixels_are_normalised_as_torchvision_does() -> None:
    """Scaled to 0..1, less 0.1307, over 0.3081, as fp32 of shape (n, 1, 28, 28)."""
    pixels = torch.arange(3 * 28 * 28).remainder(256).to(torch.uint8).reshape(3, 28, 28)
    wanted = torch.stack([normalize(image[None].float() / 255, [0.1307], [0.3081]) for image in pixels])
    torch.testing.assert_close(normalise(pixels), wanted)


def test_normalising_leaves_the_pixels_as_they_are() -> None:
    """The data set is not changed by its use."""
    pixels = torch.full((2, 28, 28), 200, dtype=torch.uint8)
    normalise(pixels)
    assert bool((pixels == 200).all())


def numpys_digest(state_dict: dict[str, Tensor]) -> str:
    """Compute the digest as the documentation says it, with numpy's own little-endian bytes."""
    digest = hashlib.sha256()
    for key in sorted(state_dict):
        values = np.array(state_dict[key].tolist(), dtype=np.dtype(np.float32).newbyteorder("<"))
        digest.update(key.encode("utf-8") + values.tobytes(order="C"))
    return digest.hexdigest()


def test_the_digest_of_the_weights_can_be_recomputed_by_anyone() -> None:
    """SHA-256 over keys in sorted order, each followed by its tensor's little-endian bytes."""
    state_dict = build(3).state_dict()
    assert weights_sha256(state_dict) == numpys_digest(state_dict)


def test_the_digest_does_not_depend_on_the_order_of_the_keys() -> None:
    """A state_dict in another order has the same digest."""
    state_dict = build(3).state_dict()
    assert weights_sha256(dict(reversed(state_dict.items()))) == weights_sha256(state_dict)


def test_the_digest_does_not_depend_on_strides() -> None:
    """A tensor that is not contiguous counts by its values."""
    values = torch.arange(6.0).reshape(2, 3)
    assert weights_sha256({"a": values.t().contiguous().t()}) == weights_sha256({"a": values})


@pytest.mark.parametrize("key", KEYS)
def test_the_digest_hangs_on_every_tensor(key: str) -> None:
    """The last bit of one value of any tensor changes it."""
    changed = build(3).state_dict()
    flat = changed[key].view(-1)
    flat[-1] = torch.nextafter(flat[-1], torch.tensor(9.0))
    assert weights_sha256(changed) != weights_sha256(build(3).state_dict())
