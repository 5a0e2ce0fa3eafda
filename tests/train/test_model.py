"""The model: what it may look at, how it starts, what it saves."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fullshard_train.seeds import generator_for
from fullshard_train.settings.config import load_config
from fullshard_train.text.model import GPT, initial_value, rotate, rotation
from fullshard_train.text.sampling import generate
from fullshard_train.training.optim import build_optimizer

CONFIG = replace(load_config([], []).model, layers=2, width=16, heads=2, context=12)


def _model(*, tied: bool = True, recompute: bool = False) -> GPT:
    model = GPT(replace(CONFIG, tied=tied), recompute=recompute)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = generator_for("test", name)
            parameter.copy_(initial_value(name, parameter.shape, layers=2, generator=generator))
    return model


def _data() -> torch.Tensor:
    return torch.randint(0, 256, (3, 12), generator=generator_for("data"))


@pytest.mark.parametrize("changed", [0, 5, 11])
def test_a_byte_changes_no_prediction_before_it_and_its_own(changed: int) -> None:
    model, data = _model(), _data()
    other = data.clone()
    other[:, changed] = (other[:, changed] + 1) % 256
    first, second = model(data), model(other)
    assert first[:, :changed].equal(second[:, :changed])
    assert not first[:, changed].equal(second[:, changed])


def test_a_prediction_depends_on_the_order_of_the_past() -> None:
    model = _model()
    assert not model(torch.tensor([[1, 2, 3]]))[0, -1].allclose(
        model(torch.tensor([[2, 1, 3]]))[0, -1]
    )


def test_scores_of_turned_vectors_depend_on_the_distance_only() -> None:
    cosine, sine = rotation(8, 4, device=torch.device("cpu"))
    query, key = torch.randn(2, 1, 4, generator=generator_for("vectors")).unbind(0)
    queries, keys = rotate(query.expand(8, 4), cosine, sine), rotate(key.expand(8, 4), cosine, sine)
    scores = queries @ keys.T
    for distance in range(-7, 8):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert scores[0, 0].item() == pytest.approx(float((query * key).sum()), rel=1e-5)


def test_a_tied_model_has_one_matrix_for_bytes_in_and_out() -> None:
    tied, free = _model(tied=True), _model(tied=False)
    assert tied.output.weight is tied.embedding.weight
    assert free.output.weight is not free.embedding.weight


def test_recomputing_activations_changes_no_gradient() -> None:
    gradients = []
    for recompute in (False, True):
        model = _model(recompute=recompute)
        model(_data()).square().mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        recomputed = gradients[1][name]
        assert gradient is not None and recomputed is not None, name
        assert gradient.equal(recomputed), name


def test_an_initial_value_depends_on_its_generator_and_name_only() -> None:
    shape = torch.Size((64, 64))
    plain = initial_value("blocks.0.mlp_in.weight", shape, layers=2, generator=generator_for(1))
    again = initial_value("blocks.1.mlp_in.weight", shape, layers=2, generator=generator_for(1))
    into_stream = initial_value("x.mlp_out.weight", shape, layers=2, generator=generator_for(1))
    assert plain.equal(again)
    assert plain.std().item() == pytest.approx(0.02, rel=0.05)
    torch.testing.assert_close(into_stream, plain / math.sqrt(4))
    norm = initial_value("norm.weight", torch.Size((8,)), layers=2, generator=generator_for(1))
    assert norm.equal(torch.ones(8))


def test_weight_decay_is_for_matrices_only_and_every_parameter_is_in_one_group() -> None:
    model = _model()
    optim = replace(load_config([], []).optim, weight_decay=0.5)
    groups = build_optimizer(model.parameters(), optim).param_groups
    assert [group["weight_decay"] for group in groups] == [0.5, 0.0]
    assert all(parameter.ndim >= 2 for parameter in groups[0]["params"])
    assert all(parameter.ndim < 2 for parameter in groups[1]["params"])
    found = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(found) == sorted(id(parameter) for parameter in model.parameters())


@pytest.mark.parametrize("name", ["muon", "soap"])
def test_matrices_are_stepped_whole_fused_ones_split_and_tables_left_to_adamw(name: str) -> None:
    model = _model()
    optim = load_config([], [f"optim.optimizer={name}", "optim.weight_decay=0.5"]).optim
    groups = build_optimizer(model.parameters(), optim).param_groups
    of = {id(p): group for group in groups for p in group["params"]}
    assert len(of) == len(list(model.parameters()))
    block = model.blocks[0]
    fused = of[id(block.get_parameter("attention_in.weight"))]
    matrix = of[id(block.get_parameter("mlp_in.weight"))]
    assert (fused["algorithm"], fused["split"]) == (name, 3)
    assert (matrix["algorithm"], matrix["split"]) == (name, None)
    table, norm = of[id(model.embedding.weight)], of[id(model.norm.weight)]
    assert table["algorithm"] == norm["algorithm"] == "adamw"
    assert [each["weight_decay"] for each in (fused, table, norm)] == [0.5, 0.5, 0.0]


def test_a_sample_starts_with_its_prompt_and_repeats_for_the_same_seed() -> None:
    model = _model()
    config = replace(load_config([], []).sample, length=20)

    def draw(seed: int) -> bytes:
        generator = generator_for(seed)
        device = torch.device("cpu")
        return generate(model, b"def ", config, context=12, generator=generator, device=device)

    assert len(draw(0)) == 24
    assert draw(0).startswith(b"def ")
    assert draw(0) == draw(0) != draw(1)
