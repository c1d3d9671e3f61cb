"""Tasks, each with its data, model, objective and metric together.

    images        the networks; the data are in mpframe/data
    tables        a number from the columns of a CSV file
    text          the next token, the class of a text, or the part of it that matters
    speech        a string of labels from frames of features
    detection     boxes in pictures
    segmentation  a class for each pixel
    gan           images made by a generator against a discriminator

A configuration names what it uses by `_target_`, and only that is imported: nothing else in
mpframe imports this package. conf/dataset and conf/model explain the arguments of the datasets and
models, and a ConfigError tells the range of one that is out of it.
"""
