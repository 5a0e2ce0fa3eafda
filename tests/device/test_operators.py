"""Operators of the asynchronous device give what the CPU gives, without a line for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from support.card import CARD, card
from support.device.pace import Pace, paced

pytestmark = pytest.mark.device

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
Y = torch.randn(8, 5, generator=torch.Generator().manual_seed(1))
IDS = torch.tensor([[1, 4, 2], [0, 3, 3]])

OPERATORS: dict[str, Callable[..., Any]] = {
    "add and a number": lambda x, y, ids: x + 2.5,
    "add and a double": lambda x, y, ids: x + torch.tensor(2.5, dtype=torch.float64),
    "integers and a number": lambda x, y, ids: ids * 0.5,
    "product": lambda x, y, ids: x @ y,
    "out=": lambda x, y, ids: torch.mm(x, y, out=torch.empty(0, device=x.device)),
    "cat": lambda x, y, ids: torch.cat([x, x * 2], dim=1),
    "cat into": lambda x, y, ids: torch.cat([x, x], out=torch.empty(12, 8, device=x.device)),
    "views": lambda x, y, ids: x.t()[1:].reshape(-1).unfold(0, 3, 2).clone(),
    "strides": lambda x, y, ids: x.as_strided((2, 3), (1, 2), 1) + 0,
    "index": lambda x, y, ids: x[ids],
    "index put": lambda x, y, ids: x.clone().index_put_((ids[0],), x.new_ones(3, 8)),
    "embedding": lambda x, y, ids: F.embedding(ids, x),
    "layer norm in bf16": lambda x, y, ids: torch.cat(
        [
            each.float().flatten()
            for each in torch.native_layer_norm(x.bfloat16(), (8,), y[:, 0].bfloat16(), None, 1e-5)
        ]
    ),
    "mean squares": lambda x, y, ids: F.mse_loss(x, x * 2),
    "smooth differences": lambda x, y, ids: F.smooth_l1_loss(x, x * 2),
    "nearly equal": lambda x, y, ids: torch.isclose(x, x * 1.1, rtol=0.2),
    "layer norm": lambda x, y, ids: F.layer_norm(x, (8,)),
    "group norm": lambda x, y, ids: F.group_norm(x[None].reshape(1, 8, 6), 2),
    "softmax": lambda x, y, ids: x.softmax(-1),
    "cross entropy": lambda x, y, ids: F.cross_entropy(x[:, :5], ids.flatten()),
    "attention": lambda x, y, ids: F.scaled_dot_product_attention(
        x[None, None], x[None, None], x[None, None], is_causal=True
    ),
    "convolution": lambda x, y, ids: F.conv1d(x[None], x[:3].reshape(2, 6, 2), padding=1),
    "sort": lambda x, y, ids: torch.stack([x.sort(-1).values, x.sort(-1).indices.float()]),
    "top": lambda x, y, ids: x.topk(2).values,
    "nonzero": lambda x, y, ids: (x > 0).nonzero(),
    "masked": lambda x, y, ids: x[x > 0],
    "unique": lambda x, y, ids: ids.unique(),
    "dtype": lambda x, y, ids: x.to(torch.bfloat16).to(torch.float64).sum(0),
    "bytes": lambda x, y, ids: x.view(torch.uint8).view(torch.float32) + 1,
    "norm": lambda x, y, ids: torch.linalg.vector_norm(x),
    "norms": lambda x, y, ids: torch.stack(torch._foreach_norm([x, y])),
    "foreach": lambda x, y, ids: torch._foreach_mul([x, x], 3.0)[1],
    "foreach copy": lambda x, y, ids: _foreach_copy(x),
    "split copy": lambda x, y, ids: _split_copy(x),
    "where": lambda x, y, ids: torch.where(x > 0, x, -x),
    "scan": lambda x, y, ids: x.cumsum(0),
    "complex": lambda x, y, ids: torch.view_as_real(torch.view_as_complex(x.view(6, 4, 2)) * 2j),
    "range": lambda x, y, ids: torch.arange(2, 9, 2, device=x.device) + ids.sum(),
    "chunk": lambda x, y, ids: torch.stack(x.chunk(2)),
}


def _foreach_copy(x: torch.Tensor) -> torch.Tensor:
    made = torch.empty(2, 6, 8, device=x.device)
    torch._foreach_copy_(list(made.unbind()), [x, x * 2])
    return made


def _split_copy(x: torch.Tensor) -> torch.Tensor:
    out = [torch.empty(6, 3, device=x.device), torch.empty(6, 5, device=x.device)]
    torch.split_with_sizes_copy(x, [3, 5], dim=1, out=out)
    return torch.cat(out, 1)


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_gives_what_the_cpu_gives(name: str) -> None:
    call = OPERATORS[name]
    expected = call(X, Y, IDS)
    with paced(Pace(held=1.0)):
        found = call(X.to(CARD), Y.to(CARD), IDS.to(CARD))
    assert found.device == CARD and found.dtype == expected.dtype
    torch.testing.assert_close(found.cpu(), expected)


def test_a_network_trains_as_on_the_cpu() -> None:
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 2))
    theirs = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 2))
    theirs.load_state_dict(ours.state_dict())
    ours.to(CARD)
    for fused in (False, True):
        mine = torch.optim.AdamW(ours.parameters(), lr=0.1, fused=fused)
        other = torch.optim.AdamW(theirs.parameters(), lr=0.1, fused=fused)
        for _ in range(3):
            ours(X.to(CARD)).square().mean().backward()
            theirs(X).square().mean().backward()
            mine.step(), other.step()
            mine.zero_grad(), other.zero_grad()
    for found, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)


def test_random_numbers_follow_from_the_seed_whatever_the_delays() -> None:
    found = []
    for held in (0.0, 1.0):
        torch.manual_seed(5)
        with paced(Pace(held=held)):
            drawn = torch.randn(9, device=CARD) + torch.rand(9, device=CARD)
            drawn = F.dropout(drawn, 0.5)
        found.append(drawn.tolist())
    assert found[0] == found[1]
    state = card.get_rng_state()
    first = torch.rand(3, device=CARD).tolist()
    card.set_rng_state(state)
    assert torch.rand(3, device=CARD).tolist() == first
    own = torch.Generator(CARD).manual_seed(3)
    again = torch.Generator(CARD).manual_seed(3)
    numbers = [torch.rand(3, device=CARD, generator=each).tolist() for each in (own, again)]
    assert numbers[0] == numbers[1]


def test_tensors_of_two_places_are_refused() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        X.to(CARD) + X


def test_a_state_dict_is_saved_and_loaded(tmp_path: Any) -> None:
    model = nn.Linear(3, 2).to(CARD)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt")
    assert loaded["weight"].device == CARD
    assert torch.equal(loaded["weight"].cpu(), model.weight.detach().cpu())
    on_host = torch.load(tmp_path / "model.pt", map_location="cpu")
    assert torch.equal(on_host["bias"], model.bias.detach().cpu())
