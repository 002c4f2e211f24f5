"""Whether a model of the Hugging Face hub can be had. Asked once and shortly: transformers itself tries for most of a minute."""

from __future__ import annotations

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError is of the client that the hub's version has
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    HTTPError,
    RepositoryNotFoundError,
)

CONFIG = "config.json"
TIMEOUT_S = 5.0


def require_on_hub(model_id: str, timeout_s: float = TIMEOUT_S) -> None:
    """Returns if the model's config.json is in the local cache, or can be fetched. Raises ValueError with one line that names the fix."""
    try:
        if isinstance(try_to_load_from_cache(model_id, CONFIG), str):
            return
        if constants.HF_HUB_OFFLINE:
            raise ValueError(f"model {model_id!r} is not in the cache, and HF_HUB_OFFLINE forbids to fetch it: unset it, or give a folder")
        get_hf_file_metadata(hf_hub_url(model_id, CONFIG), timeout=timeout_s)
    except HFValidationError as error:
        raise ValueError(f"model {model_id!r} is neither a folder that exists nor a Hugging Face id") from error
    except GatedRepoError as error:
        raise ValueError(
            f"model {model_id!r} is gated: accept its terms at {constants.ENDPOINT}/{model_id}, and set HF_TOKEN where Ray is started"
        ) from error
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"{constants.ENDPOINT} has no model {model_id!r} that may be read here: check the id; a private one needs HF_TOKEN where Ray "
            "is started"
        ) from error
    except EntryNotFoundError as error:
        raise ValueError(f"model {model_id!r} has no {CONFIG}: give one in the format of transformers") from error
    except (HTTPError, OSError) as error:
        raise ValueError(
            f"model {model_id!r} is not in the cache, and {constants.ENDPOINT} cannot be reached ({_first_line(error)}): check the "
            "network, or give a folder that has the model"
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
