"""Settings of the picture that is made first, and given to the video."""

from pydantic import Field

from opensora_cli.settings.base import Section
from opensora_cli.settings.components import ModelSettings, VAESettings
from opensora_cli.settings.enums import ModelName, VAEKind


class PictureModel(ModelSettings):
    """Name and sizes of the picture's transformer. The defaults are those of the released flux1-dev."""

    name: ModelName = Field(default=ModelName.FLUX1_DEV, description="which model")
    guidance_embed: bool = Field(default=True, description="whether the model is guidance-distilled")
    cond_embed: bool = Field(default=False, description="whether the model takes reference latents")


class PictureVAE(VAESettings):
    """The picture's autoencoder. The defaults are those of the released one, which decodes a picture as a whole."""

    kind: VAEKind = Field(default=VAEKind.FLUX_AE, description="which autoencoder: hunyuan, dc_ae or flux_ae")
    spatial_tiling: bool = Field(default=False, description="decode in tiles of vae.flux_ae.tile_size pixels")


class PictureFiles(Section):
    """Where the weights of the picture's model lie; text encoders are the video's."""

    transformer: str = Field(default="flux1-dev.safetensors", min_length=1, description="its transformer")
    vae: str = Field(default="flux1-dev-ae.safetensors", min_length=1, description="its autoencoder")
    hub_repo: str = Field(default="black-forest-labs/FLUX.1-dev", min_length=1, description="Hub repository of both")


class PictureSettings(Section):
    """A picture that is made from the prompt, and given as the video's first frame. The model is by default flux1-dev.

    Steps, seed and embedded guidance are those of `sampling`.
    """

    first: bool = Field(default=False, description="make a picture first, and give it to the video as a reference")
    save: bool = Field(default=False, description="keep the picture beside the video, as NAME.picture.png")
    resolution: str = Field(
        default="768px", description="its pixel count; its shape is the video's, or the nearest that there is"
    )
    own_model: bool = Field(
        default=False, description="make it with the video's own model, as a clip of one frame; else with the following"
    )
    model: PictureModel = Field(default=PictureModel(), description="name and sizes of its transformer")
    vae: PictureVAE = Field(default=PictureVAE(), description="its autoencoder")
    files: PictureFiles = Field(default=PictureFiles(), description="where its weights lie, below the weights folder")
