"""The schema of the config: types, ranges and a line of help for every key. No torch here."""
