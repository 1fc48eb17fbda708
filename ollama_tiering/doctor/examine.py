"""All checks of this machine, in the order in which a person meets their subjects: build, storage,
what runs.
"""

from __future__ import annotations

from ollama_tiering import config
from ollama_tiering.doctor import (
    check_build,
    check_running,
    check_service,
    check_storage,
    check_variables,
)
from ollama_tiering.doctor.check import Check, guarded
from ollama_tiering.errors import ConfigError


def examine() -> list[Check]:
    found = guarded("build", check_build.checks)
    found += guarded("service", check_service.checks)
    try:
        settings, broken = config.readable()
    except ConfigError as error:  # a user without a home
        return [*found, check_running.broken_settings(error.message, error.hint or "")]
    if broken:  # the checks below are of what can be read
        found.append(check_running.broken_settings(broken.message, broken.hint or ""))
    found += check_variables.checks()
    found += guarded("storage", lambda: check_storage.checks(settings.sidecar))
    found += guarded("services", lambda: check_running.checks(settings.sidecar))
    return found
