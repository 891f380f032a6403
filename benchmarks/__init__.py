"""Measurements: `speed/` of this project, `peers/` beside other frameworks, `research/` of what it teaches."""
