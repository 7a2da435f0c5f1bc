"""The model to train: a new one of any family, or one from a folder."""

import dataclasses
import itertools
from collections.abc import Iterable
from pathlib import Path

import yaml
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from ..hub import access
from ..malloc import return_freed_memory
from ..messages import first_line, nearest
from ..modeling import FAMILIES
from ..modeling.model import RecurrentPreTrainedModel
from ..parallel.context import check_split_config
from .arguments import DataArguments, ModelArguments, TrainArguments, flag
from .tokenizer import END_OF_TEXT, MIN_VOCAB_SIZE, TokenizerSize, tokenizer_size

# Small enough for two CPU cores; a family's own defaults are those of its paper's smaller language models.
DEFAULT_MODEL_TYPE = "mingru"
DEFAULT_SIZE = {"hidden_size": 256, "num_hidden_layers": 4}


def families() -> dict[str, type[PreTrainedConfig]]:
    """The configuration class of each family, by model type."""
    return {config_class.model_type: config_class for config_class in FAMILIES}


def parse_overrides(text: str, source: str = "--config-overrides") -> dict[str, object]:
    """`key=value,key=value` as a dict; values are YAML scalars: 3, 1e-5, true, null, text.

    Raises:
        ValueError: an item is not `key=value`, or a key is given twice.
    """
    overrides = {}
    for item in filter(None, text.split(",")):
        name, equals, value = item.partition("=")
        if not (equals and name.strip()):
            raise ValueError(f"{source}: expected key=value,key=value, got {item!r}")
        if name.strip() in overrides:
            raise ValueError(f"{source}: {name.strip()} is given twice")
        try:
            value = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ValueError(f"{source}: {name}: got {value!r}, expected a YAML scalar") from None
        if isinstance(value, str):
            try:
                value = float(value)  # YAML 1.1 takes 1e-5 for text
            except ValueError:
                pass
        overrides[name.strip()] = value
    return overrides


def create_config(args: ModelArguments, tokenizer: TokenizerSize) -> PreTrainedConfig:
    """The configuration that the arguments describe, with the tokenizer's size and special tokens.

    Raises:
        ValueError: an unknown family, a field that the family does not have, a value that does not fit.
    """
    model_type = args.model_type or DEFAULT_MODEL_TYPE
    if model_type not in families():
        raise ValueError(f"--model-type {model_type}: no such family{nearest(model_type, families())}")
    config_class = families()[model_type]
    inherited = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    valid = [field.name for field in dataclasses.fields(config_class) if field.name not in inherited]
    flags, overrides = args.config_fields(), parse_overrides(args.config_overrides or "")
    fields = {name: int(value) if float(value).is_integer() else value for name, value in flags.items()}
    for source, names in ((None, flags), ("--config-overrides", overrides)):
        for name in names:
            if name not in valid:
                what = flag(name) if source is None else f"{source}: {name}"
                raise ValueError(f"{what} is not a field of {config_class.__name__}{nearest(name, valid)}")
            if source is not None and (name in flags or name == "vocab_size" or name.endswith("_token_id")):
                reason = "is also given as a flag" if name in flags else "is the tokenizer's to give"
                raise ValueError(f"{source}: {name} {reason}")
    tokens = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    try:
        return config_class(**(DEFAULT_SIZE | fields | overrides), vocab_size=tokenizer.size, **tokens)
    except StrictDataclassError as error:  # "Validation error for field 'candidate':", and what is wrong with it below
        name = next((name for name in flags | overrides if f"'{name}'" in first_line(error)), None)
        what = config_class.__name__ if name is None else flag(name) if name in flags else f"--config-overrides: {name}"
        raise ValueError(f"{what}: {error.__cause__ or ' '.join(str(error).split())}") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{config_class.__name__}: {' '.join(str(error).split())}") from None


def create_model(args: ModelArguments, tokenizer: TokenizerSize) -> PreTrainedModel:
    """A new causal language model. Raises what `create_config` raises."""
    return AutoModelForCausalLM.from_config(create_config(args, tokenizer))


def check_folder(name: str, what: str = "--model", peers: Iterable[str] = ()) -> PreTrainedConfig:
    """The configuration of a model of ours, in a folder or on the Hub.

    Args:
        what: the argument that `name` was given as, for the messages.
        peers: model types that will do as well.

    Raises:
        ValueError: there is no model, or it is of another type.
    """
    # A Hub name is "owner/name"; what begins with a folder that is here is meant as a folder.
    owner, slash, rest = name.partition("/")
    if not Path(name).exists() and (not (owner and slash) or "/" in rest or Path(owner).exists()):
        raise ValueError(f"{what} {name}: no such folder")
    if Path(name).exists() and not Path(name).is_dir():
        raise ValueError(f"{what} {name}: not a folder")
    if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
        raise ValueError(f"{what} {name}: the folder has no config.json, so it holds no model")
    access.prepare(name)
    known = sorted({*families(), *peers})
    try:
        # Looked at before Transformers does: it would ask whether it may run code that the folder brings for the type.
        kind = PreTrainedConfig.get_config_dict(name)[0].get("model_type")
        config = AutoConfig.from_pretrained(name, trust_remote_code=False) if kind in (None, *known) else None
    except Exception as error:  # a broken file, an unknown type, no network: each raises its own
        part = "its config.json cannot be used: " if Path(name).exists() else ""
        raise ValueError(f"{what} {name}: {part}{access.reason(error, name)}") from error
    kind = kind if config is None else config.model_type
    if kind not in known:
        raise ValueError(f"{what} {name}: is of type {kind!r}; this package knows {', '.join(known)}")
    return config


def load_model(
    name: str, what: str = "--model", model_class: type = AutoModelForCausalLM, peers: Iterable[str] = ()
) -> PreTrainedModel:
    """A model of ours, a causal language model unless `model_class` is another, from a folder or the Hub.

    Args:
        what: the argument that `name` was given as, for the messages.
        peers: model types that will do as well.

    Raises:
        ValueError: there is none, it is of another type, or its weights cannot be read, are not those of its
            configuration, or are not finite.
    """
    check_folder(name, what, peers)
    verbosity = logging.get_verbosity()
    try:
        logging.set_verbosity_error()  # it prints as a table what is raised below
        model, report = model_class.from_pretrained(
            name, output_loading_info=True, ignore_mismatched_sizes=True, trust_remote_code=False
        )
    except Exception as error:  # safetensors and the Hub raise their own
        raise ValueError(f"{what} {name}: its weights cannot be loaded: {access.reason(error, name)}") from error
    finally:
        logging.set_verbosity(verbosity)
    for keys, fault in (
        (report["missing_keys"], "lack {}"),
        (report["mismatched_keys"], "have another shape than its configuration gives them: {}"),
        (report["unexpected_keys"], "hold what its configuration has no place for: {}"),
        (not_finite(model), "are not finite: {}"),
    ):
        if keys:
            names = sorted(key if isinstance(key, str) else key[0] for key in keys)
            raise ValueError(
                f"{what} {name}: its weights {fault.format(', '.join(names[:3]))}" + " ..." * (len(names) > 3)
            )
    return model


def not_finite(model: PreTrainedModel) -> list[str]:
    """Names of the weights and the running statistics that hold an infinity or NaN."""
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    return [name for name, tensor in tensors if not tensor.isfinite().all()]


def brings_tokenizer(model_args: ModelArguments, data_args: DataArguments) -> bool:
    """Whether the tokenizer is that of the model that a run continues from."""
    if model_args.model is None:
        return False
    return data_args.tokenizer == "bpe" or Path(data_args.tokenizer).resolve() == Path(model_args.model).resolve()


def planned_config(model_args: ModelArguments, data_args: DataArguments, args: TrainArguments) -> PreTrainedConfig:
    """The configuration that a run's arguments describe, as far as it is known before a text is read.

    Raises:
        ValueError: what `create_config` and `check_folder` refuse, a tokenizer that does not fit the model, a model
            that cannot be trained as the arguments ask for.
    """
    if model_args.model is None:
        config = create_config(model_args, tokenizer_size(data_args))
    else:
        config = check_folder(model_args.model)
        if not brings_tokenizer(model_args, data_args):
            check_fit(tokenizer_size(data_args), config)
    if args.context_parallel > 1:
        check_split_config(config)
    if args.recurrence_learning_rate is not None and not FAMILIES[type(config)][AutoModel].recurrence_parameters:
        raise ValueError(
            f"--recurrence-learning-rate {args.recurrence_learning_rate:g}: a {config.model_type} has no parameters "
            "with a learning rate of their own"
        )
    return config


def check_fit(tokenizer: TokenizerSize, config: PreTrainedConfig) -> None:
    """
    Raises:
        ValueError: the tokenizer has more tokens than the model, or others mark where texts begin and end.
    """
    if tokenizer.size > config.vocab_size:
        if (tokenizer.size, config.vocab_size) == (MIN_VOCAB_SIZE, MIN_VOCAB_SIZE - 1):
            raise ValueError(
                f"the tokenizer does not fit the model: the model's vocabulary is of {config.vocab_size} bytes alone, "
                f"and training needs {END_OF_TEXT} beside them, to mark where documents end"
            )
        raise ValueError(
            f"the tokenizer does not fit the model: it has {tokenizer.size} tokens, the model's vocabulary has "
            f"{config.vocab_size}"
        )
    for name in ("bos_token_id", "eos_token_id"):
        one, other = getattr(tokenizer, name), getattr(config, name)
        if one is not None and other is not None and one not in (other if isinstance(other, list) else [other]):
            raise ValueError(f"the tokenizer does not fit the model: its {name} is {one}, the model's is {other}")


def checkpoint_activations(model: PreTrainedModel) -> dict[str, bool]:
    """Let the blocks run again in the backward pass, where only their inputs have been kept. What tensors on the CPU
    free goes back to the system from now on; it would lie between those that are kept.

    Returns:
        What each call of the model is to be given, by which the head takes less memory too: the loss is computed in
        pieces. Nothing for a model that is not ours.
    """
    if model.device.type == "cpu":
        return_freed_memory()
    # Named so since Transformers 5.23, which warns of the older name.
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    return {"skip_logits": True} if isinstance(model, RecurrentPreTrainedModel) else {}
