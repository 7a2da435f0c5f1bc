"""FSDP2 trains as one process does: Accelerate's own code for it, over gloo on the CPU."""

import json
import os
import pickle
import re
import resource
import shutil
import signal
import time

import pytest
import torch
from accelerate.state import AcceleratorState
from runs import TINY, assert_same, curve, forget_the_end, output, start_run
from safetensors.torch import load_file
from torch.distributed.checkpoint import metadata
from transformers import AutoModelForCausalLM
from workers import command_line, finish, start_group

import hf_recurrent
from hf_recurrent.training import TrainArguments, checkpoints, distributed
from hf_recurrent.training.model import families


def goes_on(train_processes, folder, processes, *flags):
    """Resume a copy of a run from its checkpoint after two steps."""
    copy = folder.parent / f"{folder.name}-in-{processes}{flags[-1]}"
    shutil.copytree(folder, copy)
    for _ in range(2):  # those after four and five steps
        forget_the_end(copy)
    return train_processes(copy.name, processes, *flags, "--resume")


def test_fsdp_equals_one_process_and_checkpoints_go_on_in_any_number(train_processes):
    flags = "--total-batch-size 8 --max-steps 5 --save-steps 2 --config-overrides tie_word_embeddings=true".split()
    flags += ["--keep-checkpoints", "3"]
    one = train_processes("one", 1, *flags)
    two = train_processes("two", 2, *flags, "--fsdp")
    two_passes = ["--batch-size", "1"]
    four = train_processes("four", 4, *flags, *two_passes, "--gradient-checkpointing", "--fsdp")
    assert_same(two, one)
    assert_same(four, one)

    again = goes_on(train_processes, two, 2, *flags, "--fsdp")
    assert curve(again, "loss") == curve(two, "loss")
    weights, others = (load_file(folder / "model.safetensors") for folder in (again, two))
    assert all(torch.equal(weight, others[name]) for name, weight in weights.items())
    assert_same(goes_on(train_processes, two, 1, *flags), one)
    assert_same(goes_on(train_processes, two, 4, *flags, "--fsdp"), one)
    assert_same(goes_on(train_processes, two, 2, *flags), one)  # by DDP
    assert_same(goes_on(train_processes, one, 2, *flags, "--fsdp"), one)


def two_steps(report):
    """Two steps of every family under FSDP2, of two in bfloat16 too; the losses and norms go to the file `report`."""
    losses = {}
    for precision in ("no", "bf16"):
        args = TrainArguments(fsdp=True, cpu=True, mixed_precision=precision)
        accelerator = distributed.create_accelerator(args)
        rows = torch.arange(80).view(4, 20) % 37
        mine = rows[accelerator.process_index :: accelerator.num_processes]
        for config_class in hf_recurrent.FAMILIES:
            if precision == "bf16" and config_class.model_type not in ("longhorn", "s5"):
                continue
            accelerator.free_memory()
            accelerator.state.fsdp_plugin = distributed.create_fsdp_plugin()
            model, optimizer = made(config_class)
            blocks = list(model.base_model.layers)
            model, optimizer = distributed.prepare(accelerator, model, optimizer, args, 2)
            assert all(isinstance(block, torch.distributed.fsdp.FSDPModule) for block in blocks)
            gathered = model.base_model.norm._get_fsdp_state()._mp_policy.param_dtype
            assert gathered == (torch.bfloat16 if precision == "bf16" and config_class.model_type != "s5" else None)
            values = []
            for _ in range(2):
                loss = model(mine, labels=mine, use_cache=False).loss
                accelerator.backward(loss)
                values.append(accelerator.reduce(loss.detach(), "mean").item())
                values.append(distributed.clip_gradients(accelerator, model, 0.5).item())
                optimizer.step()
                optimizer.zero_grad()
            losses[f"{config_class.model_type} {precision}"] = values
        AcceleratorState._reset_state(reset_partial_state=True)
    if torch.distributed.get_rank() == 0:
        report.write_text(json.dumps(losses))


def made(config_class):
    torch.manual_seed(0)
    tied = config_class.model_type in ("longhorn", "mingru")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 37, "hidden_dropout": 0.0}
    model = AutoModelForCausalLM.from_config(config_class(**sizes, tie_word_embeddings=tied))
    return model, torch.optim.AdamW(model.parameter_groups(1e-2, 0.1), fused=True)


def test_every_family_is_sharded_by_blocks(tmp_path):
    report = tmp_path / "losses.json"
    group = start_group(two_steps, report, processes=2, log=str(tmp_path / "log"))
    assert finish(group) == [0, 0], (tmp_path / "log.0").read_text()
    rows = torch.arange(80).view(4, 20) % 37
    for name, values in json.loads(report.read_text()).items():
        family, precision = name.split()
        model, optimizer = made(families()[family])
        expected = []
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                loss = model(rows, labels=rows, use_cache=False).loss
            loss.backward()
            expected += [loss.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()]
            optimizer.step()
            optimizer.zero_grad()
        assert values == pytest.approx(expected, rel=1e-5 if precision == "no" else 2e-2), name


def test_fsdp_with_truncated_backpropagation(train_processes):
    flags = "--total-batch-size 4 --max-steps 3 --bptt-chunk 12".split()
    learned, carry = ["--config-overrides", "learned_initial_state=true"], ["--bptt-carry-gradients"]
    for name, more in (("learned", learned), ("carry", carry)):
        one = train_processes(f"{name}-one", 1, *flags, *more)
        assert_same(train_processes(f"{name}-two", 2, *flags, *more, "--fsdp"), one)
    both = train_processes("both", 2, *flags, *learned, *carry, "--fsdp", status=2)
    assert "--fsdp: --bptt-carry-gradients needs learned_initial_state=False" in output(both)


def test_a_process_that_hangs_ends_the_others(tmp_path):
    flags = "--fsdp --max-steps 1000000 --eval-steps 0 --save-steps 0 --timeout-minutes 0.1".split()
    folder, group = start_run(tmp_path, "run", 2, *flags)
    metrics = folder / "metrics.jsonl"
    while group[0].is_alive() and not (metrics.exists() and len(metrics.read_text().splitlines()) > 4):
        time.sleep(0.05)
    os.kill(group[1].pid, signal.SIGSTOP)
    started = time.monotonic()
    assert finish(group[:1]) == [2], output(folder)
    assert time.monotonic() - started < 60
    group[1].kill()
    last = (tmp_path / "run.log.0").read_text().splitlines()[-1]
    assert last.startswith("hf-recurrent: error: another process of this run has ended, or has not answered for 0.1")


def with_small_files(*argv):
    """A command line on a disk where no file can be larger than 8,000 bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000))
    command_line(*argv)


def test_shards_that_cannot_be_saved_or_read(tmp_path, train_processes):
    folder = train_processes("run", 2, "--fsdp", "--max-steps", "2", "--save-steps", "2")
    whole = {path: path.read_bytes() for path in (folder / "checkpoints").rglob("*") if path.is_file()}
    argv = ["train", *TINY, "--data-files", tmp_path / "documents.jsonl", "--output-dir", folder, "--resume"]
    argv += ["--fsdp", "--max-steps", "4", "--save-steps", "2"]
    group = start_group(with_small_files, *argv, processes=2, log=tmp_path / "run.log")
    assert finish(group) == [2, 2], output(folder)
    for rank in range(2):
        log = (tmp_path / f"run.log.{rank}").read_text()
        assert "Traceback" not in log
        assert "File too large" in log or "another process of this run has ended" in log, log
    assert {path: path.read_bytes() for path in (folder / "checkpoints").rglob("*") if path.is_file()} == whole

    shard = next(folder.glob("checkpoints/*/pytorch_model_fsdp_0/*.distcp"))
    shard.write_bytes(bytes(shard.stat().st_size))
    train_processes("run", 1, "--max-steps", "4", "--save-steps", "2", "--resume", "--batch-size", "32", status=2)
    log = output(folder)
    assert "Traceback" not in log and "step-00000002 cannot be read: " in log, log


def test_what_the_launcher_asks_for_and_cannot_have(monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
    with pytest.raises(ValueError, match="accelerate's dynamo_backend must be no, got eager: --compile compiles"):
        distributed.create_accelerator(TrainArguments(cpu=True))
    monkeypatch.delenv("ACCELERATE_DYNAMO_BACKEND")
    AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="needs --fsdp_version 2"):
        distributed.create_accelerator(TrainArguments(cpu=True))
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING", "true")
    with pytest.raises(ValueError, match="--gradient-checkpointing does it"):
        distributed.create_accelerator(TrainArguments(cpu=True))
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ImportError, match="DeepSpeed is not installed"):
        distributed.create_accelerator(TrainArguments(cpu=True))


ENUMERATION = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
MEMBER = b"cbuiltins\ngetattr\n("  # then what of, its name, tR


@pytest.mark.parametrize(
    "content, message",
    [
        (pickle.dumps(os.system), "holds posix.system"),
        (b"ctorch.distributed.checkpoint.filesystem\nos\n.", "holds torch.distributed.checkpoint.filesystem.os"),
        (b"ctorch.distributed.checkpoint.metadata\nos.path\n.", "holds torch.distributed.checkpoint.metadata.os.path"),
        (MEMBER + b"ctorch\nSize\nVmro\ntR.", "holds getattr(<class 'torch.Size'>, 'mro')"),
        (MEMBER + ENUMERATION + b"V__class__\ntR.", "holds getattr(<enum '_MEM_FORMAT_ENCODING'>, '__class__')"),
        # By which __class__ would be called a member.
        (ENUMERATION + b"(N}V_member_map_\n}V__class__\nNsstb.", "changes <enum '_MEM_FORMAT_ENCODING'>"),
        (b"ctorch.serialization\n_get_layout\n(N}V__defaults__\n(I1\ntstb.", "changes <function _get_layout"),
        (
            b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n}V__init__\nNsb.",
            "changes <class 'torch.distributed.checkpoint.metadata.MetadataIndex'>",
        ),
        (MEMBER + ENUMERATION + b"(ltR.", "holds getattr(<enum '_MEM_FORMAT_ENCODING'>, [])"),
        (MEMBER + ENUMERATION + b"VTORCH_CHANNELS_LAST\nNtR.", "is damaged: "),
        (b"ctorch.serialization\n_get_layout\n(Vos.system\ntR.", "is damaged: "),
        (b"}b.", "is damaged: "),
    ],
)
def test_a_checkpoint_whose_list_of_tensors_is_none(tmp_path, content, message):
    (tmp_path / ".metadata").write_bytes(content)
    before = dict(vars(metadata._MEM_FORMAT_ENCODING)), torch.serialization._get_layout.__defaults__
    end = "" if message.startswith("is damaged") else r"( at 0x\w+>)?, which no list of tensors does$"
    with pytest.raises(pickle.UnpicklingError, match=f"^it {re.escape(message)}{end}"):
        checkpoints.check_metadata(tmp_path / ".metadata")
    assert before == (dict(vars(metadata._MEM_FORMAT_ENCODING)), torch.serialization._get_layout.__defaults__)


def test_members_of_enumerations_as_python_3_11_writes_them(tmp_path):
    content = MEMBER + ENUMERATION + b"VTORCH_CHANNELS_LAST\ntR."
    assert pickle.loads(content).name == "TORCH_CHANNELS_LAST"
    (tmp_path / ".metadata").write_bytes(content)
    checkpoints.check_metadata(tmp_path / ".metadata")
