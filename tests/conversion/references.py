"""The authors' Longhorn and S5 in plain PyTorch, written from the papers' equations and the formats' facts, which read
the originals' own tensors; and checkpoints of random weights in these formats."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def _draw(shapes: dict[str, tuple], dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for name, shape in shapes.items()
    }


# ---- Longhorn (arXiv 2407.14207, equations 7 to 9 and figure 3) ------------------------------------------------------


def longhorn_checkpoint(
    vocab=24, width=12, layers=2, m=3, rank=2, taps=4, expand=2, bias=False, dtype=torch.float32, seed=0
) -> dict[str, Tensor]:
    d = expand * width
    shapes = {"backbone.embedding.weight": (vocab, width)}
    for i in range(layers):
        block = {
            "mixer.D": (d,), "mixer.in_proj.weight": (2 * d, width), "mixer.conv1d.weight": (d, 1, taps),
            "mixer.conv1d.bias": (d,), "mixer.x_proj.weight": (rank + 2 * m, d), "mixer.dt_head.weight": (d, rank),
            "mixer.dt_head.bias": (d,), "mixer.out_proj.weight": (width, d), "norm.weight": (width,),
        }  # fmt: skip
        if bias:
            block |= {"mixer.in_proj.bias": (2 * d,), "mixer.out_proj.bias": (width,)}
        shapes |= {f"backbone.layers.{i}.{name}": shape for name, shape in block.items()}
    shapes["backbone.norm_f.weight"] = (width,)
    tensors = _draw(shapes, dtype, seed)
    for name, x in tensors.items():
        if x.ndim > 1 and "embedding" not in name:
            x /= math.sqrt(x[0].numel())
        if name.endswith("in_proj.bias"):
            x.zero_()
    tensors["lm_head.weight"] = tensors["backbone.embedding.weight"]
    return tensors


def longhorn_config(vocab=22, width=12, layers=2, m=3, rank=2, **more) -> dict:
    return {
        "d_model": width, "d_intermediate": 0, "n_layer": layers, "vocab_size": vocab,
        "ssm_cfg": {"d_state": m, "dt_rank": rank}, "attn_layer_idx": [], "attn_cfg": {}, "rms_norm": True,
        "residual_in_fp32": True, "fused_add_norm": True, "pad_vocab_size_multiple": 8, "tie_embeddings": True, **more,
    }  # fmt: skip


def _rms_norm(x: Tensor, weight: Tensor, eps=1e-5) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def longhorn_logits(tensors: dict[str, Tensor], ids: Tensor) -> Tensor:
    """(B, L) -> (B, L, padded vocabulary), token by token."""
    layers = 1 + max(int(name.split(".")[2]) for name in tensors if name.startswith("backbone.layers."))
    x = tensors["backbone.embedding.weight"][ids]
    for i in range(layers):
        w = {name.split(f"layers.{i}.")[1]: t for name, t in tensors.items() if f"backbone.layers.{i}." in name}
        u, z = (_rms_norm(x, w["norm.weight"]) @ w["mixer.in_proj.weight"].T).chunk(2, dim=-1)
        taps = w["mixer.conv1d.weight"].shape[-1]
        padded = F.pad(u, (0, 0, taps - 1, 0))
        u = sum(padded[:, j : j + u.shape[1]] * w["mixer.conv1d.weight"][:, 0, j] for j in range(taps))
        u = F.silu(u + w["mixer.conv1d.bias"])
        rank = w["mixer.dt_head.weight"].shape[1]
        projected = u @ w["mixer.x_proj.weight"].T
        k, q = projected[..., rank:].chunk(2, dim=-1)
        beta = (projected[..., :rank] @ w["mixer.dt_head.weight"].T + w["mixer.dt_head.bias"]).sigmoid()
        state, outputs = u.new_zeros(len(ids), u.shape[-1], k.shape[-1]), []
        for t in range(ids.shape[1]):
            step = beta[:, t] / (1 + beta[:, t] * k[:, t].square().sum(-1, keepdim=True))
            forget = 1 - step[..., None] * k[:, t, None].square()
            state = forget * state + (step * u[:, t])[..., None] * k[:, t, None]
            outputs.append((state * q[:, t, None]).sum(-1) + w["mixer.D"] * u[:, t])
        y = torch.stack(outputs, dim=1) * F.silu(z)
        x = x + y @ w["mixer.out_proj.weight"].T + w.get("mixer.out_proj.bias", 0)
    return _rms_norm(x, tensors["backbone.norm_f.weight"]) @ tensors["lm_head.weight"].T


# ---- S5 (arXiv 2208.04933, section 3 and appendix B) -----------------------------------------------------------------


def s5_checkpoint(
    features=3, width=6, layers=2, states=4, classes=5, bidirectional=False, complex_normal=False, glu=("out2",),
    batch=True, retrieval=False, dtype=torch.float32, seed=0,
) -> dict[str, Tensor]:  # fmt: skip
    """The variables of the authors' models, by their paths."""
    shapes = {"params/encoder/encoder/kernel": (features, width), "params/encoder/encoder/bias": (width,)}
    for i in range(layers):
        layer = {
            "seq/Lambda_re": (states,), "seq/Lambda_im": (states,), "seq/B": (states, width, 2), "seq/D": (width,),
            "seq/log_step": (states, 1), "norm/scale": (width,), "norm/bias": (width,),
        }  # fmt: skip
        if complex_normal or not bidirectional:
            layer["seq/C"] = (width, states * (2 if bidirectional else 1), 2)
        else:
            layer |= {"seq/C1": (width, states, 2), "seq/C2": (width, states, 2)}
        for out in glu:
            layer |= {f"{out}/kernel": (width, width), f"{out}/bias": (width,)}
        shapes |= {f"params/encoder/layers_{i}/{name}": shape for name, shape in layer.items()}
        if batch:
            shapes |= {f"batch_stats/encoder/layers_{i}/norm/{name}": (width,) for name in ("mean", "var")}
    sizes = {"decoder": (width, classes)}
    if retrieval:
        sizes = {"decoder/layer1": (4 * width, width), "decoder/layer2": (width, classes)}
    for name, (rows, columns) in sizes.items():
        shapes |= {f"params/{name}/kernel": (rows, columns), f"params/{name}/bias": (columns,)}
    tensors = _draw(shapes, dtype, seed)
    for name, x in tensors.items():
        if name.endswith("Lambda_re"):
            x.abs_().neg_().sub_(0.1)
        elif name.endswith("/var"):
            x.abs_().add_(0.5)
        elif name.endswith("log_step"):
            x.sub_(2)
        elif name.endswith("kernel"):
            x /= math.sqrt(len(x))
        elif name.endswith(("/B", "/C", "/C1", "/C2")):
            x /= math.sqrt(x.shape[1])
    return tensors


def _s5_layer(w: dict[str, Tensor], x: Tensor, options: dict) -> Tensor:
    def norm(x):
        if "mean" in w:
            return (x - w["mean"]) / (w["var"] + 1e-5).sqrt() * w["norm/scale"] + w["norm/bias"]
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, correction=0)
        return (x - mean) / (variance + 1e-6).sqrt() * w["norm/scale"] + w["norm/bias"]

    def pairs(name):
        return torch.view_as_complex(w[name])

    u = norm(x) if options["prenorm"] else x
    real = w["seq/Lambda_re"].clamp(max=-1e-4) if options.get("clip_eigs") else w["seq/Lambda_re"]
    poles, step = torch.complex(real, w["seq/Lambda_im"]), w["seq/log_step"][:, 0].exp()
    if options["discretization"] == "zoh":
        a, gain = (poles * step).exp(), ((poles * step).exp() - 1) / poles
    else:
        a, gain = (1 + poles * step / 2) / (1 - poles * step / 2), step / (1 - poles * step / 2)
    drive = u.to(poles.dtype) @ (gain[:, None] * pairs("seq/B")).T
    c = pairs("seq/C") if "seq/C" in w else torch.cat([pairs("seq/C1"), pairs("seq/C2")], dim=1)
    scans = []
    for order in (range(x.shape[1]), reversed(range(x.shape[1])))[: c.shape[1] // len(poles)]:
        state, states = torch.zeros_like(drive[:, 0]), {}
        for t in order:
            states[t] = state = a * state + drive[:, t]
        scans.append(torch.stack([states[t] for t in range(x.shape[1])], dim=1))
    y = (2 if options["conj_sym"] else 1) * (torch.cat(scans, dim=-1) @ c.T).real + w["seq/D"] * u
    g = F.gelu(y, approximate="tanh")

    def dense(name, x):
        return x @ w[f"{name}/kernel"] + w[f"{name}/bias"]

    if options["activation"] == "full_glu":
        g = dense("out1", g) * dense("out2", g).sigmoid()
    elif options["activation"] == "half_glu1":
        g = g * dense("out2", g).sigmoid()
    elif options["activation"] == "half_glu2":
        g = y * dense("out2", g).sigmoid()
    return x + g if options["prenorm"] else norm(x + g)


def s5_logits(tensors: dict[str, Tensor], x: Tensor, **options) -> Tensor:
    """(B, L, features) -> (B, classes) before the softmax; for retrieval (B, 2, L, features)."""
    options = {"prenorm": True, "discretization": "zoh", "conj_sym": True, "activation": "half_glu1"} | options
    retrieval = "params/decoder/layer1/kernel" in tensors
    x = x.transpose(0, 1).flatten(0, 1) if retrieval else x  # all first documents, then all second ones
    x = x @ tensors["params/encoder/encoder/kernel"] + tensors["params/encoder/encoder/bias"]
    layers = {name.split("/")[2] for name in tensors if name.startswith("params/encoder/layers_")}
    for i in range(len(layers)):
        w = {name.split(f"layers_{i}/")[1]: t for name, t in tensors.items() if f"params/encoder/layers_{i}/" in name}
        stats = f"batch_stats/encoder/layers_{i}/norm/"
        w |= {name.removeprefix(stats): t for name, t in tensors.items() if name.startswith(stats)}
        x = _s5_layer(w, x, options)
    x = x[:, -1] if options.get("pooling") == "last" else x.mean(1)
    if not retrieval:
        return x @ tensors["params/decoder/kernel"] + tensors["params/decoder/bias"]
    first, second = x.chunk(2)
    features = torch.cat([first, second, first - second, first * second], dim=-1)
    hidden = features @ tensors["params/decoder/layer1/kernel"] + tensors["params/decoder/layer1/bias"]
    hidden = F.gelu(hidden, approximate="tanh")
    return hidden @ tensors["params/decoder/layer2/kernel"] + tensors["params/decoder/layer2/bias"]
