"""Models of our own, exactly as the paper's tables have them, and small ones for tests.

Each file has `build_*(...) -> (module, args, kwargs)`, `loss(output, target)`, the mean over the samples, and
`make_batch(seed, size)`. With `with_loss=True` the module itself takes the target and returns the loss.
"""

from bapipe.torch.zoo.gnmt import GNMT, build_gnmt
from bapipe.torch.zoo.gpt import GPT, build_gpt
from bapipe.torch.zoo.resnet import ResNet50, build_resnet50
from bapipe.torch.zoo.unet import UNet, build_unet
from bapipe.torch.zoo.vgg import VGG16, build_vgg16

__all__ = [
    "GNMT",
    "GPT",
    "VGG16",
    "ResNet50",
    "UNet",
    "build_gnmt",
    "build_gpt",
    "build_resnet50",
    "build_unet",
    "build_vgg16",
]
