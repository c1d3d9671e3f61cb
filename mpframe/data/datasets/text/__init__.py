"""Text: its next token.

next_token.py cuts any text into windows for a language model; token_files.py maps its file into
memory, or joins a folder's files.
"""
