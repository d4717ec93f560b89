"""The market as an agent lives in it: account, environment, presets."""
