"""Tasks other than classifying images, each with its data, model, objective and metric together.

    tables        a number from the columns of a CSV file
    text          the next token, the class of a text, or the part of it that matters
    speech        a string of labels from frames of features
    detection     boxes in pictures
    segmentation  a class for each pixel
    gan           images made by a generator against a discriminator

A configuration names what it uses by `_target_`, and only that is imported: nothing in mpframe
imports this package. The arguments of a dataset or a model are explained in its file of
conf/dataset or conf/model, and a ConfigError tells the range of one that is out of it.
"""
