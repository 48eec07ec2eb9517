"""Names of training, called as the community calls them."""

import copy

import pytest
import torch
from closeness import assert_close
from tiny_autoencoders import VAES
from torch import nn

from opensora_cli.community.training import (
    LinearWarmupLR,
    create_colossalai_plugin,
    create_lr_scheduler,
    create_optimizer,
    get_batch_loss,
    prepare_visual_condition_causal,
    prepare_visual_condition_uncausal,
    set_eps,
    set_lr,
    set_warmup_steps,
    update_ema,
)
from opensora_cli.core.exceptions import RequestError
from opensora_cli.engine.components.architectures import new_autoencoder
from opensora_cli.engine.train.optimizer import rate_factor
from opensora_cli.models.vae.autoencoder import Autoencoder
from opensora_cli.settings.train_sections import OptimizerSettings


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    return model, create_optimizer(model, {"cls": "HybridAdam", "lr": 0.5, "eps": 1e-15, "weight_decay": 0.0})


def autoencoder(kind: str) -> Autoencoder:
    torch.manual_seed(0)
    return new_autoencoder(VAES[kind]).eval()


def test_the_error_of_plugins_maps_their_keywords():
    with pytest.raises(RequestError, match="create_colossalai_plugin does not exist") as caught:
        create_colossalai_plugin(plugin="hybrid", dtype="bf16", grad_clip=1.0, sp_size=2, tp_size=4, reduce_bucket=20)
    assert caught.value.hint == (
        "use osora train --set strategy=hybrid --set precision.compute=bf16 --set optimizer.max_grad_norm=1.0 "
        "--set parallel.ulysses_degree=2 --set parallel.tensor_parallel_degree=4"
    )


class TestVisualConditions:
    def test_a_causal_autoencoder_encodes_given_pictures_alone(self):
        model_ae = autoencoder("hunyuan")
        x = torch.rand(2, 3, 9, 32, 32) * 2 - 1
        x_0, cond = prepare_visual_condition_causal(x, {"i2v_head": 1}, model_ae)
        with torch.no_grad():
            assert_close(x_0, model_ae.encode(x))
            assert_close(cond[:, 1:, :1], model_ae.encode(x[:, :, :1]))
        assert cond.shape == (2, 1 + x_0.shape[1], *x_0.shape[2:])
        assert cond[:, 0].amax(dim=(0, 2, 3)).tolist() == [1, *[0] * (x_0.shape[2] - 1)]
        assert not cond[:, 1:, 1:].any()
        assert not x_0.requires_grad

    @pytest.mark.parametrize(
        ("mode", "held", "given", "given_held"),
        [
            ("i2v_head", [0, 0, 1, 2, 3, 4, 5, 6], [0], [0]),
            ("i2v_tail", [1, 2, 3, 4, 5, 6, 7, 7], [7], [7]),
            ("i2v_loop", [0, 0, 1, 2, 3, 4, 5, 5], [0, 7], [0, 5]),
            ("t2v", list(range(8)), [], []),
        ],
    )
    def test_any_other_may_hold_pictures_until_they_have_a_latent_frame(self, mode, held, given, given_held):
        model_ae = autoencoder("dc_ae")
        assert model_ae.grid.time_compression_ratio == 2
        x = torch.rand(1, 3, 8, 32, 32) * 2 - 1
        with torch.no_grad():
            for pad, frames, pictures in ((False, list(range(8)), given), (True, held, given_held)):
                x_0, cond = prepare_visual_condition_uncausal(x, {mode: 1}, model_ae, pad=pad)
                assert_close(x_0, model_ae.encode(x[:, :, frames]))
                found = cond[:, 1:, cond[0, 0].amax(dim=(1, 2)) == 1]
                assert found.shape[2] == len(pictures)
                for latents, index in zip(found.unbind(2), pictures, strict=True):
                    assert_close(latents, model_ae.encode(x[:, :, index : index + 1])[:, :, 0])


def test_trained_parameters_are_averaged():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2).requires_grad_(False))
    ema_model = copy.deepcopy(model)
    nn.init.constant_(ema_model[0].weight, 1.0)
    nn.init.constant_(ema_model[2].weight, 1.0)
    nn.init.constant_(model[0].weight, 3.0)
    ema_model[1].running_mean += 5
    update_ema(ema_model, model, optimizer=None, decay=0.75, sharded=False)
    assert ema_model[0].weight.tolist() == [[1.5, 1.5], [1.5, 1.5]]
    assert ema_model[1].running_mean.tolist() == [5, 5]
    assert ema_model[2].weight.tolist() == [[1, 1], [1, 1]]


def test_the_loss_has_their_names_and_refuses_a_mask_of_another_rank():
    model_pred, v_t = torch.ones(1, 4, 2), torch.zeros(1, 4, 2)
    assert get_batch_loss(model_pred=model_pred, v_t=v_t, masks=None).item() == 1.0
    masks = torch.zeros(1, 1, 2, 2, 2)
    masks[:, :, 0] = 1
    assert get_batch_loss(model_pred, v_t, masks=masks[:, 0]).item() == 1.0
    with pytest.raises(ValueError, match=r"\(1, 1, 2, 2, 2\) are not \(batch, frames, height, width\)"):
        get_batch_loss(model_pred, v_t, masks=masks)


def test_rates_and_eps_change_in_place():
    _, optimizer = model_and_optimizer()
    scheduler = LinearWarmupLR(optimizer, initial_lr=0.0, warmup_steps=4)
    set_lr(optimizer, scheduler, 1.0, initial_lr=0.5)
    set_warmup_steps(scheduler, 1)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 1.0
    assert (scheduler.base_lrs, scheduler.initial_lr) == ([1.0], 0.5)
    set_lr(optimizer, None, 0.25)
    set_eps(optimizer)
    assert optimizer.param_groups[0]["eps"] == 1e-15
    set_eps(optimizer, 1e-8)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["eps"]) == (0.25, 1e-8)


class TestCreateOptimizer:
    def test_known_names(self):
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        module[0].requires_grad_(False)
        config = {"cls": "HybridAdam", "lr": 1e-5, "eps": 1e-15, "weight_decay": 0.1, "adamw_mode": True}
        adamw = create_optimizer(module, config)
        group = adamw.param_groups[0]
        assert isinstance(adamw, torch.optim.AdamW)
        assert [group[name] for name in ("lr", "betas", "eps", "weight_decay")] == [1e-5, (0.9, 0.999), 1e-15, 0.1]
        assert len(group["params"]) == 2
        assert config["cls"] == "HybridAdam"

    @pytest.mark.parametrize(
        ("config", "words"),
        [
            ({"cls": "Lion"}, "cls=Lion must be"),
            ({"cls": "CPUAdam"}, "must be AdamW or HybridAdam"),
            ({"adamw_mode": False}, "adamw_mode"),
        ],
    )
    def test_what_it_does_not_know_is_refused(self, config, words):
        with pytest.raises(RequestError, match=words):
            create_optimizer(nn.Linear(2, 2), config)


def rates(scheduler: torch.optim.lr_scheduler.LRScheduler, steps: int) -> list[float]:
    seen = []
    for _ in range(steps):
        seen.append(scheduler.optimizer.param_groups[0]["lr"])
        scheduler.optimizer.step()
        scheduler.step()
    return seen


def sgd(rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)


def test_schedules_are_created_by_their_options():
    assert create_lr_scheduler(sgd(0.5), 10) is None
    warmup = create_lr_scheduler(sgd(0.5), 10, 2, 4)
    assert isinstance(warmup, LinearWarmupLR)
    assert rates(warmup, 5) == pytest.approx([1e-6 + (0.5 - 1e-6) * share for share in (0.2, 0.4, 0.6, 0.8, 1)])
    cosine = create_lr_scheduler(
        optimizer=sgd(0.5),
        num_steps_per_epoch=4,
        epochs=2,
        warmup_steps=2,
        use_cosine_scheduler=True,
        initial_lr=0.0,
    )
    assert cosine is not None
    settings = OptimizerSettings(schedule="cosine", warmup_steps=2)
    assert rates(cosine, 8) == pytest.approx([0.5 * rate_factor(settings, update, steps=8) for update in range(8)])
