"""The commands of `d3d-hf`, one module each: `add_command` says what it takes, `run` does it."""
