"""Reference logits for the tiny checkpoint, from transformers' own MiMo-V2-Flash model. Needs torch and transformers.

    tools/make_reference.py OUT.npz [--seed N]

Makes the checkpoint, reads its bytes with safetensors.torch, and undoes the stored formats with torch's float8 type
and a table of its own: nothing here is shared with the engine. Settings that the class gets wrong by default for this
model are set by hand, each with its reason. Logits are float32; a second run in float64 gives the first one's error.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import MiMoV2FlashConfig, MiMoV2FlashForCausalLM
from transformers.models.mimo_v2_flash import modeling_mimo_v2_flash as modeling

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.make_checkpoint import make

LENGTHS = (1, 5, 127, 128, 129, 130, 300)  # around one window of 128, and over two
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
Tensors = dict[str, torch.Tensor]


def read_tensors(model: Path) -> Tensors:
    tensors: Tensors = {}
    for path in sorted(model.glob("*.safetensors")):
        tensors.update(load_file(path))
    return tensors


def mxfp4(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """uint8 [N, K/2] and e8m0 [N, K/32] to float64 [N, K]: the low nibble is the even column."""
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).reshape(codes.shape[0], -1)
    exponents = scales.to(torch.float64) - 127
    return E2M1[nibbles.long()] * torch.exp2(exponents).repeat_interleave(32, dim=1)


def fp8(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float8_e4m3fn [N, K] and one scale per 128 x 128 cell to float64 [N, K]."""
    assert codes.dtype == torch.float8_e4m3fn
    wide = scales.to(torch.float64).repeat_interleave(128, dim=0).repeat_interleave(128, dim=1)
    return codes.to(torch.float64) * wide[: codes.shape[0], : codes.shape[1]]


def split_qkv(codes: torch.Tensor, scales: torch.Tensor, chunks: int, sizes: list[int]) -> list[torch.Tensor]:
    """The stored slices [Q_i | K_i | V_i], each with its own scale grid, to Q, K and V of ``sizes`` rows."""
    parts: list[list[torch.Tensor]] = [[], [], []]
    for slice_codes, slice_scales in zip(codes.chunk(chunks), scales.chunk(chunks), strict=True):
        weight = fp8(slice_codes, slice_scales)
        for part, rows in zip(parts, weight.split([size // chunks for size in sizes]), strict=True):
            part.append(rows)
    return [torch.cat(part) for part in parts]


def oracle_config(config: dict[str, Any]) -> MiMoV2FlashConfig:
    """config.json to the class's settings."""
    window, full = config["swa_num_key_value_heads"], config["num_key_value_heads"]
    assert window == 2 * full, "the class gives window layers twice the kv heads of the others, whatever config says"
    rope = {"rope_type": "default", "partial_rotary_factor": config["partial_rotary_factor"]}
    same_name = (
        "vocab_size hidden_size intermediate_size moe_intermediate_size num_hidden_layers num_attention_heads "
        "num_key_value_heads head_dim v_head_dim n_routed_experts num_experts_per_tok n_group topk_group "
        "norm_topk_prob routed_scaling_factor attention_value_scale max_position_embeddings"
    )
    return MiMoV2FlashConfig(
        **{key: config[key] for key in same_name.split()},
        rms_norm_eps=config["layernorm_epsilon"],  # the file's key is not the class's
        sliding_window=config["sliding_window"],  # sliding_window_size would be taken as one key more
        layer_types=["sliding_attention" if kind else "full_attention" for kind in config["hybrid_layer_pattern"]],
        mlp_layer_types=["sparse" if moe else "dense" for moe in config["moe_layer_freq"]],
        rope_parameters={  # the class's own theta is 5e6
            "full_attention": {**rope, "rope_theta": float(config["rope_theta"])},
            "sliding_attention": {**rope, "rope_theta": float(config["swa_rope_theta"])},
        },
        pad_token_id=None,
        attn_implementation="eager",
        experts_implementation="eager",  # the grouped product has no float64
    )


def layer_weights(stored: Tensors, config: dict[str, Any], layer: int) -> Tensors:
    """Layer ``layer`` under the class's names, in float64."""
    src, heads = f"model.layers.{layer}", config["num_attention_heads"]
    kv = config["swa_num_key_value_heads" if config["hybrid_layer_pattern"][layer] else "num_key_value_heads"]
    sizes = [heads * config["head_dim"], kv * config["head_dim"], kv * config["v_head_dim"]]
    qkv = f"{src}.self_attn.qkv_proj.weight"
    parts = split_qkv(stored[qkv], stored[f"{qkv}_scale_inv"], config["num_key_value_heads"], sizes)
    out = {f"{src}.self_attn.{part}_proj.weight": w for part, w in zip("qkv", parts, strict=True)}
    for name in ("self_attn.o_proj", "input_layernorm", "post_attention_layernorm"):
        out[f"{src}.{name}.weight"] = stored[f"{src}.{name}.weight"]
    if config["hybrid_layer_pattern"][layer]:
        out[f"{src}.self_attn.sinks"] = stored[f"{src}.self_attn.attention_sink_bias"]
    if not config["moe_layer_freq"][layer]:
        for part in ("gate", "up", "down"):
            name = f"{src}.mlp.{part}_proj.weight"
            out[name] = fp8(stored[name], stored[f"{name}_scale_inv"])
        return out
    for name in ("gate.weight", "gate.e_score_correction_bias"):
        out[f"{src}.mlp.{name}"] = stored[f"{src}.mlp.{name}"]
    experts = [expert_weights(stored, f"{src}.mlp.experts.{e}") for e in range(config["n_routed_experts"])]
    out[f"{src}.mlp.experts.gate_up_proj"] = torch.stack([torch.cat((gate, up)) for gate, up, _ in experts])
    out[f"{src}.mlp.experts.down_proj"] = torch.stack([down for _, _, down in experts])
    return out


def expert_weights(stored: Tensors, prefix: str) -> tuple[torch.Tensor, ...]:
    names = [f"{prefix}.{part}_proj.weight" for part in ("gate", "up", "down")]
    return tuple(mxfp4(stored[name], stored[f"{name}_scale"]) for name in names)


def build_oracle(model: Path) -> MiMoV2FlashForCausalLM:
    """The class with the checkpoint's weights, in float64."""
    config = json.loads((model / "config.json").read_text("utf-8"))
    stored = read_tensors(model)
    weights = {name: stored[name] for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")}
    for layer in range(config["num_hidden_layers"]):
        weights.update(layer_weights(stored, config, layer))
    oracle = MiMoV2FlashForCausalLM(oracle_config(config)).double().eval()
    oracle.load_state_dict({name: w.double() for name, w in weights.items()}, strict=True)
    return oracle


def compute_in_float64() -> None:
    """Lift the three places where the class computes in float32 whatever the model's type is."""

    def rms_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    def rotary(self: Any, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str) -> tuple[torch.Tensor, ...]:
        params = self.config.rope_parameters[layer_type]
        dim = int(self.config.head_dim * params["partial_rotary_factor"])
        inv_freq = params["rope_theta"] ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angles = position_ids[..., None].double() * inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()

    route32 = modeling.MiMoV2FlashTopkRouter.forward

    def route(self: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        keep, torch.float32 = torch.float32, torch.float64
        try:
            return route32(self, hidden)
        finally:
            torch.float32 = keep

    modeling.MiMoV2FlashRMSNorm.forward = rms_norm
    modeling.MiMoV2FlashRotaryEmbedding.forward = rotary
    modeling.MiMoV2FlashTopkRouter.forward = route


def prompts(vocab: int, seed: int) -> list[list[int]]:
    rng = np.random.PCG64(seed)
    return [[int(raw % vocab) for raw in rng.random_raw(length)] for length in LENGTHS]


@torch.no_grad()
def run(oracle: MiMoV2FlashForCausalLM, ids: list[int]) -> tuple[np.ndarray, float]:
    """Logits [n, V] and the smallest gap between the last chosen expert and the first that was not."""
    gaps: list[float] = []

    def watch(module: Any, _: Any, output: tuple[torch.Tensor, ...]) -> None:
        choice = output[0].sigmoid() + module.e_score_correction_bias
        top = choice.topk(module.top_k + 1, dim=-1).values
        gaps.append(float((top[:, -2] - top[:, -1]).min()))

    routers = [m for m in oracle.modules() if isinstance(m, modeling.MiMoV2FlashTopkRouter)]
    hooks = [router.register_forward_hook(watch) for router in routers]
    logits = oracle(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    return logits.numpy(), min(gaps)


def main() -> int:
    parser = argparse.ArgumentParser(description="Reference logits of the tiny checkpoint, from transformers.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder) / "tiny", "tiny", args.seed)
        oracle = build_oracle(Path(folder) / "tiny").float()
    saved: dict[str, np.ndarray] = {}
    asked = prompts(oracle.config.vocab_size, args.seed)
    for ids in asked:
        logits, gap = run(oracle, ids)
        assert logits.dtype == np.float32
        saved[f"ids_{len(ids)}"], saved[f"logits_{len(ids)}"] = np.array(ids, np.int32), logits
        print(f"{len(ids):4d} tokens: logits {logits.min():.2f}..{logits.max():.2f}, nearest routing choice {gap:.1e}")
    compute_in_float64()
    oracle.double()
    for ids in asked:
        exact, _ = run(oracle, ids)
        assert exact.dtype == np.float64
        error = np.abs(saved[f"logits_{len(ids)}"] - exact).max()
        saved[f"error_{len(ids)}"] = np.array(error)
        print(f"{len(ids):4d} tokens: float32 is {error:.1e} from float64, {error / np.ptp(exact):.1e} of the range")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(args.out, **saved)  # type: ignore[arg-type]
    return 0


if __name__ == "__main__":
    sys.exit(main())
