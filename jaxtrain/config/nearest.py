"""Which key somebody meant who wrote one that doesn't exist.

The whole tree is searched, not only the section where the key was written: a key at the wrong level, a habit from
another trainer (`num_layers`, `lr`) and a slip of the finger are the same kind of mistake.
"""

from difflib import SequenceMatcher, get_close_matches
from functools import cache

from jaxtrain.config.tree import Key, keys

ELSEWHERE = {
    "optimizer.learning_rate": ["lr", "peak_lr", "max_lr", "step_size"],
    "optimizer.weight_decay": ["wd"],
    "optimizer.clip": ["max_norm", "max_grad_norm", "grad_clip", "clip_grad_norm", "gradient_clipping"],
    "optimizer.b1": ["beta1", "adam_beta1"],
    "optimizer.b2": ["beta2", "adam_beta2"],
    "optimizer.epsilon": ["eps", "adam_epsilon"],
    "optimizer.momentum": ["beta", "mom"],
    "optimizer.frozen": ["freeze", "frozen_params", "freeze_layers"],
    "optimizer.schedule.warmup_tokens": ["lr_warmup_tokens"],
    "optimizer.schedule.decay": ["decay_fraction", "cooldown", "decay_ratio"],
    "batch_ramp": ["rampup_batch_size", "batch_size_rampup", "batch_schedule"],
    "ema.decay": ["ema_decay", "ema_rate"],
    "optimizer.schedule": ["scheduler", "lr_scheduler", "lr_schedule"],
    "pipeline.schedule": ["pipeline_schedule", "pipeline_parallel_schedule", "pp_schedule"],
    "mesh.pipeline": ["pp", "pipeline_parallel_size", "pipeline_parallelism", "pipeline_parallel_degree"],
    "pipeline.chunks": ["virtual_pipeline_size", "num_virtual_stages", "circular_repeats", "interleave"],
    "sharding.zero": ["zero_stage", "zero", "zero_optimization"],
    "optimizer.schedule.warmup": ["warmup_steps", "warmup_iters", "lr_warmup_steps"],
    "optimizer.schedule.final": ["min_lr", "final_lr", "end_lr", "min_lr_ratio"],
    "steps": ["max_steps", "train_steps", "train_iters", "iterations", "total_steps"],
    "max_hours": ["max_time", "time_limit", "max_wall_time"],
    "init_from": ["init_checkpoint", "pretrained", "load_from", "load_path", "finetune_from"],
    "global_batch": ["batch", "batch_size", "global_batch_size", "train_batch_size"],
    "microbatch": ["micro_batch_size", "per_device_batch_size", "accumulation", "gradient_accumulation_steps"],
    "precision": ["dtype", "compute_dtype", "bf16", "mixed_precision"],
    "run_dir": ["output", "output_dir", "out_dir", "save_dir", "run_name"],
    "remat": ["activation_checkpointing", "gradient_checkpointing", "recompute", "remat_policy"],
    "mesh.tensor": ["tp", "tensor_parallel", "tensor_parallelism", "tensor_parallel_size"],
    "mesh.fsdp": ["dp_shard", "fsdp_size", "fsdp_parallelism", "zero"],
    "mesh.data": ["dp", "dp_replicate", "data_parallel", "data_parallelism"],
    "model.embed": ["d_model", "dim", "emb_dim", "hidden_dim", "hidden_size", "n_embd"],
    "model.mlp": ["d_ff", "ffn_dim", "mlp_dim", "intermediate_size", "ffn_hidden_size"],
    "model.layers": ["depth", "hidden_layers", "n_layer", "decoder_layers"],
    "model.heads": ["attention_heads", "n_head"],
    "model.kv_heads": ["key_value_heads", "query_groups", "n_kv_heads"],
    "model.vocab": ["vocab_size"],
    "model.norm_epsilon": ["eps", "norm_eps", "rms_norm_eps"],
    "model.tied_embeddings": ["tie_word_embeddings", "tie_embeddings"],
    "model.window": ["sliding_window"],
    "data.sequence": ["seq_len", "seq_length", "context_length", "max_seq_len", "max_length", "block_size"],
    "data.dir": ["path", "data_path", "dataset", "dataset_path"],
    "data.workers": ["num_workers", "loader_workers"],
    "data.epochs": ["num_epochs", "num_train_epochs"],
    "eval.every": ["eval_every", "eval_interval", "eval_steps"],
    "checkpoint.every": ["checkpoint_every", "save_every", "save_steps", "checkpoint_interval"],
    "checkpoint.keep": ["max_to_keep", "save_total_limit", "keep_last"],
    "checkpoint.keep_every": ["keep_period", "keep_interval"],
    "checkpoint.keep_best": ["save_best", "save_best_only"],
    "checkpoint.dir": ["checkpoint_dir", "ckpt_dir"],
}
CLOSE_ENOUGH = 0.55
LEAF_WEIGHT = 0.75
INITIALS_WEIGHT = 0.9


def nearest_keys(path: str, *, holds_section: bool = False) -> list[str]:
    """The existing keys that `path` most likely means, best first and more than one only if they are equally likely.

    Empty if nothing is close. `holds_section` says that a mapping was written under it.
    """
    scores = {key.path: _score(path, key, holds_section) for key in keys().values()}
    best = max(scores.values())
    return [key for key, score in scores.items() if score > best - 1e-9][:3] if best >= CLOSE_ENOUGH else []


def suggestion(path: str, *, holds_section: bool = False) -> str:
    """What to write instead of an unknown key, as the end of a sentence."""
    found = nearest_keys(path, holds_section=holds_section)
    if found:
        return f"did you mean {' or '.join(found)}?"
    section = path.rpartition(".")[0]
    while section and section not in keys():
        section = section.rpartition(".")[0]
    siblings = [key for key in keys() if key.rpartition(".")[0] == section]
    return f"valid keys are {', '.join(siblings)}" if siblings else f"{section} holds a value, not keys"


def nearest_text(given: str, choices: list[str]) -> str:
    """The choice closest to what was given; empty if none is close."""
    close = get_close_matches(given.lower(), choices, n=1, cutoff=0.4)
    return close[0] if close else ""


def _score(path: str, key: Key, holds_section: bool) -> float:
    section, _, name = path.rpartition(".")
    key_section, _, key_name = key.path.rpartition(".")
    names = [key_name, *ELSEWHERE.get(key.path, [])]
    leaf = max(_similar(name.lower(), known) for known in names)
    if "_" in key_name and len(name) <= 4:
        initials = "".join(word[0] for word in key_name.split("_"))
        leaf = max(leaf, INITIALS_WEIGHT * _similar(name, initials))
    place = _similar(section, key_section) if section else 0.5
    other_kind = holds_section != key.is_section and name.lower() not in ELSEWHERE.get(key.path, [])
    return LEAF_WEIGHT * leaf + (1 - LEAF_WEIGHT) * place - (0.1 if other_kind else 0.0)


@cache
def _similar(left: str, right: str) -> float:
    return SequenceMatcher(None, left, right).ratio()
