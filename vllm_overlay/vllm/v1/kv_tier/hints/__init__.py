# SPDX-License-Identifier: Apache-2.0
"""What clients say of the KV of their requests: the schema, the APIs that carry it, and
what the scheduler makes of it.

`schema` imports nothing of the tier. `http` and `conversation_api` run in the process
that takes requests and import no scheduler.
"""
