"""Models, as functions of the data's shape."""
