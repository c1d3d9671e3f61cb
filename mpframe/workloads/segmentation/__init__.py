"""Images with a class for each pixel."""
