"""The model: its preparation, its prepared folder, and the lean decoder on torch."""
