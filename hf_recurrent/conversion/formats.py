"""Every source of checkpoints, and which one a checkpoint is of."""

from . import gateloop, longhorn, mamba, minlm, s5, s5_pytorch
from .checkpoint import Checkpoint, Refused, listed
from .rules import Format

FORMATS: dict[str, Format] = {
    source.name: source
    for source in (
        longhorn.Longhorn(),
        minlm.MinLM(),
        gateloop.GateLoop(),
        s5.S5(),
        s5_pytorch.S5PyTorch(),
        mamba.Mamba(),
    )
}


def detect(checkpoint: Checkpoint, name: str | None) -> Format:
    found = [source for source in FORMATS.values() if source.recognises(checkpoint)]
    if name is not None:
        if FORMATS[name] not in found:
            like = f"; they are those of {found[0].title} (--from {found[0].name})" if found else ""
            raise Refused(f"{checkpoint.path}: its tensors are not those of {FORMATS[name].title}{like}")
        return FORMATS[name]
    if not found:
        raise Refused(
            f"{checkpoint.path}: of no format that is known ({', '.join(FORMATS)}): "
            f"it holds {listed(checkpoint.shapes)}"
        )
    if len(found) > 1:
        raise Refused(f"{checkpoint.path}: could be {' or '.join(f.name for f in found)}: --from says which")
    if isinstance(found[0], mamba.Mamba):
        raise Refused(f"{checkpoint.path}: is a Mamba: --from {found[0].name} makes it the warm start of a Longhorn")
    return found[0]
