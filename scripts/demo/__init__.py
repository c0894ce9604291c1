# SPDX-License-Identifier: Apache-2.0
"""`make demo`: what the host tier does, on a served model over HTTP."""
