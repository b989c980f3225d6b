"""Refiners by name: what stands between a backbone's rows and the drafter's lm_head."""

from __future__ import annotations

from paceline.models.refiners.none import NoRefiner

REFINERS = {"none": NoRefiner}
