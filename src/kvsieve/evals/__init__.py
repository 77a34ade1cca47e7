"""Checks and measurements of a whole model: recall of a pass key, speed by depth."""
