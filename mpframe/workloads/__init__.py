"""Tasks other than classifying images, each with its data, model, objective and metric together.

    tables        a number from the columns of a CSV file
    text          the next token, the class of a text, or the part of it that matters
    speech        a string of labels from frames of features
    detection     boxes in pictures
    segmentation  a class for each pixel
    gan           images made by a generator against a discriminator

A configuration names what it uses by `_target_`, and only that is imported: nothing in mpframe
imports this package, which may import data, objectives and what is below them.
"""
