# SPDX-License-Identifier: Apache-2.0
"""Checks the setting `quotas`."""

from collections.abc import Mapping

from vllm.v1.kv_tier.hints import MAX_NAME

MAX_QUOTAS = 100
"""Most tenants with a quota, since each has its own metrics."""


def check_quotas(quotas: object) -> None:
    """Check the setting.

    Raises:
        ValueError: It is wrong. The message has the value and the fix.

    """
    setting = "--kv-offloading-config: quotas"
    if quotas is None:
        return
    if not isinstance(quotas, Mapping):
        raise ValueError(
            f"{setting} must be an object with a part of the slots for each tenant, "
            f'as in {{"tenant-a": 0.5}}, got {quotas!r}.'
        )
    if len(quotas) > MAX_QUOTAS:
        raise ValueError(
            f"{setting} must name at most {MAX_QUOTAS} tenants, got {len(quotas)}. "
            "Give quotas to those who need one; others share the rest."
        )
    for tenant, part in quotas.items():
        if not isinstance(tenant, str) or not 0 < len(tenant) <= MAX_NAME:
            raise ValueError(
                f"{setting}: a tenant must be a name of 1 to {MAX_NAME} characters, "
                f"got {tenant!r}."
            )
        is_number = isinstance(part, int | float) and not isinstance(part, bool)
        if not is_number or not 0 < part <= 1:
            raise ValueError(
                f"{setting}: the part of {tenant!r} must be a number above 0 and up "
                f"to 1, got {part!r}."
            )
    if (total := sum(quotas.values())) > 1 + 1e-9:
        raise ValueError(
            f"{setting} are {total:g} of the slots together, which must be at most 1. "
            "Lower some of them."
        )
