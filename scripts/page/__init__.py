# SPDX-License-Identifier: Apache-2.0
"""One self-contained HTML page of a demo or benchmark run."""
