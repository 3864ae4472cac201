"""Text at the edge of the system: chat templates, scripts, and tokens back into text. No torch here."""
