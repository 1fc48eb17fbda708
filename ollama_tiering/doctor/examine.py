"""All checks of this machine, in the order in which a person meets their subjects: build, storage,
what runs.
"""

from __future__ import annotations

from ollama_tiering import config
from ollama_tiering.doctor import check_build, check_running, check_service, check_storage
from ollama_tiering.doctor.check import Check, guarded
from ollama_tiering.errors import ConfigError


def examine() -> list[Check]:
    found = guarded("build", check_build.checks)
    found += guarded("service", check_service.checks)
    try:
        settings = config.load_sidecar()
    except ConfigError as error:
        return [*found, check_running.broken_settings(error.message, error.hint or "")]
    found += guarded("storage", lambda: check_storage.checks(settings))
    found += guarded("services", lambda: check_running.checks(settings))
    return found
