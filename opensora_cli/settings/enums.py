"""The choices that settings offer."""

from enum import StrEnum


class ModelName(StrEnum):
    """A video model."""

    DEMO = "demo"
    OPEN_SORA_V2 = "open-sora-v2"


class ModelChoice(StrEnum):
    """What `--model` takes: a model, or the best one that this machine can run."""

    AUTO = "auto"
    DEMO = "demo"
    OPEN_SORA_V2 = "open-sora-v2"


class AspectRatio(StrEnum):
    """Width to height."""

    WIDE_2_39_1 = "2.39:1"
    WIDE_2_1 = "2:1"
    WIDE_1_85_1 = "1.85:1"
    WIDE_16_9 = "16:9"
    WIDE_8_5 = "8:5"
    WIDE_3_2 = "3:2"
    WIDE_4_3 = "4:3"
    SQUARE = "1:1"
    TALL_3_4 = "3:4"
    TALL_2_3 = "2:3"
    TALL_5_8 = "5:8"
    TALL_9_16 = "9:16"
    TALL_1_1_85 = "1:1.85"
    TALL_1_2 = "1:2"
    TALL_1_2_39 = "1:2.39"


class ConditionMode(StrEnum):
    """Which part of the video is given.

    A name says where the given frames come from (nothing, pictures, or a video), where they stand, and for `easy`
    that there are more of them.
    """

    T2V = "t2v"
    I2V_HEAD = "i2v_head"
    I2V_TAIL = "i2v_tail"
    I2V_LOOP = "i2v_loop"
    V2V_HEAD = "v2v_head"
    V2V_TAIL = "v2v_tail"
    V2V_HEAD_EASY = "v2v_head_easy"
    V2V_TAIL_EASY = "v2v_tail_easy"

    @property
    def takes_reference(self) -> bool:
        """Whether a picture or video must be given."""
        return not self.value.startswith("t2v")

    @property
    def takes_video(self) -> bool:
        """Whether the reference is read as a video, from which more than one frame is given."""
        return self.value.startswith("v2v")

    @property
    def is_loop(self) -> bool:
        """Whether both ends of the video are given."""
        return "_loop" in self.value

    @property
    def is_easy(self) -> bool:
        """Whether the longer of the two video references is given."""
        return self.value.endswith("_easy")

    @property
    def max_references(self) -> int:
        """How many files it can use: a loop takes its two ends from one file or from two."""
        if not self.takes_reference:
            return 0
        return 2 if self.is_loop else 1


class Fit(StrEnum):
    """How a reference of another shape is fitted into the video."""

    CROP = "crop"
    PAD = "pad"
    STRETCH = "stretch"


class OutputFormat(StrEnum):
    """What kind of file a result is saved as. Each is also its file ending."""

    MP4 = "mp4"
    GIF = "gif"
    WEBP = "webp"
    PNG = "png"


class DType(StrEnum):
    """The floating point type that models compute in; `auto` is bfloat16 on CUDA and float32 on a CPU."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
