"""Text: its next token, its class, or a part of it.

    next_token    windows of any text for a language model; token_files.py maps its file into memory
    text_folder   one folder of texts for each class
    tweet_spans   the part of a text that carries its sentiment; tweets.py reads or makes the rows

wordpiece.py turns words into numbers, with a vocabulary that is trained on the spot or given as a
file, and padding.py makes batches of different lengths.
"""
