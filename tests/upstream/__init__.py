# SPDX-License-Identifier: Apache-2.0
"""Runs upstream vLLM's own test modules against a build of ours."""
