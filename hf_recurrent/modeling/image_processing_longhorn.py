"""The image processor of Vision Longhorn: images of any size to `pixel_values`."""

from PIL.Image import Resampling
from transformers.image_processing_backends import PilBackend
from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD


class LonghornImageProcessor(PilBackend):
    """
    Resizes (bicubic), crops the centre, divides by 255 and normalises: by default as Vision Mamba is evaluated on
    ImageNet, with the shorter edge at 256 pixels, the middle 224 of which are kept. All fields are those of
    Transformers' image processors; it needs Pillow and no torchvision.

    For a model of other images, say of grey ones of 28 x 28 pixels:

        LonghornImageProcessor(size=28, do_center_crop=False, do_convert_rgb=False, image_mean=[0.5], image_std=[0.5])
    """

    do_convert_rgb = True
    do_resize = True
    size = {"shortest_edge": 256}
    resample = Resampling.BICUBIC
    do_center_crop = True
    crop_size = {"height": 224, "width": 224}
    do_rescale = True
    do_normalize = True
    image_mean = IMAGENET_DEFAULT_MEAN
    image_std = IMAGENET_DEFAULT_STD
