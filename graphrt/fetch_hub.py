"""A model of Hugging Face's hub, through `huggingface_hub` where that is installed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from graphrt.config import load_config
from graphrt.errors import ModelError
from graphrt.fetch import FetchError, check_disk
from graphrt.weights import INDEX, RECORD, SINGLE

_WANTED = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "chat_template.jinja", "chat_template.json"),
)


def fetch_hub(repo: str, folder: Path) -> None:
    """Downloads "owner/name" into the existing, empty `folder`, the small files first, and checks its configuration.

    ModelError when it is no model that can be served; FetchError when the hub cannot be reached or refuses.
    """
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise ModelError(f"fetching {repo} needs huggingface_hub: run 'pip install \"graphrt[hub]\"'") from None
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    try:
        info = api.model_info(repo, files_metadata=True, timeout=20)
        sizes = {s.rfilename: s.size or 0 for s in info.siblings or []}
        if "config.json" not in sizes:
            raise ModelError(f"{repo} has no config.json: it is not a model in the Hugging Face layout")
        _download(api, repo, info.sha, [n for n in _WANTED if n in sizes], folder)
        load_config(folder)
        if "tokenizer.json" not in sizes:
            raise ModelError(f"{repo} has no tokenizer.json, which is needed")
        weights = [SINGLE] if SINGLE in sizes else _shards(api, repo, info.sha, sizes, folder)
        check_disk(folder, sum(sizes.get(n, 0) for n in weights), repo)
        _download(api, repo, info.sha, weights, folder)
    except ModelError:
        raise
    except Exception as error:  # the hub's own classes, those of its HTTP client, and OSError
        raise FetchError(f"{repo} cannot be fetched from Hugging Face: {_reason(error)}") from None
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    license_ = getattr(info.card_data, "license", None) if info.card_data else None
    source = {"kind": "huggingface", "repository": repo, "revision": info.sha}
    record = {"format": 1, "source": source, "license": license_, "files": _recorded(info.siblings or [], folder)}
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n")


def _download(api: Any, repo: str, revision: str | None, names: list[str], folder: Path) -> None:
    for name in names:
        api.hf_hub_download(repo, name, revision=revision, local_dir=folder)


def _shards(api: Any, repo: str, revision: str | None, sizes: dict[str, int], folder: Path) -> list[str]:
    if INDEX not in sizes:
        raise ModelError(f"{repo} has neither {SINGLE} nor {INDEX}: only safetensors weights are supported")
    _download(api, repo, revision, [INDEX], folder)
    return sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))


def _recorded(siblings: list[Any], folder: Path) -> dict[str, Any]:
    """The hub's own SHA-256 of the large files, for `graphrt pull --verify`."""
    large = {s.rfilename: s.lfs for s in siblings if getattr(s, "lfs", None) and (folder / s.rfilename).is_file()}
    return {name: {"size": lfs.size, "sha256": lfs.sha256} for name, lfs in large.items() if name.endswith("tensors")}


def _reason(error: Exception) -> str:
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
