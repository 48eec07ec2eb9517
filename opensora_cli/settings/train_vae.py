"""The autoencoder's objective, and what learns against it."""

from pydantic import Field, NonNegativeInt, PositiveInt

from opensora_cli.settings.base import Section
from opensora_cli.settings.components import VAESettings
from opensora_cli.settings.enums import VAEKind


class DiscriminatorSettings(Section):
    """The discriminator: it learns to tell decoded clips from real ones, and the autoencoder to deceive it."""

    weight: float = Field(
        default=0.0, ge=0, le=10**6, description="of the adversarial term, beside what balances the gradients; 0: none"
    )
    start_step: NonNegativeInt = Field(default=0, le=10**9, description="first steps, without it")
    learning_rate: float = Field(default=1e-4, gt=0, le=1, description="of its adamw, on the plateau")
    width: int = Field(
        default=64, ge=8, le=8192, multiple_of=8, description="channels of its first layer; a multiple of 8"
    )
    layers: int = Field(default=3, ge=1, le=8, description="its layers that halve time, height and width")


class VAETrainSettings(Section):
    """The autoencoder's objective: mean absolute error, and terms with a weight each."""

    picture_steps: NonNegativeInt = Field(
        default=0, le=10**9, description="first steps, on single frames instead of clips"
    )
    picture_batch_size: PositiveInt = Field(default=32, le=4096, description="pictures of such a step")
    single_frame_share: float = Field(
        default=0.0, ge=0, le=1, description="how often a batch of clips is cut down to pictures, one frame of each"
    )
    squared_error_weight: float = Field(
        default=0.0, ge=0, le=10**6, description="of the squared error; the absolute one has 1"
    )
    kl_weight: float = Field(
        default=0.0, ge=0, le=10**6, description="of the mean divergence of one latent value, in nats"
    )
    perceptual_weight: float = Field(default=0.0, ge=0, le=10**6, description="of the perceptual distance LPIPS")
    perceptual_files: tuple[str, ...] = Field(
        default=(),
        description="weights of LPIPS: vgg16-397923af.pth of torchvision and vgg.pth of LPIPS 0.1; none: without it",
    )
    discriminator: DiscriminatorSettings = DiscriminatorSettings()
    whitening_clips: NonNegativeInt = Field(
        default=0,
        le=10**9,
        description="procedural clips by which the exported latents get mean 0 and variance 1; 0: as learnt",
    )
    export_half: bool = Field(default=False, description="export in float16 instead of float32")

    def problems(self, vae: VAESettings, *, procedural: bool) -> list[str]:
        """Return what contradicts the autoencoder or the data.

        Args:
            vae: the autoencoder.
            procedural: whether the clips are those of the procedural world.
        """
        kind = vae.kind
        rules = (
            (
                self.kl_weight > 0 and kind is VAEKind.DC_AE,
                f"train_vae.kl_weight={self.kl_weight} has no effect with vae.kind={kind}, which has no posterior: "
                "use 0",
            ),
            (
                self.perceptual_files and not self.perceptual_weight,
                f"train_vae.perceptual_files={','.join(self.perceptual_files)} has no effect with "
                "train_vae.perceptual_weight=0: use 0.5, or no files",
            ),
            (
                self.picture_steps > 0 and kind is not VAEKind.HUNYUAN,
                f"train_vae.picture_steps={self.picture_steps} is for causal autoencoders, and vae.kind={kind} is "
                "none: use 0, and train_vae.single_frame_share",
            ),
            (
                self.picture_steps > 0 and not procedural,
                f"train_vae.picture_steps={self.picture_steps} is for procedural scenes: with data.table use 0, and "
                "buckets of 1 frame instead",
            ),
            (
                self.whitening_clips > 0 and not (procedural and kind is VAEKind.HUNYUAN),
                f"train_vae.whitening_clips={self.whitening_clips} is for vae.kind=hunyuan on procedural scenes: use 0",
            ),
        )
        return [problem for broken, problem in rules if broken]
