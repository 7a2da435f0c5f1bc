"""The peers from the package index, each behind one call of the same form. One that is absent is said, not failed."""

import importlib
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import MambaConfig, MambaForCausalLM

from hf_recurrent.bench import optional_module, peer_scans
from hf_recurrent.versions import version_of

PACKAGES = ("minGRU-pytorch", "mambapy", "gateloop-transformer")
# The language model of arXiv 2410.01201, appendix C, on the characters of Shakespeare.
VOCABULARY, WIDTH, LAYERS, EXPANSION, CONV_KERNEL, MLP_RATIO, DROPOUT = 65, 384, 3, 2, 4, 4, 0.2


def absent() -> dict[str, str]:
    """The peers that cannot be measured here, each with the reason."""
    return {package: "not installed" for package in PACKAGES if version_of(package) is None}


# ---- scans: h_t = a_t h_{t-1} + b_t over (batch, length, channels) ---------------------------------------------------


def scans() -> dict[str, tuple[str, Callable]]:
    """name -> (the kind of inputs that it takes, function), for the peers that are installed.

    Kind "pair" is (a, b); kind "logs" is (log a, log b), for a scan that knows positive numbers by their logarithms.
    """
    found = {name: ("pair", function) for name, function in peer_scans().items()}
    if mingru := optional_module("minGRU-pytorch", "minGRU_pytorch.minGRU"):
        found["minGRU-pytorch log scan"] = ("logs", mingru.heinsen_associative_scan_log)
    return found


def mingru_pytorch_core() -> Callable[[Tensor], Tensor] | None:
    """minGRU-pytorch's layer without its projections: activations and log-space scan of [hidden | gate]."""
    module = optional_module("minGRU-pytorch", "minGRU_pytorch.minGRU")
    if module is None:
        return None
    layer = module.minGRU(1)
    layer.to_hidden_and_gate = nn.Identity()
    return layer


# ---- models of the paper's Shakespeare experiment: token ids -> loss -------------------------------------------------


def _next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class MinLM(nn.Module):
    """minGRU-pytorch's own language model. Its convolution adds a pointwise projection, which ours does not have."""

    def __init__(self):
        super().__init__()
        minlm = importlib.import_module("minGRU_pytorch.minLM").minLM
        self.model = minlm(
            num_tokens=VOCABULARY,
            dim=WIDTH,
            depth=LAYERS,
            ff_mult=MLP_RATIO,
            expansion=EXPANSION,
            conv_kernel_size=CONV_KERNEL,
            enable_conv=True,
            dropout=DROPOUT,
        )

    def forward(self, ids: Tensor) -> Tensor:
        return _next_token_loss(self.model(ids), ids)


class TorchRNN(nn.Module):
    """The same blocks around PyTorch's nn.GRU or nn.LSTM, whose gates also read the previous state."""

    def __init__(self, kind: type[nn.RNNBase]):
        super().__init__()
        inner = WIDTH * EXPANSION
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.RMSNorm(WIDTH),
                    "conv": nn.Conv1d(WIDTH, WIDTH, CONV_KERNEL, groups=WIDTH, padding=CONV_KERNEL - 1),
                    "rnn": kind(WIDTH, inner, batch_first=True),
                    "out": nn.Linear(inner, WIDTH, bias=False),
                    "mlp": nn.Sequential(
                        nn.RMSNorm(WIDTH),
                        nn.Linear(WIDTH, MLP_RATIO * WIDTH, bias=False),
                        nn.GELU(),
                        nn.Linear(MLP_RATIO * WIDTH, WIDTH, bias=False),
                        nn.Dropout(DROPOUT),
                    ),
                }
            )
            for _ in range(LAYERS)
        )
        self.head = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            y = layer["conv"](layer["norm"](x).transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
            x = x + F.dropout(layer["out"](layer["rnn"](y)[0]), DROPOUT, self.training)
            x = x + layer["mlp"](x)
        return _next_token_loss(self.head(x), ids)


class HFMamba(nn.Module):
    """Transformers' Mamba at the same width and depth, with mambapy's parallel scan in place of its loop."""

    def __init__(self):
        super().__init__()
        self.model = MambaForCausalLM(
            MambaConfig(
                vocab_size=VOCABULARY,
                hidden_size=WIDTH,
                num_hidden_layers=LAYERS,
                expand=EXPANSION,
                conv_kernel=CONV_KERNEL,
                use_mambapy=True,
            )
        )

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids, labels=ids).loss


def models(slow_ones: bool) -> dict[str, Callable[[], nn.Module]]:
    """name -> a function that builds the model, for the peers that are installed."""
    found = {"nn.LSTM": lambda: TorchRNN(nn.LSTM), "nn.GRU": lambda: TorchRNN(nn.GRU)}
    if version_of("minGRU-pytorch"):
        found["minGRU-pytorch minLM"] = MinLM
    if slow_ones and version_of("mambapy"):
        found["Transformers Mamba (mambapy)"] = HFMamba
    return found
