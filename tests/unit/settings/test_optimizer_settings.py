"""What optimizer and precision refuse."""

import pytest
from pydantic import ValidationError

from opensora_cli.settings.train import TrainSettings
from opensora_cli.settings.train_loop import OptimizerSettings, PrecisionSettings


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"schedule": "cosine", "decay_steps": "5"},
            "optimizer.decay_steps=5 has no effect with optimizer.schedule=cosine, which falls from the end of the "
            "warm-up on: use 0",
        ),
        (
            {"initial_learning_rate": "0.1", "learning_rate": "0.01"},
            "optimizer.initial_learning_rate=0.1 must be at most optimizer.learning_rate=0.01",
        ),
        (
            {"initial_learning_rate": "1e-6", "warmup_steps": "0"},
            "optimizer.initial_learning_rate=1e-06 has no effect with optimizer.warmup_steps=0: use 0, or more "
            "warmup_steps",
        ),
        (
            {"final_learning_rate": "1e-6"},
            "optimizer.final_learning_rate=1e-06 has no effect with optimizer.decay_steps=0: use 0, or more "
            "decay_steps",
        ),
        ({"name": "muon", "offload_states": "true"}, "optimizer.offload_states=true needs optimizer.name=adamw"),
        ({"beta1": "1"}, "less than 1"),
        ({"eps": "0"}, "greater than 0"),
    ],
)
def test_optimizers_that_make_no_sense(given, message):
    with pytest.raises(ValidationError) as raised:
        TrainSettings.model_validate({"target": "vae", "optimizer": given})
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"fp8_linears": "true", "compute": "fp32"},
            "precision.fp8_linears=true needs precision.compute=bf16, not fp32",
        ),
        (
            {"initial_loss_scale": "8"},
            "precision.initial_loss_scale=8 has no effect with precision.compute=bf16: use fp16",
        ),
        ({"loss_scale_window": "8", "compute": "fp32"}, "precision.loss_scale_window=8 has no effect"),
        ({"compute": "fp16", "initial_loss_scale": "0.5"}, "greater than or equal to 1"),
        ({"compute": "fp8"}, "'fp32', 'bf16' or 'fp16'"),
    ],
)
def test_precisions_that_make_no_sense(given, message):
    with pytest.raises(ValidationError) as raised:
        TrainSettings.model_validate({"target": "vae", "precision": given})
    assert message in str(raised.value)


def test_what_makes_sense():
    reference = OptimizerSettings.model_validate(
        {"learning_rate": "1e-5", "eps": "1e-15", "warmup_steps": "0", "beta2": "0.999", "offload_states": "true"}
    )
    assert (reference.learning_rate, reference.eps, reference.offload_states) == (1e-5, 1e-15, True)
    cosine = OptimizerSettings.model_validate({"schedule": "cosine", "final_learning_rate": "1e-6"})
    assert cosine.final_learning_rate == 1e-6
    assert (
        PrecisionSettings.model_validate({"compute": "fp16", "initial_loss_scale": "1024"}).initial_loss_scale == 1024
    )
    assert PrecisionSettings.model_validate({"fp8_linears": "true"}).fp8_linears


def test_products_of_8_bits_are_the_transformers():
    with pytest.raises(ValidationError, match=r"precision\.fp8_linears=true is for target=mmdit alone: use false"):
        TrainSettings.model_validate({"target": "vae", "precision": {"fp8_linears": True}})
