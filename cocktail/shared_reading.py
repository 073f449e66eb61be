"""Whether questions that share a reading of their document are answered as each would be alone."""

from __future__ import annotations

from cocktail.config import Config
from cocktail.errors import UsageError
from cocktail.job import Job
from cocktail.rope import depends_on_length


def check_alike(job: Job, config: Config) -> None:
    """Returns if no question of a run changes how the document is read for another one.

    Args:
        job: the run.
        config: its settings.

    Raises:
        UsageError: the questions have to be asked one at a time.
    """
    if len(job.reading.suffixes) == 1:
        return
    if job.reading.truncated_tokens:
        why = "the document is longer than the model's window, and each question keeps the chunks closest to it"
    elif depends_on_length(job.reading.hf_config):
        why = "the model's rotary embedding depends on the longest question"
    elif job.residency.kv_policy != config.kv:
        why = f"the KV cache of all of them does not fit at {config.kv}"
    else:
        return
    raise UsageError(f"These questions cannot share a reading: {why}.", "Ask one question at a time.")
