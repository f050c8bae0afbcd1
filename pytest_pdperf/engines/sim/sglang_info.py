"""What a simulated SGLang engine says about itself when a router asks: `/server_info`, `/model_info`, `/v1/loads`."""

from __future__ import annotations

from datetime import UTC, datetime

from pytest_pdperf.spec.roles import Role

from .profile import VERSION
from .settings import Settings
from .sglang_metrics import Levels

MODES = {Role.PREFILL: "prefill", Role.DECODE: "decode", Role.SERVER: "null"}


def model_info() -> dict[str, object]:
    """Body of `/model_info`.

    It names no model and no tokenizer: a router that is given a name tries to load it, from the network if need be.
    """
    return {
        "model_path": "",
        "tokenizer_path": "",
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": "default",
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": "pdperf_simulated",
        "architectures": ["PdperfSimulated"],
    }


def server_info(settings: Settings) -> dict[str, object]:
    """Body of `/server_info`: the arguments that routers look at."""
    return {
        "model_path": "",
        "tokenizer_path": "",
        "served_model_name": settings.served_model,
        "host": settings.host,
        "tp_size": settings.tensor_parallel,
        "dp_size": 1,
        "disaggregation_mode": MODES[settings.role],
        "disaggregation_bootstrap_port": settings.side_channel_port,
        "load_balance_method": "follow_bootstrap_room" if settings.role is Role.PREFILL else "round_robin",
        "context_length": settings.max_model_len,
        "max_running_requests": settings.max_seqs,
        "chunked_prefill_size": settings.token_budget,
        "page_size": settings.profile.block_tokens,
        "max_total_num_tokens": total_tokens(settings),
        "disable_radix_cache": True,
        "internal_states": [{"dp_rank": 0}],
        "version": VERSION,
    }


def loads(settings: Settings, levels: Levels, now: float) -> dict[str, object]:
    """Body of `/v1/loads`; `now` is seconds since the epoch."""
    used = used_tokens(settings, levels)
    load = {
        "timestamp": now,
        "dp_rank": 0,
        "num_running_reqs": levels.running,
        "num_waiting_reqs": levels.queued,
        "num_waiting_uncached_tokens": 0,
        "num_used_tokens": used,
        "num_total_tokens": used,
        "num_active_tokens": used,
        "max_total_num_tokens": total_tokens(settings),
        "max_running_requests": settings.max_seqs,
        "token_usage": round(levels.usage, 6),
        "gen_throughput": 0.0,
        "cache_hit_rate": 0.0,
        "utilization": 0.0,
    }
    return {
        "timestamp": datetime.fromtimestamp(now, UTC).isoformat(),
        "version": VERSION,
        "accelerator": "simulated",
        "num_accelerators": settings.tensor_parallel,
        "loads": [load],
    }


def old_loads(settings: Settings, levels: Levels, tick: float) -> list[dict[str, object]]:
    """Body of `/get_load`, the older shape; `tick` is the engine's own clock."""
    return [
        {
            "dp_rank": 0,
            "num_reqs": levels.running + levels.queued,
            "num_waiting_reqs": levels.queued,
            "num_tokens": used_tokens(settings, levels),
            "num_pending_tokens": 0,
            "ts_tic": tick,
        }
    ]


def total_tokens(settings: Settings) -> int:
    """Tokens that the KV cache holds."""
    return settings.kv_blocks * settings.profile.block_tokens


def used_tokens(settings: Settings, levels: Levels) -> int:
    """Tokens in use, to whole blocks."""
    return round(levels.usage * total_tokens(settings))
