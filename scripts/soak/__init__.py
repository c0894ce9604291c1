# SPDX-License-Identifier: Apache-2.0
"""Minutes of mixed HTTP load on a server with the host tier: `python -m soak`."""
