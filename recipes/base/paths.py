# SPDX-License-Identifier: Apache-2.0
"""Models, data and folders that an option names, looked at before any process starts.

Each function returns when nothing speaks against it, and raises RecipeError where a run could only
fail; names that may be of the hub are looked up there, if it answers at once.
"""

import difflib
import re
from pathlib import Path

from deepytorch.recipes.base.config import RecipeError

_PATIENCE_S = 3.0
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")
_FILES = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".safetensors", ".gguf")


def near(path: Path) -> str:
    """ " Did you mean ...?" with the most alike name beside ``path``, or ""."""
    folder = path.parent
    names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    close = difflib.get_close_matches(path.name, names, n=1)
    return f". Did you mean {folder / close[0]}?" if close else ""


def refuse_missing(key: str, path: Path) -> None:
    """RecipeError unless there is something at ``path``."""
    if path.exists():
        return
    parent = next((folder for folder in path.parents if folder.exists()), Path("/"))
    there = f" (there is no {path.parent} either)" if parent != path.parent else ""
    raise RecipeError(f"{key}={path}: no such file or folder{there}{near(path)}")


def refuse_wrong_folder(key: str, path: Path) -> None:
    """RecipeError unless ``path`` is a folder."""
    refuse_missing(key, path)
    if not path.is_dir():
        raise RecipeError(f"{key}={path} is no folder")


def refuse_wrong_output(folder: Path) -> None:
    """RecipeError if a file is where ``output_dir``, or a folder above it, would be made."""
    for path in (folder, *folder.parents):
        if path.is_dir():
            return
        if path.exists():
            raise RecipeError(
                f"output_dir: {path} is a file: name a folder, which need not be there yet"
            )


def refuse_wrong_resume(resume: str, name: str) -> None:
    """RecipeError unless ``resume`` is auto, or names a folder."""
    if resume == "auto":
        return
    try:
        refuse_wrong_folder("resume", Path(resume))
    except RecipeError as error:
        raise RecipeError(f"{error}. resume=auto takes the newest run called {name}") from error


def refuse_wrong_model(model: str, *, kind: str = "model") -> None:
    """RecipeError unless ``model`` is a checkpoint's folder or an id of the hub.

    ``kind``: "model" for transformers' layout, "diffusers" for a pipeline's.
    """
    path = Path(model)
    wanted = "config.json" if kind == "model" else "model_index.json"
    if path.is_dir():
        if (path / "adapter_config.json").is_file() and not (path / wanted).is_file():
            raise RecipeError(
                f"model={model} is an adapter, which would be lost: take the whole model with the "
                "adapter in it, as merge_adapter=true saves it"
            )
        if not (path / wanted).is_file():
            raise RecipeError(_no_checkpoint(path, wanted))
        return
    if path.exists():
        raise RecipeError(
            f"model={model} is a file: name the folder that it is in, with {wanted} in it"
        )
    if is_local(model):
        refuse_missing("model", path)
    import huggingface_hub

    if not isinstance(huggingface_hub.try_to_load_from_cache(model, wanted), str):
        _refuse_unknown_id("model", model)


def is_local(name: str) -> bool:
    """Whether ``name`` can only be a path: no id of the hub is written so."""
    path = Path(name)
    is_id = _HUB_ID.fullmatch(name) is not None and path.suffix.lower() not in _FILES
    is_id = is_id and not name.startswith(".")
    return path.exists() or not is_id or (len(path.parts) > 1 and Path(path.parts[0]).is_dir())


def _no_checkpoint(path: Path, wanted: str) -> str:
    below = sorted(file.parent for file in path.glob(f"*/{wanted}"))
    hint = f". Did you mean {below[-1]}?" if below else ""
    return f"model={path} has no {wanted}: name a checkpoint's folder{hint}"


def refuse_unknown_data(data: str) -> None:
    """RecipeError unless ``data``, ``name`` or ``name:subset``, is a data set of the hub."""
    from huggingface_hub import constants

    name = data.partition(":")[0]
    cached = Path(constants.HF_HOME) / "datasets" / name.replace("/", "___")
    if not cached.is_dir():
        _refuse_unknown_id("data", name)


def _refuse_unknown_id(key: str, name: str) -> None:
    import huggingface_hub
    from huggingface_hub import errors

    hub = huggingface_hub.HfApi()
    try:
        ask = hub.model_info if key == "model" else hub.dataset_info
        ask(name, timeout=_PATIENCE_S)
    except errors.GatedRepoError as error:
        raise RecipeError(
            f"{key}={name} is gated: accept its terms on the hub, then hf auth login"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise RecipeError(
            f"{key}={name}: neither a path here nor on the hub{near(Path(name))}. For a private "
            "one: hf auth login"
        ) from error
    except Exception as error:  # no network, a proxy, a hub that is down
        raise RecipeError(
            f"{key}={name}: no path here{near(Path(name))}, no cached copy, and the hub can't be "
            f"asked for it ({type(error).__name__})"
        ) from error
