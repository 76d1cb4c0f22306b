"""A head start for copying: a previous-token head and an induction head, written into the weights once.

Copying (names, words, tool arguments) needs two layers to work together: a head that looks at the token before, and one
that looks for places whose token before was the present one (Olsson and others, https://arxiv.org/abs/2209.11895).
Small models find this late, and suddenly; here it is given, in a window layer and the full layer after it. What is
linear in it (which directions say the token, which are free) is fitted to a batch of data by least squares.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tools.demo.network import Attention, Batch, Network, rms_norm

PREVIOUS, INDUCTION = 2, 3  # the layers
SHARPNESS = 300.0  # of the previous-token head: query times key, per rotated pair
GAIN = 2.5  # of the induction head, for codes of unit variance
WRITTEN = 8.0  # how strongly the previous token's code is written
BOOST = 6.0  # what the induction head adds to the logit of the token it has found


def rows_of(attention: Attention, part: str, head: int) -> slice:
    """The rows of the fused qkv that hold one head's q, k or v."""
    s = attention.shape
    heads, kv = s.num_heads // s.chunks, attention.kv // s.chunks
    base, width, per_chunk = {
        "q": (0, s.head_dim, heads),
        "k": (heads * s.head_dim, s.head_dim, kv),
        "v": ((heads + kv) * s.head_dim, s.v_head_dim, kv),
    }[part]
    chunk_rows = attention.qkv_proj.shape[0] // s.chunks
    start = head // per_chunk * chunk_rows + base + head % per_chunk * width
    return slice(start, start + width)


def inputs(net: Network, batch: Batch, layer: int) -> tuple[Tensor, Tensor]:
    """The residual stream before a layer and its normed form, [n, H] each."""
    x = net.embed[batch.ids]
    for before in net.layers[:layer]:
        x = before(x, batch, net)
    return x, rms_norm(x, net.layers[layer].input_norm, net.shape.eps)


def fit(x: Tensor, y: Tensor, ridge: float = 0.01) -> Tensor:
    """W [out, in] with x W^T near y, by ridge regression."""
    gram = x.T @ x
    gram += ridge * gram.diagonal().mean() * torch.eye(x.shape[1])
    return torch.linalg.solve(gram, x.T @ y).T


def token_code(x: Tensor, ids: Tensor, width: int) -> Tensor:
    """Directions [width, H] of x in which tokens differ most, and contexts least; unit variance along each."""
    _, index, counts = torch.unique(ids, return_inverse=True, return_counts=True)
    means = torch.zeros(len(counts), x.shape[1]).index_add_(0, index, x) / counts[:, None]
    within = x - means[index]
    between = means - means.mean(0)
    noise = within.T @ within / len(x)
    noise += 0.05 * noise.diagonal().mean() * torch.eye(x.shape[1])
    signal = between.T @ between / len(means)
    root = torch.linalg.cholesky(torch.linalg.inv(noise))
    _, vectors = torch.linalg.eigh(root.T @ signal @ root)
    chosen = (root @ vectors[:, -width:]).T
    return chosen / (between @ chosen.T).std(0)[:, None]


@torch.no_grad()
def install(net: Network, batch: Batch) -> None:
    """Write both heads. The heads that share their keys and values with them give way."""
    attention = net.layers[PREVIOUS].attention
    x, normed = inputs(net, batch, PREVIOUS)
    code = token_code(normed, batch.ids, net.shape.v_head_dim)
    _, directions = torch.linalg.eigh(x.T @ x)
    places = directions[:, : net.shape.v_head_dim]  # where the stream carries least
    constant = fit(normed, torch.ones(len(x), 1))[0]
    previous_token(attention, constant, code, places)
    induction(net, batch, normed @ code.T, places)


def previous_token(attention: Attention, constant: Tensor, code: Tensor, places: Tensor) -> None:
    """The last query head looks one token back, and writes the code of what is there."""
    s = attention.shape
    half, width = s.rope_dim // 2, s.v_head_dim
    angle = attention.theta ** (-torch.arange(0, s.rope_dim, 2) / s.rope_dim)
    weight = torch.zeros(half, 1)
    weight[:3, 0] = torch.tensor([1.0, 0.7, 0.5])  # the fastest pairs: the slower ones would blur the peak
    size = SHARPNESS**0.5 * constant * weight
    key = torch.zeros(s.head_dim, s.hidden_size)
    key[:half] = size
    attention.qkv_proj[rows_of(attention, "k", attention.kv - 1)] = key
    attention.qkv_proj[rows_of(attention, "v", attention.kv - 1)] = code
    head = s.num_heads - 1
    query = torch.zeros(s.head_dim, s.hidden_size)
    query[:half] = torch.cos(-angle)[:, None] * size
    query[half : 2 * half] = torch.sin(-angle)[:, None] * size
    attention.qkv_proj[rows_of(attention, "q", head)] = query
    attention.o_proj[:, (head - 1) * width : head * width] = 0
    attention.o_proj[:, head * width :] = places * (WRITTEN / s.value_scale)


def induction(net: Network, batch: Batch, code: Tensor, place: Tensor) -> None:
    """The last query head matches the present token's code [n, vd] with what was written of the one before."""
    attention, s = net.layers[INDUCTION].attention, net.shape
    _, normed = inputs(net, batch, INDUCTION)
    half, width = s.rope_dim // 2, s.v_head_dim
    still = list(range(s.rope_dim, s.head_dim))  # dimensions that do not turn, then the slowest pairs
    for i in range(half - 1, -1, -1):
        still += [i, i + half]
    dims = torch.tensor(still[:width])
    before = torch.roll(code, 1, 0)
    inside = batch.positions > 0
    key, query = torch.zeros(s.head_dim, s.hidden_size), torch.zeros(s.head_dim, s.hidden_size)
    key[dims] = GAIN**0.5 * fit(normed[inside] @ place, before[inside]) @ place.T
    query[dims] = GAIN**0.5 * fit(normed, code)
    attention.qkv_proj[rows_of(attention, "k", attention.kv - 1)] = key
    attention.qkv_proj[rows_of(attention, "q", s.num_heads - 1)] = query
    group = s.num_heads // attention.kv
    attention.o_proj[:, (s.num_heads - group) * width :] = 0
    read, write = copy_map(net, batch, normed, width)
    attention.qkv_proj[rows_of(attention, "v", attention.kv - 1)] = read / s.value_scale
    attention.o_proj[:, (s.num_heads - 1) * width :] = write


def copy_map(net: Network, batch: Batch, normed: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """A map of rank ``width`` from the stream at a token to what raises that token's logit by about BOOST."""
    head = net.lm_head * net.norm
    wanted = (head - head.mean(0))[batch.ids]
    left, sizes, right = torch.linalg.svd(fit(normed, wanted), full_matrices=False)
    read, write = sizes[:width, None].sqrt() * right[:width], left[:, :width] * sizes[:width].sqrt()
    final, _ = inputs(net, batch, net.shape.layers - 1)
    raised = ((normed @ read.T @ write.T) * wanted).sum(1).mean() / final.pow(2).mean().sqrt()
    return read, write * (BOOST / raised)
