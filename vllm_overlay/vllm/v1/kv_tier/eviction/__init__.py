# SPDX-License-Identifier: Apache-2.0
"""Which host slot makes room: orders keys, and knows neither bytes nor slots."""
