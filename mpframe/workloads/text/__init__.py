"""Text: its next token, its class, or the part of it that carries its sentiment."""
